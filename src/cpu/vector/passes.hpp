// SPDX-License-Identifier: Apache-2.0
// All passes over the vector type of one level. Included inside a level file's unnamed namespace,
// after the vector type (simd_*.hpp); each part may use what is above it.
// clang-format off
#include "cpu/vector/pair.hpp"
#include "cpu/vector/mask.hpp"
#include "cpu/vector/elements.hpp"
#include "cpu/vector/map.hpp"
#include "cpu/vector/map_rows.hpp"
#include "cpu/vector/pullback.hpp"
#include "cpu/vector/windows.hpp"
#include "cpu/vector/merge.hpp"
#include "cpu/vector/single_rows.hpp"
#include "cpu/vector/sums.hpp"
#include "cpu/vector/row_sums.hpp"
#include "cpu/vector/finalize.hpp"
#include "cpu/vector/table.hpp"
// clang-format on
