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

// Compiled with -mavx512bf16, where bfloat16 is rounded by an instruction.
#include "cpu/vector/simd_avx512.hpp"
// The passes need the vector type above.
#include "cpu/vector/passes.hpp"

constexpr Kernels kKernels = kernels_named("avx512_bf16");

}  // namespace

const Kernels* const kAvx512Bf16Kernels = &kKernels;

}  // namespace syncbn::cpu
