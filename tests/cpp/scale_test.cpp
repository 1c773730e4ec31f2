// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "groups.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// A whole layer on as many ranks as a training job has, each a thread: the bits of one rank.
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

constexpr std::int64_t kChannels = 33;
constexpr std::int64_t kPlane = 21;
constexpr std::int64_t kPerSample = kChannels * kPlane;

struct Batch {
  DType dtype;
  std::vector<double> x, dy, weight, bias;
  std::int64_t samples() const { return static_cast<std::int64_t>(x.size()) / kPerSample; }
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
  std::vector<double> mine;
  for (const std::int64_t n : samples) {
    mine.insert(mine.end(), from.begin() + n * kPerSample, from.begin() + (n + 1) * kPerSample);
  }
  const auto count = static_cast<std::int64_t>(samples.size());
  Tensor part(batch.dtype, {count, kChannels, 3, 7}, memory);
  part.fill(mine);
  return part;
}

void scatter(const Tensor& part, const std::vector<std::int64_t>& samples,
             std::vector<double>& to) {
  const std::vector<double> mine = part.values();
  auto from = mine.begin();
  for (const std::int64_t n : samples) {
    std::copy(from, from + kPerSample, to.begin() + n * kPerSample);
    from += kPerSample;
  }
}

/// Forward and backward with one thread per part of the split; every second rank is channels-last.
Step train(const Batch& batch, const Split& split) {
  const auto ranks = static_cast<int>(split.size());
  ThreadGroup group(ranks);
  Step step;
  step.y.resize(batch.x.size());
  step.dx.resize(batch.x.size());
  step.ranks.resize(split.size());
  const auto errors = run_ranks(ranks, [&](int r) {
    const auto& samples = split[static_cast<std::size_t>(r)];
    Rank& mine = step.ranks[static_cast<std::size_t>(r)];
    const Memory memory = r % 2 == 0 ? Memory::kPlanes : Memory::kRows;
    const Tensor x = gather(batch, batch.x, samples, memory);
    const Tensor dy = gather(batch, batch.dy, samples, memory);
    Tensor y = x;
    Tensor dx = x;
    const Tensor weight(DType::kFloat32, {kChannels}, batch.weight);
    const Tensor bias(DType::kFloat32, {kChannels}, batch.bias);
    Tensor running_mean(DType::kFloat32, {kChannels}, batch.bias);
    Tensor running_var(DType::kFloat32, {kChannels}, batch.weight);
    Tensor dweight(DType::kFloat64, {kChannels});
    Tensor dbias(DType::kFloat64, {kChannels});
    BatchNorm layer({.channels = kChannels, .name = "layer"}, group.rank(r));
    layer.forward({.x = x.view(),
                   .weight = weight.view(),
                   .bias = bias.view(),
                   .y = y.view(),
                   .running_mean = running_mean.view(),
                   .running_var = running_var.view()},
                  mine.saved);
    layer.backward({.dy = dy.view(),
                    .x = x.view(),
                    .weight = weight.view(),
                    .bias = bias.view(),
                    .dx = dx.view(),
                    .dweight = dweight.view(),
                    .dbias = dbias.view(),
                    .affine = AffineGradients::kGlobal},
                   mine.saved);
    scatter(y, samples, step.y);
    scatter(dx, samples, step.dx);
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

class Scale : public ::testing::TestWithParam<std::tuple<DType, int>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Scale,
                         ::testing::Combine(::testing::ValuesIn(kDtypes),
                                            ::testing::Values(64, 128)),
                         [](const auto& param) {
                           return std::string(name(std::get<0>(param.param))) + "_" +
                                  std::to_string(std::get<1>(param.param));
                         });

TEST_P(Scale, LayerHasTheBitsOfOneRankExact) {
  const auto [dtype, ranks] = GetParam();
  Random random(static_cast<std::uint64_t>(ranks));
  Batch batch{dtype, {}, {}, {}, {}};
  batch.x = rough_values(random, dtype, 3 * ranks / 2, kPerSample);
  batch.dy = rough_values(random, dtype, 3 * ranks / 2, kPerSample);
  for (std::int64_t c = 0; c < kChannels; ++c) {
    batch.weight.push_back(round_to(DType::kFloat32, random.signed_unit()));
    batch.bias.push_back(round_to(DType::kFloat32, random.signed_unit()));
  }
  Split whole(1);
  for (std::int64_t n = 0; n < batch.samples(); ++n) {
    whole[0].push_back(n);
  }
  const Step expected = train(batch, whole);
  const Split split = uneven_split(random, batch.samples(), ranks);
  ASSERT_TRUE(split.front().empty() && split.back().empty());
  const Step actual = train(batch, split);

  EXPECT_TRUE(same_bits(actual.y, expected.y)) << "y";
  EXPECT_TRUE(same_bits(actual.dx, expected.dx)) << "dx";
  const Rank& one = expected.ranks[0];
  EXPECT_EQ(one.saved.count(), batch.samples() * kPlane);
  for (const Rank& rank : actual.ranks) {
    EXPECT_EQ(rank.saved.count(), one.saved.count());
    EXPECT_TRUE(same_bits(rank.saved.mean(), one.saved.mean())) << "mean";
    EXPECT_TRUE(same_bits(rank.saved.var(), one.saved.var())) << "var";
    EXPECT_TRUE(same_bits(rank.running_mean, one.running_mean)) << "running mean";
    EXPECT_TRUE(same_bits(rank.running_var, one.running_var)) << "running var";
    EXPECT_TRUE(same_bits(rank.dweight, one.dweight)) << "dweight";
    EXPECT_TRUE(same_bits(rank.dbias, one.dbias)) << "dbias";
  }

  // The data has teeth: binary64 sums of the ranks' binary64 sums of squares, as an ordinary
  // implementation adds them, differ from those of one rank in some channel.
  std::int64_t other = 0;
  for (std::int64_t c = 0; c < kChannels; ++c) {
    const auto squares = [&](const std::vector<std::int64_t>& samples) {
      double sum = 0;
      for (const std::int64_t n : samples) {
        for (std::int64_t i = 0; i < kPlane; ++i) {
          const double v = batch.x[static_cast<std::size_t>(n * kPerSample + c * kPlane + i)];
          sum += v * v;
        }
      }
      return sum;
    };
    double merged = 0;
    for (const auto& samples : split) {
      merged += squares(samples);
    }
    other += merged != squares(whole[0]) ? 1 : 0;
  }
  EXPECT_GE(other, kChannels / 2);
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
