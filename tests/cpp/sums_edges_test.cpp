// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "one_rank.hpp"
#include "single_rows_cases.hpp"
#include "support.hpp"

// The sums at the edges of what kernels take at a time (rows of a block, channels, segments, planes
// whose partials are folded together), on data that shows every rounding: all levels give the
// reference's words.
namespace syncbn::testing {
namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

class SumsEdges : public OneRankDirections {
 protected:
  static OneRank layer(Random& random, int round, const std::vector<std::int64_t>& sizes,
                       Memory memory) {
    const DType dtype = kTypes[round % 3];
    const std::int64_t count = TensorView(nullptr, dtype, sizes).numel();
    OneRank out(random, dtype, sizes, memory, random.between(0, 16),
                random.one_in(4) ? count / 3 + 1 : 0);
    if (random.one_in(3)) {
      out.activation = {random.one_in(2) ? ActivationKind::kRelu : ActivationKind::kLeakyRelu,
                        0.01};
      out.keep = random.one_in(2);
    }
    if (random.one_in(4)) {
      out.choose_mask(random);
    }
    return out;
  }
  void compare_round(const OneRank& one, int round) {
    SCOPED_TRACE("round " + std::to_string(round) + ", channels " + std::to_string(one.channels()));
    compare(one, false);
  }
};

// Blocks of rows, of channels, and what is left of either; lanes with and without a row.
TEST_F(SumsEdges, RowsAroundBlocksExact) {
  Random random(130);
  const std::vector<std::int64_t> rows = {2,   3,   15,  16,  17,  31,  33,  47,   48,
                                          49,  63,  64,  65,  79,  81,  127, 128,  129,
                                          145, 511, 512, 513, 575, 576, 577, 1024, 1040};
  const std::vector<std::int64_t> channels = {1,  2,  7,   8,   9,   15,  16,  17,  23,  24,
                                              31, 33, 129, 255, 511, 512, 513, 520, 529, 1030};
  for (int round = 0; round < 90 && !HasFailure(); ++round) {
    const std::int64_t plane = random.pick(rows);
    std::int64_t width = random.pick(channels);
    if (plane * width > 150000) {
      width = random.between(1, 40);
    }
    const std::int64_t samples = plane * width > 50000 ? 1 : random.between(1, 4);
    const Memory memory = random.one_in(3) ? Memory::kRowsSlice : Memory::kRows;
    compare_round(layer(random, round, {samples, width, plane}, memory), round);
  }
}

// Planes of one segment, whose partials are folded together, and of many; counts of channels and
// of segments that leave some of a vector's lanes without one.
TEST_F(SumsEdges, PlanesAroundVectorsExact) {
  Random random(131);
  const std::vector<std::int64_t> planes = {2,   5,   8,    9,    15,   16,   17,   24,  31,
                                            32,  33,  48,   49,   63,   64,   65,   196, 511,
                                            512, 513, 1024, 1025, 1537, 3136, 4096, 4600};
  for (int round = 0; round < 120 && !HasFailure(); ++round) {
    const std::int64_t plane = random.pick(planes);
    const std::int64_t channels = random.between(1, plane > 600 ? 12 : 40);
    const std::int64_t samples = random.between(1, plane > 600 ? 2 : 4);
    const Memory memory = random.one_in(3) ? Memory::kPlanesSlice : Memory::kPlanes;
    compare_round(layer(random, round, {samples, channels, plane}, memory), round);
  }
}

// Samples without an axis in space: windows are placed by the first of them.
TEST_F(SumsEdges, SingleRowsExact) {
  Random random(132);
  const std::vector<std::int64_t> channels = {1,  7,  8,  9,  15,  16,  17,  31,  32,
                                              33, 63, 64, 65, 255, 256, 257, 300, 530};
  for (int round = 0; round < 120 && !HasFailure(); ++round) {
    const std::int64_t samples =
        random.one_in(3) ? random.between(1, 8) : 64 * random.between(0, 2) + random.between(1, 3);
    const Memory memory = random.one_in(3) ? Memory::kRowsSlice : Memory::kRows;
    OneRank one = layer(random, round, {samples, random.pick(channels)}, memory);
    if (random.one_in(2)) {  // some channels tell nothing in the first rows
      for (std::int64_t i = 0; i < std::min(one.x.numel(), 6 * one.channels()); ++i) {
        const std::int64_t kind = i % one.channels() % 3;
        if (kind < 2) {
          one.x.set(i, kind == 1                      ? (random.one_in(2) ? 0.0 : -0.0)
                       : one.dtype == DType::kFloat16 ? 0x1p-24
                                                      : 0x1p-133);
        }
      }
    }
    compare_round(one, round);
  }
}

/// 2-D input, whose rows are added in floating point wherever that is exact, at the edges of where
/// it is.
class SingleRows : public OneRankDirections {
 protected:
  auto check() {
    return [this](DType dtype, std::int64_t samples, std::int64_t channels,
                  const std::vector<double>& x, const std::vector<double>& dy,
                  const std::vector<std::uint8_t>& counts) {
      Random random(1);
      OneRank one(random, dtype, {samples, channels}, Memory::kPlanes, 0);
      one.x.fill(x);
      one.dy.fill(dy);
      one.mask = counts;
      one.mask_sizes = counts.empty() ? std::vector<std::int64_t>() : std::vector{samples};
      SCOPED_TRACE(std::string(name(dtype)) + ", " + std::to_string(samples) + " samples, " +
                   std::to_string(channels) + " channels");
      compare(one, false);
    };
  }
};

TEST_F(SingleRows, ExponentsAroundTheWindowExact) { rows_of_many_exponents(check()); }

TEST_F(SingleRows, ZerosAndSpecialValuesExact) { rows_of_special_values(check()); }

TEST_F(SingleRows, FullAccumulatorsExact) { rows_that_fill_accumulators(128, 17, check()); }

}  // namespace
}  // namespace syncbn::testing
