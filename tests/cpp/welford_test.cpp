// SPDX-License-Identifier: Apache-2.0
#include "step/passes.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "placed_rank.hpp"
#include "properties.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "welford_bound.hpp"

// The welford mode: mean and M2 of each rank, gathered and merged (docs/options.md). Sums in long
// double (64 bits of precision) are the reference.
namespace syncbn::testing {
namespace {

/// A step whose samples lie on ranks [bounds[r], bounds[r + 1]).
Outcome run(DType dtype, const std::vector<std::int64_t>& sizes, const std::vector<double>& values,
            const std::vector<std::int64_t>& bounds, Memory memory = Memory::kPlanes,
            Executor& executor = serial_executor()) {
  Random random(94);
  Step step(random, dtype, sizes);
  step.x = values;
  step.options.statistics = Statistics::kWelford;
  step.weight.present = step.bias.present = false;
  Split split(bounds.size() - 1);
  Placement placement;
  placement.x = placement.dy = placement.out = memory;
  for (std::size_t r = 0; r < split.size(); ++r) {
    split[r].resize(static_cast<std::size_t>(bounds[r + 1] - bounds[r]));
    std::iota(split[r].begin(), split[r].end(), bounds[r]);
  }
  return run_in_group(step, split, std::vector<Placement>(split.size(), placement),
                      GroupKind::kThreads, executor);
}

TEST(Welford, UnevenRanksWithinBound) {
  Random random(95);
  ThreadPool pool(3);
  const std::vector<std::int64_t> sizes = {40, 70, 5, 7};
  const std::vector<std::vector<std::int64_t>> splits = {
      {0, 40}, {0, 13, 40}, {0, 0, 1, 40}, {0, 10, 20, 30, 40}};
  for (const DType dtype : kDtypes) {
    std::vector<double> values(40 * 70 * 35);
    std::vector<std::vector<double>> channels(70);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t c = i / 35 % 70;
      values[i] = round_to(dtype, static_cast<double>(c) + random.signed_unit());
      channels[c].push_back(values[i]);
    }
    for (const auto& bounds : splits) {
      for (const Memory memory : kMemories) {
        SCOPED_TRACE(std::string(name(dtype)) + ", layout " +
                     std::to_string(static_cast<int>(memory)));
        const Outcome out = run(dtype, sizes, values, bounds, memory, pool);
        const Outcome::Known& one = out.ranks[0];
        EXPECT_EQ(one.count, 40 * 35);
        expect_same(out, out);  // all ranks have the same statistics
        for (std::size_t c = 0; c < 70; ++c) {
          // At most all rows of a rank, or a lane's share of them and 16 merges; then the ranks.
          expect_close({one.mean[c], one.var[c]}, exact(channels[c]), 40 * 35 + 16 + 4, dtype);
          EXPECT_EQ(one.rstd[c], 1 / std::sqrt(one.var[c] + 1e-5));
        }
        // y follows from the statistics by section 4 of docs/numerics.md.
        const Tensor x(dtype, sizes, values);
        Tensor expected = x;
        normalize({x.view(), {}, one.mean.data(), one.rstd.data(), {}, {}, {}, expected.view()},
                  pool);
        EXPECT_TRUE(same_bits(out.y, expected.values()));
      }
    }
  }
}

// The classical catastrophe of sum(x^2) - mean^2: mean / deviation = 2^20 in binary32, where sums
// of squares in binary32 would leave nothing of the variance.
TEST(Welford, LargeMeanWithinBound) {
  Random random(96);
  const std::vector<double> values = unit_values(random, DType::kFloat32, 4096, 0x1p20, 2);
  const auto one = run(DType::kFloat32, {4096, 1, 1}, values, {0, 1000, 4096}).ranks[0];
  expect_close({one.mean[0], one.var[0]}, exact(values), 4096 / 16 + 18, DType::kFloat32);
}

TEST(Welford, EmptyRanksAndSpecialValues) {
  const auto none = run(DType::kFloat32, {0, 2, 3}, {}, {0, 0}).ranks[0];
  EXPECT_EQ(none.count, 0);
  EXPECT_TRUE(same_bits(none.mean, {0, 0}));
  EXPECT_TRUE(same_bits(none.rstd, {0, 0}));
  const auto second =
      run(DType::kFloat32, {2, 3}, {1, INFINITY, NAN, 3, 1, 2}, {0, 1, 1, 2}).ranks[1];
  EXPECT_EQ(second.mean[0], 2);
  EXPECT_EQ(second.var[0], 1);
  EXPECT_FALSE(std::isfinite(second.var[1]));
  EXPECT_TRUE(std::isnan(second.mean[2]));
}

TEST(Welford, RecordsAreEightBytesAChannel) {
  EXPECT_EQ(welford_words(DType::kFloat16, 10), 11);
  EXPECT_EQ(welford_words(DType::kFloat32, 10), 11);
  EXPECT_EQ(welford_words(DType::kFloat64, 10), 21);
}

}  // namespace
}  // namespace syncbn::testing
