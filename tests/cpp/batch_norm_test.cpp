// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"

// One step of the layer on small cases, by the formulas of docs/numerics.md.
namespace syncbn {
namespace {

using testing::kDtypes;
using testing::Random;
using testing::round_to;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// One rank's forward pass; `rest` is what it takes besides x and y.
Saved forward(BatchNorm& layer, const Tensor& x, Tensor& y, BatchNorm::Forward rest = {}) {
  rest.x = x.view();
  rest.y = y.view();
  Saved saved;
  layer.forward(rest, saved);
  return saved;
}

Saved forward(const Tensor& x, Tensor& y, const BatchNorm::Forward& rest = {},
              BatchNorm::Options options = {}) {
  options.channels = x.view().sizes[1];
  BatchNorm layer(options);
  return forward(layer, x, y, rest);
}

// Each with its layer, by turns on one pool and each on a pool of its own.
TEST(BatchNorm, ThreadsWithLayersOfTheirOwnExact) {
  constexpr int kThreads = 8;
  std::vector<Tensor> xs;
  std::vector<std::vector<double>> ys;
  for (int i = 0; i < kThreads; ++i) {
    Random random(static_cast<std::uint64_t>(i));
    std::vector<double> values(static_cast<std::size_t>(4 * 16 * (20 + i)));
    for (double& value : values) {
      value = round_to(DType::kFloat32, random.signed_unit());
    }
    xs.emplace_back(DType::kFloat32, std::vector<std::int64_t>{4, 16, 20 + i}, values);
    Tensor y(DType::kFloat32, {4, 16, 20 + i});
    forward(xs.back(), y);
    ys.push_back(y.values());
  }
  ThreadPool shared(3);
  run_ranks(kThreads, [&](int i) {
    const Tensor& x = xs[static_cast<std::size_t>(i)];
    BatchNorm layer({.channels = 16});
    Saved saved;
    ThreadPool own(2);
    for (int round = 0; round < 50; ++round) {
      Tensor y(DType::kFloat32, {4, 16, 20 + i});
      Executor& executor = round % 2 == 0 ? shared : own;
      layer.forward({.x = x.view(), .y = y.view()}, saved, executor);
      ASSERT_EQ(y.values(), ys[static_cast<std::size_t>(i)]) << "thread " << i;
    }
  });
}

TEST(BatchNorm, ForwardAndBackwardByHandExact) {
  for (const DType dtype : kDtypes) {
    SCOPED_TRACE(name(dtype));
    // Channel 0: 1, 3, 5, 7 (mean 4, var 5); channel 1: -2, 2, -2, 2 (mean 0, var 4).
    const Tensor x(dtype, {2, 2, 2}, std::vector<double>{1, 3, -2, 2, 5, 7, -2, 2});
    const Tensor weight(DType::kFloat32, {2}, std::vector<double>{0.5, -3});
    const Tensor bias(DType::kFloat64, {2}, std::vector<double>{10, 0.1});
    Tensor y(dtype, {2, 2, 2});
    BatchNorm layer({.channels = 2, .eps = 4});
    Saved s;
    layer.forward({.x = x.view(), .weight = weight.view(), .bias = bias.view(), .y = y.view()}, s);
    EXPECT_EQ(s.count(), 4);
    EXPECT_TRUE(same_bits(s.mean(), {4, 0}));
    EXPECT_TRUE(same_bits(s.var(), {5, 4}));
    const std::vector<double> rstd = {1 / std::sqrt(9.0), 1 / std::sqrt(8.0)};
    EXPECT_TRUE(same_bits(s.rstd(), rstd));

    const Tensor dy(dtype, {2, 2, 2}, std::vector<double>{1, 0, 2, 1, 0, -1, 0.5, 0.5});
    Tensor dx(dtype, {2, 2, 2});
    Tensor dweight(DType::kFloat64, {2});
    Tensor dbias(DType::kFloat32, {2});
    layer.backward({.dy = dy.view(),
                    .x = x.view(),
                    .weight = weight.view(),
                    .bias = bias.view(),
                    .dx = dx.view(),
                    .dweight = dweight.view(),
                    .dbias = dbias.view(),
                    .affine = AffineGradients::kGlobal},
                   s);
    // A: 0 and 4; B: 1 - 7 = -6 and -4 + 2 - 1 + 1 = -2.
    const std::vector<double> a_sum = {0, 4};
    const std::vector<double> g_sum = {-6, -2};  // B - mean * A
    for (std::size_t c = 0; c < 2; ++c) {
      EXPECT_EQ(dweight.get(static_cast<std::int64_t>(c)), rstd[c] * g_sum[c]);
      EXPECT_EQ(dbias.get(static_cast<std::int64_t>(c)), a_sum[c]);
      const double w = weight.get(static_cast<std::int64_t>(c)) * rstd[c];
      const double b = bias.get(static_cast<std::int64_t>(c));
      const double c1 = w;
      const double c2 = -(((w * rstd[c]) * rstd[c]) * (g_sum[c] / 4));
      const double c3 = -(w * (a_sum[c] / 4));
      for (const int k : {0, 1, 4, 5}) {
        const std::int64_t i = static_cast<std::int64_t>(2 * c) + k;
        const double centred = x.get(i) - s.mean()[c];  // exact, and the mean fits binary32
        if (dtype == DType::kFloat64) {
          EXPECT_EQ(y.get(i), std::fma(w, centred, b));
          EXPECT_EQ(dx.get(i), std::fma(c1, dy.get(i), std::fma(c2, centred, c3)));
          continue;
        }
        const auto t = static_cast<float>(centred);
        EXPECT_EQ(y.get(i), round_to(dtype, static_cast<double>(std::fma(static_cast<float>(w), t,
                                                                         static_cast<float>(b)))));
        // floor(log2 rstd) = -2 for both channels.
        const float inner = std::fma(static_cast<float>(c2 * 4), t * 0.25f, static_cast<float>(c3));
        const float outer = std::fma(static_cast<float>(c1), static_cast<float>(dy.get(i)), inner);
        EXPECT_EQ(dx.get(i), round_to(dtype, static_cast<double>(outer)));
      }
    }
  }
}

TEST(BatchNorm, AbsentParametersAreOneAndZeroExact) {
  Random random(80);
  for (const DType dtype : kDtypes) {
    const Tensor x(dtype, {6, 3, 5}, testing::rough_values(random, dtype, 6, 15));
    const Tensor ones(DType::kFloat16, {3}, std::vector<double>(3, 1.0));
    const Tensor zeros(DType::kFloat16, {3}, std::vector<double>(3, 0.0));
    Tensor without(dtype, {6, 3, 5});
    Tensor with(dtype, {6, 3, 5});
    BatchNorm layer({.channels = 3});
    const Saved s = forward(layer, x, without);
    const Saved of_with = forward(layer, x, with, {.weight = ones.view(), .bias = zeros.view()});
    EXPECT_TRUE(same_bits(without.values(), with.values()));
    Tensor dx(dtype, {6, 3, 5});
    Tensor dx_with(dtype, {6, 3, 5});
    layer.backward({.dy = x.view(), .x = x.view(), .dx = dx.view()}, s);
    layer.backward({.dy = x.view(),
                    .x = x.view(),
                    .weight = ones.view(),
                    .bias = zeros.view(),
                    .dx = dx_with.view(),
                    .affine = AffineGradients::kGlobal},
                   of_with);
    EXPECT_TRUE(same_bits(dx.values(), dx_with.values()));
  }
}

TEST(BatchNorm, OutputsMayBeTheInputsExact) {
  Random random(81);
  for (const DType dtype : kDtypes) {
    const Tensor x(dtype, {6, 3, 5}, testing::rough_values(random, dtype, 6, 15));
    const Tensor dy(dtype, {6, 3, 5}, testing::rough_values(random, dtype, 6, 15));
    Tensor y(dtype, {6, 3, 5});
    Tensor dx(dtype, {6, 3, 5});
    BatchNorm layer({.channels = 3});
    const Saved s = forward(layer, x, y);
    layer.backward({.dy = dy.view(), .x = x.view(), .dx = dx.view()}, s);
    Tensor x_and_y = x;
    Tensor dy_and_dx = dy;
    forward(x_and_y, x_and_y);
    layer.backward({.dy = dy_and_dx.view(), .x = x.view(), .dx = dy_and_dx.view()}, s);
    EXPECT_TRUE(same_bits(x_and_y.values(), y.values()));
    EXPECT_TRUE(same_bits(dy_and_dx.values(), dx.values()));
  }
}

TEST(BatchNorm, OneElementPerChannelExact) {
  const Tensor x(DType::kFloat32, {1, 2}, std::vector<double>{3, -1e30});
  Tensor y(DType::kFloat32, {1, 2});
  Tensor running_var(DType::kFloat32, {2}, std::vector<double>{8, 16});
  Tensor running_mean = running_var;
  const Saved s =
      forward(x, y, {.running_mean = running_mean.view(), .running_var = running_var.view()});
  EXPECT_EQ(s.count(), 1);
  EXPECT_EQ(s.mean()[0], 3);
  EXPECT_TRUE(same_bits(s.var(), {0, 0}));
  EXPECT_TRUE(same_bits(y.values(), {0, 0}));
  EXPECT_EQ(running_var.get(0), round_to(DType::kFloat32, (1 - 0.1) * 8));  // no division by N - 1
}

TEST(BatchNorm, WithoutEpsAConstantChannelIsNan) {
  const Tensor x(DType::kFloat32, {2, 2}, std::vector<double>{3, 1, 3, 2});
  Tensor y(DType::kFloat32, {2, 2});
  const Saved s = forward(x, y, {}, {.eps = 0});
  EXPECT_EQ(s.rstd()[0], kInf);
  EXPECT_TRUE(std::isnan(y.get(0)));
  EXPECT_EQ(y.get(1), -1);
}

TEST(BatchNorm, WhatIsNotFiniteStaysInItsChannelExact) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : kDtypes) {
    const Tensor x(dtype, {2, 5},
                   std::vector<double>{nan, kInf, -kInf, kInf, 1,  //
                                       1, 1, 1, -kInf, 3});
    Tensor y(dtype, {2, 5});
    Tensor running_mean(DType::kFloat64, {5}, std::vector<double>(5, 0.0));
    Tensor running_var = running_mean;
    const Saved s =
        forward(x, y, {.running_mean = running_mean.view(), .running_var = running_var.view()});
    EXPECT_TRUE(same_bits(s.mean(), {nan, kInf, -kInf, nan, 2}));
    EXPECT_TRUE(same_bits(s.var(), {nan, nan, nan, nan, 1}));
    EXPECT_TRUE(std::isnan(running_mean.get(0)));
    EXPECT_EQ(running_mean.get(1), kInf);
    EXPECT_EQ(running_mean.get(4), 0.1 * 2);
    EXPECT_TRUE(std::isnan(y.get(0)) && std::isnan(y.get(6)) && std::isnan(y.get(8)));
    EXPECT_EQ(y.get(9), -y.get(4));
    EXPECT_GT(y.get(9), 0.99);
  }
  const Tensor large(DType::kFloat64, {2, 1}, std::vector<double>{1e200, 2e200});
  Tensor y(DType::kFloat64, {2, 1});
  const Saved s = forward(large, y);
  EXPECT_EQ(s.mean()[0], 1.5e200);
  EXPECT_EQ(s.var()[0], kInf);  // 1e400 does not fit
  EXPECT_EQ(s.rstd()[0], 0);
}

