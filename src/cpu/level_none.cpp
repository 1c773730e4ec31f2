// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.hpp"

// Processors without vector code of their own run the reference.
namespace syncbn::cpu {
const Kernels* const kAvx2Kernels = nullptr;
const Kernels* const kAvx512Kernels = nullptr;
const Kernels* const kAvx512Bf16Kernels = nullptr;
}  // namespace syncbn::cpu
