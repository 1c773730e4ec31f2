#include <immintrin.h>

#include <cstdint>

#include "cpu/kernels.hpp"
#include "cpu/windows.hpp"
#include "statistics/dtype.hpp"
#include "statistics/finalize.hpp"

namespace syncbn::cpu {
namespace {

#include "cpu/simd_avx512.hpp"
// clang-format off: the passes need the vector type above
#include "cpu/level_pair.hpp"
#include "cpu/level_mask.hpp"
#include "cpu/level_elements.hpp"
#include "cpu/level_map.hpp"
#include "cpu/level_pullback.hpp"
#include "cpu/level_merge.hpp"
#include "cpu/level_single_rows.hpp"
#include "cpu/level_sums.hpp"
#include "cpu/level_row_sums.hpp"
#include "cpu/level_finalize.hpp"
#include "cpu/level_table.hpp"
// clang-format on

constexpr Kernels kKernels = kernels_named("avx512");

}  // namespace

const Kernels* const kAvx512Kernels = &kKernels;

}  // namespace syncbn::cpu
