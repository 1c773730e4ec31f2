// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "properties.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// A whole layer on as many ranks as a training job has, each a thread, and one of large tensors:
// the bits of one rank.
namespace syncbn {
namespace {

using testing::GroupKind;
using testing::kDtypes;
using testing::make_group;
using testing::Memory;
using testing::Random;
using testing::rough_values;
using testing::round_to;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;

struct Batch {
  DType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<double> x, dy, weight, bias;

  Batch(Random& random, DType type, std::vector<std::int64_t> shape)
      : dtype(type), sizes(std::move(shape)) {
    x = rough_values(random, dtype, samples(), per_sample());
    dy = rough_values(random, dtype, samples(), per_sample());
    for (std::int64_t c = 0; c < channels(); ++c) {
      weight.push_back(round_to(DType::kFloat32, random.signed_unit()));
      bias.push_back(round_to(DType::kFloat32, random.signed_unit()));
    }
  }
  std::int64_t samples() const { return sizes[0]; }
  std::int64_t channels() const { return sizes[1]; }
  std::int64_t per_sample() const { return TensorView(nullptr, dtype, sizes).numel() / sizes[0]; }
  std::int64_t plane() const { return per_sample() / channels(); }
};

/// The sample numbers of each rank.
using Split = std::vector<std::vector<std::int64_t>>;

struct Rank {
  Saved saved;
  std::vector<double> running_mean, running_var, dweight, dbias;
};

struct Step {
  std::vector<double> y, dx;  ///< of the whole batch, in its order
  std::vector<Rank> ranks;
};

Tensor gather(const Batch& batch, const std::vector<double>& from,
              const std::vector<std::int64_t>& samples, Memory memory) {
  std::vector<std::int64_t> sizes = batch.sizes;
  sizes[0] = static_cast<std::int64_t>(samples.size());
  Tensor part(batch.dtype, sizes, memory);
  part.fill(testing::parts_of(from, samples, batch.per_sample()));
  return part;
}

/// How a rank holds x and dy, and its threads.
struct Placement {
  Memory x = Memory::kPlanes;
  Memory dy = Memory::kPlanes;
  Executor* executor = &serial_executor();
};

/// Forward and backward with one thread per part of the split; the placements are taken by turns.
Step train(const Batch& batch, const Split& split, const std::vector<Placement>& placements,
           AffineGradients affine = AffineGradients::kGlobal) {
  const auto ranks = static_cast<int>(split.size());
  ThreadGroup group(ranks);
  Step step;
  step.y.resize(batch.x.size());
  step.dx.resize(batch.x.size());
  step.ranks.resize(split.size());
  const auto errors = run_ranks(ranks, [&](int r) {
    const auto& samples = split[static_cast<std::size_t>(r)];
    Rank& mine = step.ranks[static_cast<std::size_t>(r)];
    const Placement& place = placements[static_cast<std::size_t>(r) % placements.size()];
    const Tensor x = gather(batch, batch.x, samples, place.x);
    const Tensor dy = gather(batch, batch.dy, samples, place.dy);
    const std::int64_t channels = batch.channels();
    Tensor y = x;
    Tensor dx = x;
    const Tensor weight(DType::kFloat32, {channels}, batch.weight);
    const Tensor bias(DType::kFloat32, {channels}, batch.bias);
    Tensor running_mean(DType::kFloat32, {channels}, batch.bias);
    Tensor running_var(DType::kFloat32, {channels}, batch.weight);
    Tensor dweight(DType::kFloat64, {channels});
    Tensor dbias(DType::kFloat64, {channels});
    BatchNorm layer({.channels = channels, .name = "layer"}, group.rank(r));
    layer.forward({.x = x.view(),
                   .weight = weight.view(),
                   .bias = bias.view(),
                   .y = y.view(),
                   .running_mean = running_mean.view(),
                   .running_var = running_var.view()},
                  mine.saved, *place.executor);
    layer.backward({.dy = dy.view(),
                    .x = x.view(),
                    .weight = weight.view(),
                    .bias = bias.view(),
                    .dx = dx.view(),
                    .dweight = dweight.view(),
                    .dbias = dbias.view(),
                    .affine = affine},
                   mine.saved, *place.executor);
    testing::put_back(y.values(), samples, step.y);
    testing::put_back(dx.values(), samples, step.dx);
    mine.running_mean = running_mean.values();
    mine.running_var = running_var.values();
    mine.dweight = dweight.values();
    mine.dbias = dbias.values();
  });
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
  }
  return step;
}

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

Split whole(const Batch& batch) {
  Split split(1, std::vector<std::int64_t>(static_cast<std::size_t>(batch.samples())));
  std::iota(split[0].begin(), split[0].end(), 0);
  return split;
}

void expect_same(const Step& actual, const Step& expected) {
  EXPECT_TRUE(same_bits(actual.y, expected.y)) << "y";
  EXPECT_TRUE(same_bits(actual.dx, expected.dx)) << "dx";
  const Rank& one = expected.ranks[0];
  for (const Rank& rank : actual.ranks) {
    EXPECT_EQ(rank.saved.count(), one.saved.count());
    EXPECT_TRUE(same_bits(rank.saved.mean(), one.saved.mean())) << "mean";
    EXPECT_TRUE(same_bits(rank.saved.var(), one.saved.var())) << "var";
    EXPECT_TRUE(same_bits(rank.running_mean, one.running_mean)) << "running mean";
    EXPECT_TRUE(same_bits(rank.running_var, one.running_var)) << "running var";
    EXPECT_TRUE(same_bits(rank.dweight, one.dweight)) << "dweight";
    EXPECT_TRUE(same_bits(rank.dbias, one.dbias)) << "dbias";
  }
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
  const Batch batch(random, dtype, {3 * ranks / 2, 33, 3, 7});
  const Step expected = train(batch, whole(batch), {{}});
  const Split split = uneven_split(random, batch.samples(), ranks);
  ASSERT_TRUE(split.front().empty() && split.back().empty());
  EXPECT_EQ(expected.ranks[0].saved.count(), batch.samples() * batch.plane());
  expect_same(train(batch, split, {{}, {Memory::kRows, Memory::kRows}}), expected);

  // The data has teeth: binary64 sums of the ranks' binary64 sums of squares, as an ordinary
  // implementation adds them, differ from those of one rank in some channel.
  std::int64_t other = 0;
  for (std::int64_t c = 0; c < batch.channels(); ++c) {
    const auto squares = [&](const std::vector<std::int64_t>& samples) {
      double sum = 0;
      for (const std::int64_t n : samples) {
        for (std::int64_t i = 0; i < batch.plane(); ++i) {
          const double v =
              batch.x[static_cast<std::size_t>(n * batch.per_sample() + c * batch.plane() + i)];
          sum += v * v;
        }
      }
      return sum;
    };
    double merged = 0;
    for (const auto& samples : split) {
      merged += squares(samples);
    }
    other += merged != squares(whole(batch)[0]) ? 1 : 0;
  }
  EXPECT_GE(other, batch.channels() / 2);
}

// Large enough for blocks of channels on some ranks, while others go through one pass after the
// other, or have nothing.
TEST(Scale, LargeTensorsHaveTheBitsOfOneRankExact) {
  ThreadPool two(2);
  ThreadPool three(3);
  Random random(74);
  const Batch batch(random, DType::kFloat32, {8, 140, 3137});
  const Step expected = [&] {
    const testing::LevelScope scope("reference");
    return train(batch, whole(batch), {{}});
  }();
  for (const Split& split : {Split{{6, 0, 3, 1, 7, 5, 2, 4}}, Split{{6, 0, 3, 1, 7}, {5, 2, 4}},
                             Split{{4}, {6, 0, 3, 1, 7}, {}, {5, 2}}}) {
    SCOPED_TRACE(std::to_string(split.size()) + " ranks");
    expect_same(train(batch, split,
                      {{Memory::kPlanes, Memory::kPlanes, &two},
                       {},
                       {Memory::kPlanes, Memory::kRows, &three}}),
                expected);
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
      const Batch batch(random, dtype, {24, 5, 30});
      const Split split = uneven_split(random, batch.samples(), ranks);
      const Step shares = train(batch, split, {{}}, AffineGradients::kShare);
      const Step global = train(batch, split, {{}});
      const Rank& one = global.ranks[0];
      for (std::size_t c = 0; c < 5; ++c) {
        double dweight = 0;
        double dbias = 0;
        for (const Rank& rank : shares.ranks) {
          dweight += rank.dweight[c];
          dbias += rank.dbias[c];
        }
        double total = 0;
        double total_products = 0;
        for (std::size_t i = 0; i < batch.x.size(); ++i) {
          if (i / 30 % 5 == c) {
            total += std::fabs(batch.dy[i]);
            total_products += std::fabs(batch.dy[i] * batch.x[i]);
          }
        }
        const double t = std::fabs(one.saved.mean()[c]) * total + total_products;
        EXPECT_LE(std::fabs(dweight - one.dweight[c]),
                  (ranks + 6) * kUnit * one.saved.rstd()[c] * t);
        EXPECT_LE(std::fabs(dbias - one.dbias[c]), (ranks + 2) * kUnit * total);
      }
    }
  }
}

