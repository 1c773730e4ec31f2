// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/windows.hpp"
#include "statistics/dtype.hpp"
#include "statistics/finalize.hpp"

namespace syncbn::cpu {
namespace {

#include "cpu/vector/simd_avx2.hpp"
// The passes need the vector type above.
#include "cpu/vector/passes.hpp"

constexpr Kernels kKernels = kernels_named("avx2");

}  // namespace

const Kernels* const kAvx2Kernels = &kKernels;

}  // namespace syncbn::cpu
