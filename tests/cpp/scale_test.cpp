// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "placed_rank.hpp"
#include "processes.hpp"
#include "properties.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// A whole layer on as many ranks as a training job has, each a thread, and one of large tensors:
// the bits of one rank.
namespace syncbn::testing {
namespace {

/// Shuffled samples: an empty rank first and last, one rank with a quarter of the batch, and the
/// rest by chance, which leaves more ranks empty.
Split uneven_split(Random& random, std::int64_t samples, int ranks) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(samples));
  std::iota(order.begin(), order.end(), 0);
  random.shuffle(order);
  Split split(static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < order.size(); ++i) {
    const bool heavy = i < order.size() / 4;
    split[static_cast<std::size_t>(heavy ? 1 : random.between(2, ranks - 2))].push_back(order[i]);
  }
  return split;
}

class Ranks : public ::testing::TestWithParam<std::tuple<DType, int>> {};
INSTANTIATE_TEST_SUITE_P(Scale, Ranks,
                         ::testing::Combine(::testing::ValuesIn(kDtypes),
                                            ::testing::Values(64, 128)),
                         [](const auto& param) {
                           return std::string(name(std::get<0>(param.param))) + "_" +
                                  std::to_string(std::get<1>(param.param));
                         });

TEST_P(Ranks, HaveTheBitsOfOneRankExact) {
  const auto [dtype, ranks] = GetParam();
  Random random(static_cast<std::uint64_t>(ranks));
  const Step step(random, dtype, {3 * ranks / 2, 33, 3, 7});
  const Outcome expected = run_in_group(step, whole(step.sizes[0]), {{}});
  const Split split = uneven_split(random, step.sizes[0], ranks);
  ASSERT_TRUE(split.front().empty() && split.back().empty());
  EXPECT_EQ(expected.ranks[0].count, step.sizes[0] * step.plane());
  std::vector<Placement> placements(split.size());
  for (std::size_t r = 1; r < split.size(); r += 2) {
    placements[r].x = placements[r].dy = placements[r].out = Memory::kRows;
  }
  expect_same(run_in_group(step, split, placements), expected);

  // The data has teeth: binary64 sums of the ranks' binary64 sums of squares, as an ordinary
  // implementation adds them, differ from those of one rank in some channel.
  std::int64_t other = 0;
  for (std::int64_t c = 0; c < step.channels(); ++c) {
    const auto squares = [&](const std::vector<std::int64_t>& samples) {
      double sum = 0;
      for (const std::int64_t n : samples) {
        for (std::int64_t i = 0; i < step.plane(); ++i) {
          const std::int64_t at = (n * step.channels() + c) * step.plane() + i;
          sum += std::pow(step.x[static_cast<std::size_t>(at)], 2);
        }
      }
      return sum;
    };
    double merged = 0;
    for (const auto& samples : split) {
      merged += squares(samples);
    }
    other += merged != squares(whole(step.sizes[0])[0]) ? 1 : 0;
  }
  EXPECT_GE(other, step.channels() / 2);
}

// Large enough for blocks of channels on some ranks, while others go through one pass after the
// other, or have nothing.
TEST(Scale, LargeTensorsHaveTheBitsOfOneRankExact) {
  ThreadPool two(2);
  ThreadPool three(3);
  Random random(74);
  const Step step(random, DType::kFloat32, {8, 140, 3137});
  const Outcome expected = [&] {
    const LevelScope scope("reference");
    return run_in_group(step, whole(8), {{}});
  }();
  std::vector<Placement> placements(4);
  placements[0].executor = placements[3].executor = &two;
  placements[0].in_place = true;
  placements[2].executor = &three;
  placements[2].dy = Memory::kRows;
  for (const Split& split : {Split{{6, 0, 3, 1, 7, 5, 2, 4}}, Split{{6, 0, 3, 1, 7}, {5, 2, 4}},
                             Split{{4}, {6, 0, 3, 1, 7}, {}, {5, 2}}}) {
    SCOPED_TRACE(std::to_string(split.size()) + " ranks");
    expect_same(run_in_group(step, split, placements), expected);
  }
}

// A rank's share is RN(rstd * RN(B_r - mean * A_r)) with A_r, B_r rounded once from exact integers
// that add up to the global A, B. With T = |mean| sum|dy| + sum|dy x| and u = 2^-53 each share and
// the global sum are within 3 u rstd T_r (T_r summing to T) of the exact values, to first order,
// and adding P shares in binary64 costs at most (P - 1) u rstd T more: (P + 5) u rstd T, and one
// more unit for the terms of second order and T's own rounding. dbias: (P + 1) u sum|dy|, likewise.
TEST(Shares, AddUpToTheGlobalGradients) {
  constexpr double kUnit = 0x1p-53;
  Random random(73);
  for (const DType dtype : kDtypes) {
    for (const int ranks : {4, 8}) {
      Step step(random, dtype, {24, 5, 30});
      const Split split = uneven_split(random, 24, ranks);
      const std::vector<Placement> placements(split.size());
      const Outcome::Known one = run_in_group(step, split, placements).ranks[0];
      step.affine = AffineGradients::kShare;
      const Outcome shares = run_in_group(step, split, placements);
      for (std::size_t c = 0; c < 5; ++c) {
        double dweight = 0;
        double dbias = 0;
        for (const Outcome::Known& rank : shares.ranks) {
          dweight += rank.dweight[c];
          dbias += rank.dbias[c];
        }
        double total = 0;
        double total_products = 0;
        for (std::size_t i = 0; i < step.x.size(); ++i) {
          if (i / 30 % 5 == c) {
            total += std::fabs(step.dy[i]);
            total_products += std::fabs(step.dy[i] * step.x[i]);
          }
        }
        const double t = std::fabs(one.mean[c]) * total + total_products;
        EXPECT_LE(std::fabs(dweight - one.dweight[c]), (ranks + 6) * kUnit * one.rstd[c] * t);
        EXPECT_LE(std::fabs(dbias - one.dbias[c]), (ranks + 2) * kUnit * total);
      }
    }
  }
}

/// Two cores need some ten seconds for each kind of group.
class ManyExchanges : public ::testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Groups, ManyExchanges,
                         ::testing::Values(GroupKind::kThreads, GroupKind::kSharedMemory),
                         [](const auto& param) { return name(param.param); });

TEST_P(ManyExchanges, HaveTheirSumsOnEveryRankExact) {
  const auto group = make_group(GetParam(), 64, std::chrono::seconds(60));
  expect_no_errors(run_ranks(64, [&](int r) { exchange_with_delays(group->rank(r), 10000); }));
}

}  // namespace
}  // namespace syncbn::testing
