// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// The promise: the same bits for any number of ranks, split, order of samples, memory layout,
// number of threads and vector code, on data that makes plain sums depend on all of these.
namespace syncbn {
namespace {

using testing::available_levels;
using testing::kDtypes;
using testing::kMemories;
using testing::LevelScope;
using testing::Memory;
using testing::offset_values;
using testing::Random;
using testing::rough_values;
using testing::round_to;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;

struct Data {
  DType dtype;
  std::vector<std::int64_t> sizes;  ///< of the whole batch
  std::vector<double> x;
  std::vector<double> dy;
  std::vector<double> weight;
  std::vector<double> bias;
  std::vector<double> running_mean;
  std::vector<double> running_var;

  Data(Random& random, DType type, std::vector<std::int64_t> shape, bool rough)
      : dtype(type), sizes(std::move(shape)) {
    x = rough ? rough_values(random, dtype, samples(), per_sample())
              : offset_values(random, dtype, samples() * per_sample());
    dy = rough_values(random, dtype, samples(), per_sample());
    for (std::int64_t c = 0; c < sizes[1]; ++c) {
      weight.push_back(round_to(DType::kFloat32, random.signed_unit()));
      bias.push_back(round_to(DType::kFloat32, random.signed_unit()));
      running_mean.push_back(round_to(DType::kFloat32, random.signed_unit()));
      running_var.push_back(round_to(DType::kFloat32, 1 + random.signed_unit()));
    }
  }
  std::int64_t samples() const { return sizes[0]; }
  std::int64_t per_sample() const { return TensorView(nullptr, dtype, sizes).numel() / sizes[0]; }
};

/// The samples of each rank, in the order in which it holds them.
using Split = std::vector<std::vector<std::int64_t>>;

Split whole(std::int64_t samples) {
  Split split(1, std::vector<std::int64_t>(static_cast<std::size_t>(samples)));
  std::iota(split[0].begin(), split[0].end(), 0);
  return split;
}

/// Shuffled samples in random unequal parts, often an empty one.
Split random_split(Random& random, std::int64_t samples, int ranks) {
  std::vector<std::int64_t> order = whole(samples)[0];
  random.shuffle(order);
  std::vector<std::int64_t> cuts = {0, samples};
  while (cuts.size() < static_cast<std::size_t>(ranks) + 1) {
    cuts.push_back(random.one_in(4) ? random.pick(cuts) : random.between(0, samples));
  }
  std::sort(cuts.begin(), cuts.end());
  Split split;
  for (std::size_t r = 0; r + 1 < cuts.size(); ++r) {
    split.emplace_back(order.begin() + cuts[r], order.begin() + cuts[r + 1]);
  }
  random.shuffle(split);
  return split;
}

/// What one rank knows after a step.
struct RankOutcome {
  Saved saved;
  std::vector<double> running_mean, running_var, dweight, dbias;
  std::int64_t tracked = 41;
};
struct Outcome {
  std::vector<double> y, dx;  ///< of the whole batch
  std::vector<RankOutcome> ranks;
};

struct Placement {
  Memory x = Memory::kPlanes;
  Memory dy = Memory::kPlanes;
  Memory out = Memory::kPlanes;
  Executor* executor = &serial_executor();
};

Tensor part_of(const Data& data, const std::vector<double>& values,
               const std::vector<std::int64_t>& samples, Memory memory) {
  std::vector<std::int64_t> sizes = data.sizes;
  sizes[0] = static_cast<std::int64_t>(samples.size());
  Tensor part(data.dtype, sizes, memory);
  std::vector<double> mine;
  for (const std::int64_t n : samples) {
    mine.insert(mine.end(), values.begin() + n * data.per_sample(),
                values.begin() + (n + 1) * data.per_sample());
  }
  part.fill(mine);
  return part;
}

void put_back(const Data& data, const Tensor& part, const std::vector<std::int64_t>& samples,
              std::vector<double>& whole_batch) {
  const std::vector<double> mine = part.values();
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const auto begin = mine.begin() + static_cast<std::int64_t>(i) * data.per_sample();
    std::copy(begin, begin + data.per_sample(),
              whole_batch.begin() + samples[i] * data.per_sample());
  }
}

/// Forward and backward of a batch that lies on split.size() ranks.
Outcome run(const Data& data, const Split& split, const std::vector<Placement>& placements) {
  const auto ranks = static_cast<int>(split.size());
  const std::int64_t channels = data.sizes[1];
  ThreadGroup group(ranks);
  Outcome out;
  out.y.resize(data.x.size());
  out.dx.resize(data.x.size());
  out.ranks.resize(split.size());
  const auto errors = run_ranks(ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const Placement& placement = placements[r % placements.size()];
    RankOutcome& mine = out.ranks[r];
    const Tensor x = part_of(data, data.x, split[r], placement.x);
    const Tensor dy = part_of(data, data.dy, split[r], placement.dy);
    Tensor y = part_of(data, data.x, split[r], placement.out);
    Tensor dx = part_of(data, data.x, split[r], placement.out);
    const Tensor weight(DType::kFloat32, {channels}, data.weight);
    const Tensor bias(DType::kFloat32, {channels}, data.bias);
    Tensor running_mean(DType::kFloat32, {channels}, data.running_mean);
    Tensor running_var(DType::kFloat32, {channels}, data.running_var);
    Tensor dweight(DType::kFloat32, {channels});
    Tensor dbias(DType::kFloat64, {channels});
    BatchNorm layer({.channels = channels, .name = "layer"}, group.rank(rank));
    layer.forward({.x = x.view(),
                   .weight = weight.view(),
                   .bias = bias.view(),
                   .y = y.view(),
                   .running_mean = running_mean.view(),
                   .running_var = running_var.view(),
                   .num_batches_tracked = &mine.tracked},
                  mine.saved, *placement.executor);
    layer.backward({.dy = dy.view(),
                    .x = x.view(),
                    .weight = weight.view(),
                    .bias = bias.view(),
                    .dx = dx.view(),
                    .dweight = dweight.view(),
                    .dbias = dbias.view(),
                    .affine = AffineGradients::kGlobal},
                   mine.saved, *placement.executor);
    put_back(data, y, split[r], out.y);
    put_back(data, dx, split[r], out.dx);
    EXPECT_TRUE(y.gaps_untouched());
    EXPECT_TRUE(dx.gaps_untouched());
    mine.running_mean = running_mean.values();
    mine.running_var = running_var.values();
    mine.dweight = dweight.values();
    mine.dbias = dbias.values();
  });
  for (const auto& error : errors) {
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
  }
  return out;
}

