// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_memory.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/error.hpp"

// What a build without CUDA answers.
namespace syncbn::cuda {

void require_built() {
  throw Unavailable(
      "this libsyncbn was built without CUDA, so tensors must be on the CPU; to build it with "
      "CUDA, "
      "install the CUDA toolkit (nvcc 12.8 or newer) and configure with -D SYNCBN_CUDA=ON");
}

std::int64_t workspace_words(DType, std::int64_t) {
  require_built();
  return 0;
}
void local_moments(const TensorView&, const MaskView&, const ForwardCall&, std::int64_t*,
                   std::int64_t*, const Stream&) {
  require_built();
}
void finalize_moments(const std::int64_t*, DType, int, double*, double*, double*, std::int64_t*,
                      std::int64_t, double, const Stream&) {
  require_built();
}
void finalize_moments(const std::int64_t*, DType, int, double*, double*, double*, std::int64_t*,
                      std::int64_t, double, const RunningStatistics&, std::optional<double>,
                      const Stream&) {
  require_built();
}
void local_welford(const TensorView&, const MaskView&, const ForwardCall&, std::int64_t*,
                   const Stream&) {
  require_built();
}
void merge_welford(const std::int64_t*, DType, int, double*, double*, double*, std::int64_t*,
                   std::int64_t, double, const Stream&) {
  require_built();
}
void normalize(const Normalization&, const Stream&) { require_built(); }
void update_running_statistics(const RunningStatistics&, const double*, const double*,
                               const std::int64_t*, std::int64_t, std::optional<double>,
                               const Stream&) {
  require_built();
}
void evaluation_statistics(const TensorView&, const TensorView&, double*, double*, double,
                           const Stream&) {
  require_built();
}
void local_gradients(const GradientSums&, const std::int64_t*, std::int64_t*, std::int64_t*,
                     const Stream&, std::int64_t*) {
  require_built();
}
void finalize_gradients(const std::int64_t*, DType, int, const std::int64_t*, const std::int64_t*,
                        const ParameterGradients&, const Stream&) {
  require_built();
}
void input_gradient(const InputGradient&, const Stream&) { require_built(); }
void recover_input(const InputRecovery&, const Stream&) { require_built(); }
void evaluation_input_gradient(const TensorView&, const MaskView&, const double*, const TensorView&,
                               const MutableTensorView&, const Stream&) {
  require_built();
}
void* allocate_on(void*, std::size_t) {
  require_built();
  return nullptr;
}
void release_on(void*, void*) noexcept {}
void zero_on(void*, void*, std::size_t) { require_built(); }
void copy_on(void*, void*, const void*, std::size_t) { require_built(); }
void fetch_on(void*, void*, const void*, std::size_t) { require_built(); }
void bring_on(void*, void*, const void*, std::size_t) { require_built(); }
std::uint64_t stream_number(void*) noexcept { return 0; }

}  // namespace syncbn::cuda