TEST(BatchNorm, RunningStatisticsOfAnyDtypeAreRoundedOnceExact) {
  Random random(82);
  for (const DType dtype : kDtypes) {
    std::vector<double> values;
    for (int i = 0; i < 8 * 40; ++i) {
      values.push_back(round_to(DType::kFloat32, 3 * random.signed_unit()));
    }
    const Tensor x(DType::kFloat32, {8, 40}, values);
    Tensor y(DType::kFloat32, {8, 40});
    std::vector<double> before;
    for (int c = 0; c < 40; ++c) {
      before.push_back(round_to(dtype, random.signed_unit()));
    }
    Tensor mean(dtype, {40}, before);
    Tensor var(dtype, {40}, before);
    std::int64_t tracked = 0;
    const Saved s = forward(
        x, y,
        {.running_mean = mean.view(), .running_var = var.view(), .num_batches_tracked = &tracked},
        {.momentum = 0.3});
    EXPECT_EQ(tracked, 1);
    for (std::size_t c = 0; c < 40; ++c) {
      const double kept = (1 - 0.3) * before[c];
      const auto i = static_cast<std::int64_t>(c);
      EXPECT_EQ(mean.get(i), round_to(dtype, std::fma(0.3, s.mean()[c], kept)));
      EXPECT_EQ(var.get(i), round_to(dtype, std::fma(0.3, s.var()[c] * (8.0 / 7.0), kept)));
    }
  }
}

