// SPDX-License-Identifier: Apache-2.0
// All passes over the vector type of one level. Included inside a level file's unnamed namespace,
// after the vector type (simd_*.hpp); each part may use what is above it.
// clang-format off
#include "cpu/level_pair.hpp"
#include "cpu/level_mask.hpp"
#include "cpu/level_elements.hpp"
#include "cpu/level_map.hpp"
#include "cpu/level_map_rows.hpp"
#include "cpu/level_pullback.hpp"
#include "cpu/level_windows.hpp"
#include "cpu/level_merge.hpp"
#include "cpu/level_single_rows.hpp"
#include "cpu/level_sums.hpp"
#include "cpu/level_row_sums.hpp"
#include "cpu/level_finalize.hpp"
#include "cpu/level_table.hpp"
// clang-format on
