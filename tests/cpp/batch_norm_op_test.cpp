// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm_op.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "groups.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// The operator by the formulas of its header, and its bits against the layer's.
namespace syncbn::testing {
namespace {

constexpr std::int64_t kChannels = 3;

/// The variables of an operator, and what it writes.
struct Variables {
  explicit Variables(const Tensor& x, DType dtype = DType::kFloat64)
      : mean(dtype, {kChannels}, std::vector<double>(kChannels, 7)),
        var(dtype, {kChannels}, std::vector<double>(kChannels, 3)),
        y(x),
        batch_mean(DType::kFloat64, {kChannels}, std::vector<double>(kChannels, -1)),
        batch_var(DType::kFloat64, {kChannels}, std::vector<double>(kChannels, -1)) {}

  BatchNormOpStatistics run(const Tensor& x, const BatchNormOpAttributes& attributes,
                            Communicator& communicator) {
    return batch_norm_op(
        {x.view(), mean.view(), var.view(), scaled ? TensorView(scale.view()) : TensorView(),
         shifted ? TensorView(bias.view()) : TensorView(), batches},
        {y.view(), batch_mean.view(), batch_var.view(), mean.view(), var.view(), &batches},
        attributes, communicator, serial_executor());
  }
  BatchNormOpStatistics run(const Tensor& x, const BatchNormOpAttributes& attributes = {}) {
    return run(x, attributes, self_communicator());
  }

