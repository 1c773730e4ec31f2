#include "cuda/cuda_passes.hpp"
#include "syncbn/error.hpp"

namespace syncbn::cuda {

void require() {
  throw Unavailable(
      "this libsyncbn was built without CUDA; tensors must be on the CPU (device kCpu)");
}

}  // namespace syncbn::cuda
