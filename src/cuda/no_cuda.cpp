// SPDX-License-Identifier: Apache-2.0
#include "step/device.hpp"
#include "syncbn/error.hpp"

namespace syncbn {

const DevicePasses& cuda_passes() {
  throw Unavailable(
      "this libsyncbn was built without CUDA, so tensors must be on the CPU; to build it with "
      "CUDA, "
      "install the CUDA toolkit (nvcc 12.8 or newer) and configure with -D SYNCBN_CUDA=ON");
}

}  // namespace syncbn
