// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "placed_rank.hpp"
#include "properties.hpp"
#include "step/passes.hpp"
#include "support.hpp"

// Steps of the layer at its edges: threads, nothing at all, other dtypes, odd sizes.
namespace syncbn::testing {
namespace {

// Each with its layer, by turns on one pool and each on a pool of its own.
TEST(BatchNorm, ThreadsWithLayersOfTheirOwnExact) {
  constexpr int kThreads = 8;
  std::vector<Tensor> xs;
  std::vector<std::vector<double>> ys;
  for (int i = 0; i < kThreads; ++i) {
    Random random(static_cast<std::uint64_t>(i));
    xs.emplace_back(DType::kFloat32, std::vector<std::int64_t>{4, 16, 20 + i},
                    unit_values(random, DType::kFloat32, 4 * 16 * (20 + i)));
    Tensor y = xs.back();
    Saved saved;
    BatchNorm({.channels = 16}).forward({.x = xs.back().view(), .y = y.view()}, saved);
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
       std::vector<std::vector<std::int64_t>>{{0, 3}, {0, 3, 4, 4}, {2, 3, 0}, {2, 3, 4, 0}}) {
    for (const DType dtype : kDtypes) {
      for (const auto affine : {AffineGradients::kGlobal, AffineGradients::kShare}) {
        Random random(3);
        Step step(random, dtype, sizes);
        step.affine = affine;
        step.options.momentum.reset();
        const Split split = {whole(sizes[0])[0], {}, {}};
        for (const auto& rank : run_in_group(step, split, std::vector<Placement>(3)).ranks) {
          EXPECT_EQ(rank.count, 0);
          for (const auto& values : {rank.mean, rank.var, rank.rstd, rank.dweight, rank.dbias}) {
            EXPECT_TRUE(same_bits(values, {0, 0, 0}));
          }
          EXPECT_TRUE(same_bits(rank.running_mean, step.running_mean.values));
          EXPECT_TRUE(same_bits(rank.running_var, step.running_var.values));
          EXPECT_EQ(rank.tracked, step.tracked);
        }
      }
    }
  }
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
}  // namespace syncbn::testing