TEST(BatchNorm, MomentumZeroOneAndEmptyExact) {
  Random random(83);
  std::vector<double> expected_mean = {0, 0};
  std::vector<double> expected_var = {1, 1};
  Tensor mean(DType::kFloat64, {2}, expected_mean);
  Tensor var(DType::kFloat64, {2}, expected_var);
  Tensor y(DType::kFloat32, {5, 2});
  std::int64_t tracked = 0;
  const BatchNorm::Forward running{
      .running_mean = mean.view(), .running_var = var.view(), .num_batches_tracked = &tracked};
  for (int step = 1; step <= 10; ++step) {
    const Tensor x(DType::kFloat32, {5, 2}, testing::rough_values(random, DType::kFloat32, 5, 2));
    const Saved s = forward(x, y, running, {.momentum = std::nullopt});  // cumulative
    EXPECT_EQ(tracked, step);
    const double f = 1.0 / step;
    for (std::size_t c = 0; c < 2; ++c) {
      expected_mean[c] = std::fma(f, s.mean()[c], (1 - f) * expected_mean[c]);
      expected_var[c] = std::fma(f, s.var()[c] * (5.0 / 4.0), (1 - f) * expected_var[c]);
    }
    ASSERT_TRUE(same_bits(mean.values(), expected_mean));
    ASSERT_TRUE(same_bits(var.values(), expected_var));
  }
  const Tensor x(DType::kFloat32, {2, 2}, std::vector<double>{1, 2, 3, 4});
  Tensor y2(DType::kFloat32, {2, 2});
  forward(x, y2, running, {.momentum = 0});
  EXPECT_TRUE(same_bits(mean.values(), expected_mean));
  EXPECT_EQ(tracked, 11);
  forward(x, y2, {.running_mean = mean.view(), .running_var = var.view()}, {.momentum = 1});
  EXPECT_EQ(mean.values(), (std::vector<double>{2, 3}));
  EXPECT_EQ(var.values(), (std::vector<double>{2, 2}));
}

