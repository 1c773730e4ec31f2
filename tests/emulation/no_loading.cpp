// SPDX-License-Identifier: Apache-2.0
#include "cuda/loading.hpp"

// Where kernels have a planted defect, the files of the others are left out.
namespace syncbn::cuda {

void load_kernels(DType) {}

}  // namespace syncbn::cuda