void expect_same(const Outcome& actual, const Outcome& expected) {
  const RankOutcome& one = expected.ranks[0];
  for (const RankOutcome& rank : actual.ranks) {
    EXPECT_TRUE(same_bits(rank.saved.mean(), one.saved.mean())) << "mean";
    EXPECT_TRUE(same_bits(rank.saved.var(), one.saved.var())) << "var";
    EXPECT_TRUE(same_bits(rank.saved.rstd(), one.saved.rstd())) << "rstd";
    EXPECT_TRUE(same_bits(rank.running_mean, one.running_mean)) << "running mean";
    EXPECT_TRUE(same_bits(rank.running_var, one.running_var)) << "running var";
    EXPECT_TRUE(same_bits(rank.dweight, one.dweight)) << "dweight";
    EXPECT_TRUE(same_bits(rank.dbias, one.dbias)) << "dbias";
    EXPECT_EQ(rank.saved.count(), one.saved.count());
    EXPECT_EQ(rank.tracked, 42);
  }
  EXPECT_TRUE(same_bits(actual.y, expected.y)) << "y";
  EXPECT_TRUE(same_bits(actual.dx, expected.dx)) << "dx";
}

Outcome one_rank(const Data& data) {
  const LevelScope scope("reference");
  return run(data, whole(data.samples()), {Placement()});
}