TEST(BatchNorm, AllRanksEmptyChangesNothingExact) {
  for (const auto& sizes :
       {std::vector<std::int64_t>{0, 3}, std::vector<std::int64_t>{0, 3, 4, 4},
        std::vector<std::int64_t>{2, 3, 0}, std::vector<std::int64_t>{2, 3, 4, 0}}) {
    for (const DType dtype : kDtypes) {
      ThreadGroup group(3);
      const auto errors = run_ranks(3, [&](int rank) {
        const Tensor x(dtype, sizes);
        Tensor y(dtype, sizes);
        const std::vector<double> before = {0.1, -7, 1e30};
        Tensor mean(DType::kFloat64, {3}, before);
        Tensor var(DType::kFloat64, {3}, before);
        Tensor dweight(DType::kFloat32, {3}, before);
        Tensor dbias(DType::kFloat32, {3}, before);
        std::int64_t tracked = 5;
        BatchNorm layer({.channels = 3, .name = "layer", .momentum = std::nullopt},
                        group.rank(rank));
        Saved s;
        layer.forward({.x = x.view(),
                       .y = y.view(),
                       .running_mean = mean.view(),
                       .running_var = var.view(),
                       .num_batches_tracked = &tracked},
                      s);
        EXPECT_EQ(s.count(), 0);
        for (const auto values : {s.mean(), s.var(), s.rstd()}) {
          EXPECT_TRUE(same_bits(values, {0, 0, 0}));
        }
        EXPECT_TRUE(same_bits(mean.values(), before));
        EXPECT_TRUE(same_bits(var.values(), before));
        EXPECT_EQ(tracked, 5);
        layer.backward({.dy = x.view(),
                        .x = x.view(),
                        .dx = y.view(),
                        .dweight = dweight.view(),
                        .dbias = dbias.view(),
                        .affine = rank == 0 ? AffineGradients::kGlobal : AffineGradients::kShare},
                       s);
        EXPECT_TRUE(same_bits(dweight.values(), {0, 0, 0}));
        EXPECT_TRUE(same_bits(dbias.values(), {0, 0, 0}));
      });
      for (const auto& error : errors) {
        EXPECT_EQ(error, nullptr);
      }
    }
  }
}

