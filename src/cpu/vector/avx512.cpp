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

#include "cpu/vector/simd_avx512.hpp"
// The passes need the vector type above.
#include "cpu/vector/passes.hpp"

constexpr Kernels kKernels = kernels_named("avx512");

}  // namespace

const Kernels* const kAvx512Kernels = &kKernels;

}  // namespace syncbn::cpu