  Tensor mean;
  Tensor var;
  Tensor scale = Tensor(DType::kFloat32, {kChannels}, std::vector<double>{0.5, -2, 1});
  Tensor bias = Tensor(DType::kFloat32, {kChannels}, std::vector<double>{1, 0.25, -3});
  bool scaled = true;
  bool shifted = true;
  std::int64_t batches = 0;
  Tensor y;
  Tensor batch_mean;
  Tensor batch_var;
};

/// Samples [first, last) of shape (n, 3, 4).
Tensor samples(DType dtype, std::int64_t first, std::int64_t last, std::uint64_t seed = 1) {
  Random random(seed);
  const std::vector<double> all = rough_values(random, dtype, 9, kChannels * 4);
  return Tensor(dtype, {last - first, kChannels, 4},
                std::vector<double>(all.begin() + first * 12, all.begin() + last * 12));
}

TEST(BatchNormOp, TrainingHasTheLayersBitsExact) {
  for (const DType dtype : kDtypes) {
    SCOPED_TRACE(name(dtype));
    const Tensor x = samples(dtype, 0, 9);
    const Tensor dy = samples(dtype, 0, 9, 2);
    Variables op(x);
    const BatchNormOpAttributes attributes{.epsilon = 1e-3};
    const BatchNormOpStatistics used = op.run(x, attributes);

    Tensor y(dtype, {9, kChannels, 4});
    BatchNorm layer({.channels = kChannels, .eps = 1e-3});
    Saved expected;
    layer.forward({.x = x.view(), .weight = op.scale.view(), .bias = op.bias.view(), .y = y.view()},
                  expected);
    EXPECT_TRUE(same_bits(op.y.values(), y.values()));
    EXPECT_TRUE(same_bits(op.batch_mean.values(), expected.mean()));
    EXPECT_TRUE(same_bits(op.batch_var.values(), expected.var()));
    EXPECT_EQ(used.count, 36);

    Tensor dx(dtype, {9, kChannels, 4}), layer_dx(dtype, {9, kChannels, 4});
    Tensor dscale(DType::kFloat64, {kChannels}), dbias(DType::kFloat64, {kChannels});
    Tensor dweight(DType::kFloat64, {kChannels}), dshift(DType::kFloat64, {kChannels});
    batch_norm_op_backward(
        {dy.view(), x.view(), op.scale.view(), dx.view(), dscale.view(), dbias.view()}, used,
        attributes, self_communicator(), serial_executor());
    layer.backward({.dy = dy.view(),
                    .x = x.view(),
                    .weight = op.scale.view(),
                    .bias = op.bias.view(),
                    .dx = layer_dx.view(),
                    .dweight = dweight.view(),
                    .dbias = dshift.view()},
                   expected);
    EXPECT_TRUE(same_bits(dx.values(), layer_dx.values()));
    EXPECT_TRUE(same_bits(dscale.values(), dweight.values()));
    EXPECT_TRUE(same_bits(dbias.values(), dshift.values()));
  }
}

TEST(BatchNormOp, FirstBatchAssignsAndLaterOnesAverageExact) {
  // Batches of mean 4 and 8 and biased variance 5 and 16; momentum 0.75 keeps all exact.
  const Tensor first(DType::kFloat32, {4, 3},
                     std::vector<double>{1, 1, 1, 3, 3, 3, 5, 5, 5, 7, 7, 7});
  const Tensor second(DType::kFloat32, {2, 3}, std::vector<double>{4, 4, 4, 12, 12, 12});
  const BatchNormOpAttributes attributes{.momentum = 0.75};
  Variables op(first);
  op.run(first, attributes);
  EXPECT_EQ(op.mean.values(), (std::vector<double>{4, 4, 4}));
  EXPECT_EQ(op.var.values(), (std::vector<double>{5, 5, 5}));
  EXPECT_EQ(op.batches, 1);
  op.y = Tensor(DType::kFloat32, {2, 3});
  op.run(second, attributes);
  EXPECT_EQ(op.mean.values(), (std::vector<double>{5, 5, 5}));          // 4 * 0.75 + 8 * 0.25
  EXPECT_EQ(op.var.values(), (std::vector<double>{7.75, 7.75, 7.75}));  // 5 * 0.75 + 16 * 0.25
  EXPECT_EQ(op.batches, 2);
  // A batch without elements.
  const Tensor none(DType::kFloat32, {0, 3});
  op.y = Tensor(DType::kFloat32, {0, 3});
  op.run(none, attributes);
  EXPECT_EQ(op.mean.values(), (std::vector<double>{5, 5, 5}));
  EXPECT_EQ(op.batches, 2);
}

TEST(BatchNormOp, GlobalEstimatesNormalizeAndAreConstants) {
  for (const DType estimates : kDtypes) {
    const Tensor x = samples(DType::kFloat32, 0, 9);
    const Tensor dy = samples(DType::kFloat32, 0, 9, 2);
    const BatchNormOpAttributes attributes{.use_global_est = true};
    Variables op(x, estimates);
    op.batches = 5;
    const BatchNormOpStatistics used = op.run(x, attributes);
    EXPECT_EQ(op.batches, 6);
    // Inference with what was saved gives the same output, and changes nothing.
    Variables inference = op;
    inference.run(x, {.is_infer = true});
    EXPECT_TRUE(same_bits(inference.y.values(), op.y.values()));
    EXPECT_TRUE(same_bits(inference.mean.values(), op.mean.values()));
    EXPECT_TRUE(same_bits(inference.batch_var.values(), op.var.values()));
    EXPECT_EQ(inference.batches, 6);
    // dx = scale * rstd * dy.
    Tensor dx(DType::kFloat32, {9, kChannels, 4});
    batch_norm_op_backward({dy.view(), x.view(), op.scale.view(), dx.view(), {}, {}}, used,
                           attributes, self_communicator(), serial_executor());
    for (std::int64_t i = 0; i < dx.numel(); ++i) {
      const std::int64_t c = i / 4 % kChannels;
      const auto w = static_cast<float>(op.scale.get(c) / std::sqrt(op.var.get(c) + 1e-6));
      const float expected = w * static_cast<float>(dy.get(i));
      // w comes from three roundings here and from two there: one unit in its last place.
      EXPECT_NEAR(dx.get(i), expected, std::abs(expected) * 0x1p-22);
    }
  }
}

TEST(BatchNormOp, RanksHaveTheBitsOfOneRankExact) {
  const Tensor x = samples(DType::kFloat32, 0, 9);
  Variables alone(x);
  alone.run(x);
  const std::vector<double> y = alone.y.values();
  constexpr std::int64_t kBounds[] = {0, 2, 2, 9};  // rank 1 has no samples
  ThreadGroup group(3);
  expect_no_errors(run_ranks(3, [&](int rank) {
    const std::int64_t first = kBounds[rank], last = kBounds[rank + 1];
    const Tensor part = samples(DType::kFloat32, first, last);
    Variables op(part);
    op.run(part, {.layer = 1}, group.rank(rank));
    EXPECT_TRUE(same_bits(op.mean.values(), alone.mean.values()));
    EXPECT_TRUE(same_bits(op.var.values(), alone.var.values()));
    EXPECT_TRUE(same_bits(op.y.values(),
                          std::vector<double>(y.begin() + first * 12, y.begin() + last * 12)));
  }));
}

TEST(BatchNormOp, DisagreementChangesNothingOnAnyRank) {
  for (int option = 0; option < 6; ++option) {
    SCOPED_TRACE(option);
    ThreadGroup group(2);
    expect_no_errors(run_ranks(2, [&](int rank) {
      const Tensor x = samples(DType::kFloat32, 0, 2);
      Variables op(x);
      BatchNormOpAttributes attributes{.layer = 1};
      if (rank == 1) {
        attributes.momentum += option == 0 ? 1e-10 : 0;
        attributes.epsilon = option == 1 ? 1e-3 : attributes.epsilon;
        attributes.use_global_est = option == 2;
        op.batches = option == 3 ? 1 : 0;
        op.scaled = option != 4;
        op.shifted = option != 5;
      }
      const std::int64_t batches = op.batches;
      const std::string text =
          thrown_text<DivergenceError>([&] { op.run(x, attributes, group.rank(rank)); });
      EXPECT_TRUE(contains(text, "momentum, use_global_est, and whether there are scale and bias"));
      EXPECT_EQ(op.mean.values(), std::vector<double>(kChannels, 7));
      EXPECT_EQ(op.batch_mean.values(), std::vector<double>(kChannels, -1));
      EXPECT_EQ(op.batches, batches);
    }));
  }
}

TEST(BatchNormOp, RefusalReachesTheOtherRank) {
  const auto refused = [](const BatchNormOpAttributes& wrong, const std::string& text) {
    ThreadGroup group(2);
    const auto errors = run_ranks(2, [&](int rank) {
      const Tensor x = samples(DType::kFloat32, 0, 2);
      Variables op(x);
      op.run(x, rank == 0 ? wrong : BatchNormOpAttributes{.layer = 1}, group.rank(rank));
    });
    EXPECT_EQ(text_of<InvalidArgument>(errors[0]), text);
    EXPECT_TRUE(contains(text_of<PeerLost>(errors[1]), text));
  };
  refused({.epsilon = -1, .layer = 1}, "epsilon: got -1, expected a finite number of at least 0");
  refused({},
          "attributes.layer: got 0, expected this layer's own number, from 1 on, the same on all "
          "ranks (there are 2 ranks)");
}

TEST(BatchNormOp, NobodyWaitsForInferenceAndConstants) {
  // Rank 1 never calls: an exchange would end in ExchangeTimeout.
  ThreadGroup group(2, std::chrono::milliseconds(50));
  const Tensor x = samples(DType::kFloat32, 0, 2);
  Variables op(x);
  BatchNormOpAttributes attributes{.is_infer = true};
  const BatchNormOpStatistics used = op.run(x, attributes, group.rank(0));
  Tensor dx(DType::kFloat32, {2, kChannels, 4}), dbias(DType::kFloat32, {kChannels});
  const auto backward = [&](const MutableTensorView& gradient) {
    batch_norm_op_backward({x.view(), x.view(), op.scale.view(), gradient, {}, dbias.view()}, used,
                           attributes, group.rank(0), serial_executor());
  };
  EXPECT_NO_THROW(backward(dx.view()));
  attributes.is_infer = false;
  attributes.use_global_est = true;
  EXPECT_NO_THROW(backward(dx.view()));
  attributes.use_global_est = false;
  EXPECT_NO_THROW(backward({}));
  EXPECT_THROW(backward(dx.view()), ExchangeTimeout);
}

}  // namespace
}  // namespace syncbn::testing