TEST(BatchNorm, AnEmptyRankMayHaveAnotherDtypeOfTheSameFormat) {
  // float32 and bfloat16 share the message format; which one an empty rank has does not matter.
  ThreadGroup group(2);
  std::vector<Saved> saved(2);
  const auto errors = run_ranks(2, [&](int rank) {
    const DType dtype = rank == 0 ? DType::kBFloat16 : DType::kFloat32;
    const Tensor x(dtype, {rank == 0 ? 2 : 0, 1}, std::vector<double>{1, 3});
    Tensor y = x;
    BatchNorm({.channels = 1, .name = "layer"}, group.rank(rank))
        .forward({.x = x.view(), .y = y.view()}, saved[static_cast<std::size_t>(rank)]);
  });
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(errors[r], nullptr);
    EXPECT_TRUE(same_bits(saved[r].mean(), {2}));
    EXPECT_EQ(saved[r].count(), 2);
  }
}

TEST(BatchNorm, NoChannels) {
  const Tensor x(DType::kFloat32, {4, 0, 3});
  Tensor y(DType::kFloat32, {4, 0, 3});
  const Saved s = forward(x, y);
  EXPECT_TRUE(s.mean().empty());
}

TEST(BatchNorm, SizesAndStridesOfNoElementsMayBeAny) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const auto& sizes :
       {std::vector<std::int64_t>{0, 3, kMost, kMost},
        std::vector<std::int64_t>{kMost, 3, kMost, 0}, std::vector<std::int64_t>{2, 0, 4}}) {
    for (const bool contiguous : {true, false}) {
      MutableTensorView x(nullptr, DType::kFloat32, sizes);
      if (!contiguous) {
        x.strides = std::vector<std::int64_t>(sizes.size(), -kMost);
      }
      const std::uint8_t all[8] = {1, 1, 1, 1, 1, 1, 1, 1};
      const MaskView mask =
          sizes[1] == 0 ? MaskView{all, {2, 4}} : MaskView{nullptr, {sizes[0], sizes[2], sizes[3]}};
      BatchNorm layer({.channels = sizes[1], .activation = {ActivationKind::kRelu}});
      Saved saved;
      layer.forward({.x = x, .mask = mask, .residual = x, .y = x}, saved);
      EXPECT_EQ(saved.count(), sizes[1] == 0 ? 8 : 0);
      EXPECT_EQ(activation_mask_bytes(x), 0);
      EXPECT_NO_THROW(
          layer.backward({.dy = x, .x = x, .mask = mask, .dx = x, .dresidual = x}, saved));
    }
  }
}

}  // namespace
}  // namespace syncbn
