// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "support.hpp"

// Steps of the layer at its edges: threads, nothing at all, other dtypes, odd sizes.
namespace syncbn {
namespace {

using testing::kDtypes;
using testing::Random;
using testing::round_to;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;

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
