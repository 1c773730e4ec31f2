// SPDX-License-Identifier: Apache-2.0
#include "step/passes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// The welford mode: mean and M2 of each rank, gathered and merged (docs/options.md). Sums in long
// double (64 bits of precision) are the reference.
namespace syncbn {
namespace {

using testing::kDtypes;
using testing::kMemories;
using testing::Memory;
using testing::Random;
using testing::round_to;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;

struct Moments {
  double mean = 0;
  double var = 0;
};

Moments exact(const std::vector<double>& values) {
  long double sum = 0;
  for (const double v : values) {
    sum += static_cast<long double>(v);
  }
  const auto n = static_cast<long double>(values.size());
  const long double mean = sum / n;
  long double squares = 0;
  for (const double v : values) {
    squares += (static_cast<long double>(v) - mean) * (static_cast<long double>(v) - mean);
  }
  return {static_cast<double>(mean), static_cast<double>(squares / n)};
}

double unit_of(DType dtype) { return dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24; }

/// Chan, Golub and LeVeque 1983: the relative error of M2 by such updates is at most about
/// n kappa u, kappa = sqrt(1 + mean^2 / var). n counts additions in a row: a lane's, then merges.
/// The mean's error follows by the same argument: n u (|mean| + deviation).
void expect_close(const Moments& got, const Moments& expected, std::int64_t in_a_row, DType dtype) {
  const double u = unit_of(dtype);
  const auto n = static_cast<double>(in_a_row);
  const double deviation = std::sqrt(expected.var);
  const double kappa = std::sqrt(1 + expected.mean * expected.mean / expected.var);
  EXPECT_LE(std::abs(got.mean - expected.mean), 4 * n * u * (std::abs(expected.mean) + deviation));
  EXPECT_LE(std::abs(got.var - expected.var), 4 * n * kappa * u * expected.var);
}

/// Statistics of a batch whose samples lie on ranks [bounds[r], bounds[r + 1]).
std::vector<Saved> run(DType dtype, const std::vector<std::int64_t>& sizes,
                       const std::vector<double>& values, const std::vector<std::int64_t>& bounds,
                       Memory memory, Executor& executor, std::vector<double>* y = nullptr) {
  const auto ranks = static_cast<int>(bounds.size()) - 1;
  const std::int64_t per_sample =
      TensorView(nullptr, dtype, sizes).numel() / std::max<std::int64_t>(1, sizes[0]);
  ThreadGroup group(ranks);
  std::vector<Saved> out(static_cast<std::size_t>(ranks));
  const auto errors = run_ranks(ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::vector<std::int64_t> mine = sizes;
    mine[0] = bounds[r + 1] - bounds[r];
    Tensor x(dtype, mine, memory);
    x.fill(std::vector<double>(values.begin() + bounds[r] * per_sample,
                               values.begin() + bounds[r + 1] * per_sample));
    Tensor result = x;
    BatchNorm({.channels = sizes[1], .name = "layer", .statistics = Statistics::kWelford},
              group.rank(rank))
        .forward({.x = x.view(), .y = result.view()}, out[r], executor);
    if (y != nullptr) {
      const std::vector<double> part = result.values();
      std::copy(part.begin(), part.end(), y->begin() + bounds[r] * per_sample);
    }
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error, nullptr);
  }
  return out;
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
        std::vector<double> y(values.size());
        const auto ranks = run(dtype, sizes, values, bounds, memory, pool, &y);
        for (const Saved& one : ranks) {
          EXPECT_EQ(one.count(), 40 * 35);
          EXPECT_TRUE(same_bits(one.mean(), ranks[0].mean()))
              << "all ranks have the same statistics";
          EXPECT_TRUE(same_bits(one.rstd(), ranks[0].rstd()));
        }
        for (std::size_t c = 0; c < 70; ++c) {
          // At most all rows of a rank, or a lane's share of them and 16 merges; then the ranks.
          expect_close({ranks[0].mean()[c], ranks[0].var()[c]}, exact(channels[c]),
                       40 * 35 + 16 + 4, dtype);
          EXPECT_EQ(ranks[0].rstd()[c], 1 / std::sqrt(ranks[0].var()[c] + 1e-5));
        }
        // y follows from the statistics by section 4 of docs/numerics.md.
        Tensor x(dtype, sizes, Memory::kPlanes);
        x.fill(values);
        Tensor expected = x;
        normalize({x.view(),
                   {},
                   ranks[0].mean().data(),
                   ranks[0].rstd().data(),
                   {},
                   {},
                   {},
                   expected.view()},
                  pool);
        EXPECT_TRUE(same_bits(y, expected.values()));
      }
    }
  }
}

// The classical catastrophe of sum(x^2) - mean^2: mean / deviation = 2^20 in binary32, where sums
// of squares in binary32 would leave nothing of the variance.
TEST(Welford, LargeMeanWithinBound) {
  Random random(96);
  std::vector<double> values(4096);
  for (double& v : values) {
    v = round_to(DType::kFloat32, 0x1p20 + 2 * random.signed_unit());
  }
  const auto ranks = run(DType::kFloat32, {4096, 1, 1}, values, {0, 1000, 4096}, Memory::kPlanes,
                         serial_executor());
  expect_close({ranks[0].mean()[0], ranks[0].var()[0]}, exact(values), 4096 / 16 + 18,
               DType::kFloat32);
}

TEST(Welford, ThreadsAndRunsDoNotMatterExact) {
  Random random(97);
  ThreadPool two(2);
  ThreadPool three(3);
  const std::vector<double> values = testing::rough_values(random, DType::kFloat32, 6, 200 * 50);
  for (const Memory memory : kMemories) {
    const auto one =
        run(DType::kFloat32, {6, 200, 50}, values, {0, 2, 6}, memory, serial_executor());
    for (Executor* executor : {static_cast<Executor*>(&two), static_cast<Executor*>(&three)}) {
      const auto other = run(DType::kFloat32, {6, 200, 50}, values, {0, 2, 6}, memory, *executor);
      EXPECT_TRUE(same_bits(other[0].mean(), one[0].mean()));
      EXPECT_TRUE(same_bits(other[0].var(), one[0].var()));
    }
  }
}

TEST(Welford, EmptyRanksAndSpecialValues) {
  const std::vector<std::int64_t> none = {0, 2, 3};
  for (const auto& one :
       run(DType::kFloat32, none, {}, {0, 0}, Memory::kPlanes, serial_executor())) {
    EXPECT_EQ(one.count(), 0);
    EXPECT_TRUE(same_bits(one.mean(), {0, 0}));
    EXPECT_TRUE(same_bits(one.rstd(), {0, 0}));
  }
  const double inf = INFINITY;
  const auto ranks = run(DType::kFloat32, {2, 3}, {1, inf, NAN, 3, 1, 2}, {0, 1, 1, 2},
                         Memory::kPlanes, serial_executor());
  EXPECT_EQ(ranks[1].mean()[0], 2);
  EXPECT_EQ(ranks[1].var()[0], 1);
  EXPECT_FALSE(std::isfinite(ranks[1].var()[1]));
  EXPECT_TRUE(std::isnan(ranks[1].mean()[2]));
}

TEST(Welford, RecordsAreEightBytesAChannel) {
  EXPECT_EQ(welford_words(DType::kFloat16, 10), 11);
  EXPECT_EQ(welford_words(DType::kFloat32, 10), 11);
  EXPECT_EQ(welford_words(DType::kFloat64, 10), 21);
}

}  // namespace
}  // namespace syncbn