class Invariance : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, Invariance, ::testing::ValuesIn(kDtypes),
                         [](const auto& param) { return std::string(name(param.param)); });

TEST_P(Invariance, RanksSplitsOrdersLayoutsThreadsAndLevelsExact) {
  ThreadPool two(2);  // shared by ranks: its callers take turns
  const std::vector<Executor*> executors = {&serial_executor(), &two};
  Random random(70);
  for (const bool rough : {true, false}) {
    // The second is large enough for two threads.
    for (const auto& sizes :
         {std::vector<std::int64_t>{24, 17, 7, 9}, std::vector<std::int64_t>{13, 3, 40, 26},
          std::vector<std::int64_t>{700, 65}}) {
      const Data data(random, GetParam(), sizes, rough);
      const Outcome expected = one_rank(data);
      for (const std::string& level : available_levels()) {
        const LevelScope scope(level);
        for (const int ranks : {1, 2, 3, 8}) {
          const Split split = random_split(random, data.samples(), ranks);
          std::vector<Placement> placements;
          for (int r = 0; r < ranks; ++r) {
            const Memory memory = random.pick(kMemories);
            placements.push_back({memory, random.one_in(4) ? random.pick(kMemories) : memory,
                                  random.one_in(4) ? random.pick(kMemories) : memory,
                                  random.pick(executors)});
          }
          SCOPED_TRACE(level + ", " + std::to_string(ranks) + " ranks, " +
                       std::to_string(sizes[0]) + " samples" + (rough ? ", rough" : ", offset"));
          expect_same(run(data, split, placements), expected);
          if (HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

// Planes from one element to several segments, channels around the vectors' lengths, three ranks of
// which one is empty, the best vector code.
TEST_P(Invariance, ShapesExact) {
  Random random(71);
  for (const std::int64_t plane : {1, 2, 15, 16, 17, 511, 512, 513, 1024, 3000}) {
    for (const std::int64_t channels : {1, 3, 17, 65}) {
      if (plane * channels > 20000 && plane != 3000) {
        continue;
      }
      const Data data(random, GetParam(), {plane < 100 ? 7 : 3, channels, plane}, true);
      const Outcome expected = one_rank(data);
      Split split = random_split(random, data.samples(), 2);
      split.insert(split.begin() + random.between(0, 2), std::vector<std::int64_t>());
      const Memory memory = random.one_in(2) ? Memory::kPlanes : Memory::kRows;
      SCOPED_TRACE(std::to_string(channels) + " channels, planes of " + std::to_string(plane));
      expect_same(run(data, split, {{memory, memory, memory}}), expected);
      if (HasFailure()) {
        return;
      }
    }
  }
}

// Large enough for blocks of channels on some ranks, while others go through one pass after the
// other, or have nothing.
TEST(Streaming, LargeTensorsExact) {
  ThreadPool two(2);
  ThreadPool three(3);
  Random random(74);
  const Data data(random, DType::kFloat32, {8, 140, 3137}, true);
  const Outcome expected = one_rank(data);
  for (const Split& split : {Split{{6, 0, 3, 1, 7, 5, 2, 4}}, Split{{6, 0, 3, 1, 7}, {5, 2, 4}},
                             Split{{4}, {6, 0, 3, 1, 7}, {}, {5, 2}}}) {
    SCOPED_TRACE(std::to_string(split.size()) + " ranks");
    expect_same(run(data, split,
                    {{Memory::kPlanes, Memory::kPlanes, Memory::kPlanes, &two},
                     {Memory::kPlanes, Memory::kPlanes, Memory::kPlanes, &serial_executor()},
                     {Memory::kPlanes, Memory::kRows, Memory::kPlanes, &three}}),
                expected);
  }
}

// Why the data above has teeth: binary64 sums of it, sample by sample, depend on the order.
TEST_P(Invariance, PlainSumsOfThisDataAreNotInvariant) {
  Random random(72);
  const Data data(random, GetParam(), {24, 3, 63}, true);
  const std::int64_t per_sample = data.per_sample();
  const auto plain = [&](const std::vector<std::int64_t>& order, double& sum, double& squares) {
    sum = squares = 0;
    for (const std::int64_t n : order) {
      for (std::int64_t i = 0; i < 63; ++i) {  // channel 0
        const double v = data.x[static_cast<std::size_t>(n * per_sample + i)];
        sum += v;
        squares += v * v;
      }
    }
  };
  double sum = 0;
  double squares = 0;
  plain(whole(24)[0], sum, squares);
  int other_sums = 0;
  int other_squares = 0;
  for (int round = 0; round < 10; ++round) {
    double again = 0;
    double squares_again = 0;
    plain(random_split(random, 24, 1)[0], again, squares_again);
    other_sums += again != sum;
    other_squares += squares_again != squares;
  }
  // Sums of this many float16 are exact in binary64; their squares are not.
  EXPECT_GE(other_sums, GetParam() == DType::kFloat16 ? 0 : 5);
  EXPECT_GE(other_squares, 5);
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
    for (const int ranks : {2, 3, 8}) {
      Data data(random, dtype, {24, 5, 30}, ranks != 3);
      const Split split = random_split(random, data.samples(), ranks);
      ThreadGroup group(ranks);
      std::vector<std::vector<double>> weights(4 * split.size());
      std::vector<double> mean;
      std::vector<double> rstd;
      const auto errors = run_ranks(ranks, [&](int rank) {
        const auto r = static_cast<std::size_t>(rank);
        const Tensor x = part_of(data, data.x, split[r], Memory::kPlanes);
        const Tensor dy = part_of(data, data.dy, split[r], Memory::kRows);
        Tensor out = x;
        BatchNorm layer({.channels = 5, .name = "layer"}, group.rank(rank));
        Saved saved;
        layer.forward({.x = x.view(), .y = out.view()}, saved);
        Tensor dweight(DType::kFloat64, {5});
        Tensor dbias(DType::kFloat64, {5});
        for (const auto affine : {AffineGradients::kShare, AffineGradients::kGlobal}) {
          layer.backward({.dy = dy.view(),
                          .x = x.view(),
                          .dx = out.view(),
                          .dweight = dweight.view(),
                          .dbias = dbias.view(),
                          .affine = affine},
                         saved);
          const std::size_t at = 4 * r + (affine == AffineGradients::kShare ? 0 : 2);
          weights[at] = dweight.values();
          weights[at + 1] = dbias.values();
        }
        if (rank == 0) {
          mean = testing::values(saved.mean());
          rstd = testing::values(saved.rstd());
        }
      });
      for (const auto& error : errors) {
        ASSERT_EQ(error, nullptr);
      }
      for (std::size_t c = 0; c < 5; ++c) {
        double dweight = 0;
        double dbias = 0;
        for (std::size_t r = 0; r < split.size(); ++r) {
          dweight += weights[4 * r][c];
          dbias += weights[4 * r + 1][c];
          EXPECT_EQ(weights[4 * r + 2][c], weights[2][c]);
          EXPECT_EQ(weights[4 * r + 3][c], weights[3][c]);
        }
        double total = 0;
        double total_products = 0;
        for (std::size_t i = 0; i < data.x.size(); ++i) {
          if (i / 30 % 5 == c) {
            total += std::fabs(data.dy[i]);
            total_products += std::fabs(data.dy[i] * data.x[i]);
          }
        }
        const double t = std::fabs(mean[c]) * total + total_products;
        EXPECT_LE(std::fabs(dweight - weights[2][c]), (ranks + 6) * kUnit * rstd[c] * t);
        EXPECT_LE(std::fabs(dbias - weights[3][c]), (ranks + 2) * kUnit * total);
      }
    }
  }
}

}  // namespace
}  // namespace syncbn