/// Exchanges whose ranks come in any order: now and then one sleeps, or lets the others run first.
/// Two cores need 3 to 5 seconds for each kind of group.
class ManyExchanges : public ::testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Groups, ManyExchanges,
                         ::testing::Values(GroupKind::kThreads, GroupKind::kSharedMemory),
                         [](const auto& param) { return testing::name(param.param); });

TEST_P(ManyExchanges, HaveTheirSumsOnEveryRankExact) {
  constexpr int kRanks = 64;
  constexpr std::int64_t kExchanges = 10000;
  constexpr std::int64_t kWords = 20;
  const auto group = make_group(GetParam(), kRanks, std::chrono::seconds(60));
  const auto errors = run_ranks(kRanks, [&](int r) {
    Random random(static_cast<std::uint64_t>(r));
    for (std::int64_t i = 0; i < kExchanges; ++i) {
      if (random.one_in(20 * kRanks)) {
        std::this_thread::sleep_for(std::chrono::microseconds(random.between(1, 200)));
      } else if (random.one_in(8)) {
        std::this_thread::yield();
      }
      std::vector<std::int64_t> words(kWords);
      for (std::int64_t k = 0; k < kWords; ++k) {
        words[static_cast<std::size_t>(k)] = i * 1000 + k * 7 + r;
      }
      group->rank(r).all_reduce_sum(words);
      for (std::int64_t k = 0; k < kWords; ++k) {
        ASSERT_EQ(words[static_cast<std::size_t>(k)],
                  kRanks * (i * 1000 + k * 7) + kRanks * (kRanks - 1) / 2)
            << "rank " << r << ", exchange " << i << ", word " << k;
      }
    }
  });
  testing::expect_no_errors(errors);
}

}  // namespace
}  // namespace syncbn
