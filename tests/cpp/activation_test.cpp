// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Fused activation and residual of the layer (docs/numerics.md, sections 4 and 6). Bits of the
// passes are checked in levels_test.cpp and, against the oracle, in tests/python.
namespace syncbn {
namespace {

using testing::kDtypes;
using testing::Memory;
using testing::Random;
using testing::rough_values;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;

// x has mean 0 and variance 1 (eps = 0): v = weight * x + residual is -3, 0, 1 and NaN.
TEST(Activation, ByHandExact) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : kDtypes) {
    SCOPED_TRACE(name(dtype));
    const Tensor x(dtype, {4, 1}, std::vector<double>{-1, 1, -1, 1});
    const Tensor weight(DType::kFloat32, {1}, std::vector<double>{2});
    const Tensor residual(dtype, {4, 1}, std::vector<double>{-1, -2, 3, nan});
    const Tensor dy(dtype, {4, 1}, std::vector<double>{8, 16, 32, 64});
    const struct {
      Activation activation;
      std::vector<double> y;
      std::vector<double> dresidual;
    } cases[] = {{{}, {-3, 0, 1, nan}, {8, 16, 32, 64}},
                 {{ActivationKind::kRelu}, {0, 0, 1, nan}, {0, 0, 32, 64}},
                 {{ActivationKind::kLeakyRelu, 0.5}, {-1.5, 0, 1, nan}, {4, 8, 32, 32}}};
    for (const auto& one : cases) {
      BatchNorm layer({.channels = 1, .eps = 0, .activation = one.activation});
      Saved saved;
      Tensor y(dtype, {4, 1});
      layer.forward(
          {.x = x.view(), .weight = weight.view(), .residual = residual.view(), .y = y.view()},
          saved);
      EXPECT_TRUE(same_bits(y.values(), one.y));
      Tensor dx(dtype, {4, 1});
      Tensor dbias(DType::kFloat64, {1});
      Tensor dresidual(dtype, {4, 1});
      layer.backward({.dy = dy.view(),
                      .x = x.view(),
                      .weight = weight.view(),
                      .dx = dx.view(),
                      .dbias = dbias.view(),
                      .dresidual = dresidual.view()},
                     saved);
      EXPECT_TRUE(same_bits(dresidual.values(), one.dresidual));
      double sum = 0;
      for (const double u : one.dresidual) {
        sum += u;
      }
      EXPECT_EQ(dbias.get(0), sum);
    }
  }
}

struct Outcome {
  std::vector<double> y, dx, dresidual, dweight, dbias;
};

struct Data {
  DType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<double> x, z, dy, weight, bias;
};

/// Ranks r takes the samples [bounds[r], bounds[r+1]).
Outcome run(const Data& data, const std::vector<std::int64_t>& bounds, Memory memory, bool residual,
            const Activation& activation) {
  const auto ranks = static_cast<int>(bounds.size()) - 1;
  const std::int64_t per_sample = static_cast<std::int64_t>(data.x.size()) / data.sizes[0];
  ThreadGroup group(ranks);
  Outcome out;
  out.y.resize(data.x.size());
  out.dx = out.dresidual = out.y;
  const auto errors = run_ranks(ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::vector<std::int64_t> sizes = data.sizes;
    sizes[0] = bounds[r + 1] - bounds[r];
    const auto begin = bounds[r] * per_sample;
    const auto end = bounds[r + 1] * per_sample;
    const auto part = [&](const std::vector<double>& all) {
      Tensor tensor(data.dtype, sizes, memory);
      tensor.fill(std::vector<double>(all.begin() + begin, all.begin() + end));
      return tensor;
    };
    const auto put = [&](const Tensor& tensor, std::vector<double>& all) {
      const std::vector<double> mine = tensor.values();
      std::copy(mine.begin(), mine.end(), all.begin() + begin);
    };
    const Tensor x = part(data.x);
    const Tensor z = part(data.z);
    const Tensor dy = part(data.dy);
    Tensor y = part(data.x);
    Tensor dx = part(data.x);
    Tensor dresidual = part(data.x);
    const std::int64_t channels = sizes[1];
    const Tensor weight(DType::kFloat32, {channels}, data.weight);
    const Tensor bias(DType::kFloat32, {channels}, data.bias);
    Tensor dweight(DType::kFloat64, {channels});
    Tensor dbias(DType::kFloat64, {channels});
    BatchNorm layer({.channels = channels, .name = "layer", .activation = activation},
                    group.rank(rank));
    Saved saved;
    layer.forward({.x = x.view(),
                   .weight = weight.view(),
                   .bias = bias.view(),
                   .residual = residual ? z.view() : TensorView(),
                   .y = y.view()},
                  saved);
    layer.backward({.dy = dy.view(),
                    .x = x.view(),
                    .weight = weight.view(),
                    .bias = bias.view(),
                    .dx = dx.view(),
                    .dweight = dweight.view(),
                    .dbias = dbias.view(),
                    .dresidual = residual ? dresidual.view() : MutableTensorView(),
                    .affine = AffineGradients::kGlobal},
                   saved);
    put(y, out.y);
    put(dx, out.dx);
    put(dresidual, out.dresidual);
    if (rank == 0) {
      out.dweight = dweight.values();
      out.dbias = dbias.values();
    }
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error, nullptr);
  }
  return out;
}

TEST(Activation, AnyNumberOfRanksExact) {
  Random random(90);
  for (const DType dtype : kDtypes) {
    Data data{dtype, {12, 5, 4, 7}, {}, {}, {}, {}, {}};
    for (auto* values : {&data.x, &data.z, &data.dy}) {
      *values = rough_values(random, dtype, 12, 5 * 4 * 7);
    }
    for (int c = 0; c < 5; ++c) {
      data.weight.push_back(testing::round_to(DType::kFloat32, random.signed_unit()));
      data.bias.push_back(testing::round_to(DType::kFloat32, random.signed_unit()));
    }
    for (const Activation activation :
         {Activation{ActivationKind::kRelu}, Activation{ActivationKind::kLeakyRelu, 0.2}}) {
      for (const bool residual : {false, true}) {
        const Outcome one = run(data, {0, 12}, Memory::kPlanes, residual, activation);
        for (const std::vector<std::int64_t>& bounds :
             {std::vector<std::int64_t>{0, 5, 12}, {0, 0, 1, 12}, {0, 3, 6, 6, 9, 12}}) {
          const Outcome many = run(data, bounds, Memory::kRows, residual, activation);
          EXPECT_TRUE(same_bits(many.y, one.y));
          EXPECT_TRUE(same_bits(many.dx, one.dx));
          EXPECT_TRUE(same_bits(many.dweight, one.dweight));
          EXPECT_TRUE(same_bits(many.dbias, one.dbias));
          EXPECT_TRUE(!residual || same_bits(many.dresidual, one.dresidual));
        }
      }
    }
  }
}

// In evaluation u = dy through the activation, dx = weight * rstd * u; running statistics 0 and 1.
TEST(Activation, EvaluationByHandExact) {
  for (const DType dtype : kDtypes) {
    for (const bool with_residual : {false, true}) {
      const Tensor x(dtype, {1, 2, 2}, std::vector<double>{-1, 1, -2, 4});
      const Tensor residual(dtype, {1, 2, 2}, std::vector<double>{4, -4, 0, 0});
      const Tensor weight(DType::kFloat32, {2}, std::vector<double>{2, 0.5});
      const Tensor zeros(DType::kFloat32, {2}, std::vector<double>{0, 0});
      const Tensor ones(DType::kFloat32, {2}, std::vector<double>{1, 1});
      const Tensor dy(dtype, {1, 2, 2}, std::vector<double>{1, 2, 4, 8});
      const TensorView z = with_residual ? residual.view() : TensorView();
      BatchNorm layer({.channels = 2, .eps = 0, .activation = {ActivationKind::kRelu}});
      Tensor y(dtype, {1, 2, 2});
      layer.evaluate({.x = x.view(),
                      .weight = weight.view(),
                      .residual = z,
                      .running_mean = zeros.view(),
                      .running_var = ones.view(),
                      .y = y.view()});
      EXPECT_EQ(y.values(), with_residual ? (std::vector<double>{2, 0, 0, 2})
                                          : (std::vector<double>{0, 2, 0, 2}));
      Tensor dx(dtype, {1, 2, 2});
      Tensor dresidual(dtype, {1, 2, 2});
      Tensor dweight(DType::kFloat32, {2});
      layer.evaluate_backward(
          {.dy = dy.view(),
           .x = x.view(),
           .weight = weight.view(),
           .residual = z,
           .running_mean = zeros.view(),
           .running_var = ones.view(),
           .dx = dx.view(),
           .dweight = dweight.view(),
           .dresidual = with_residual ? dresidual.view() : MutableTensorView()});
      EXPECT_EQ(dx.values(), with_residual ? (std::vector<double>{2, 0, 0, 4})
                                           : (std::vector<double>{0, 4, 0, 4}));
      EXPECT_EQ(dweight.values(),
                with_residual ? (std::vector<double>{-1, 32}) : (std::vector<double>{2, 32}));
      if (with_residual) {
        EXPECT_EQ(dresidual.values(), (std::vector<double>{1, 0, 0, 8}));
      }
    }
  }
}

// |x' - x| <= k (|x - mean| + |bias / scale|) + 2 u |x| with k = 11 u32 + u, u the type's unit
// roundoff, u32 = 2^-24 (2^-53 for float64): docs/activation.md.
TEST(Activation, RecoveredInputWithinBound) {
  Random random(91);
  for (const DType dtype : kDtypes) {
    const double unit = dtype == DType::kFloat16    ? 0x1p-11
                        : dtype == DType::kBFloat16 ? 0x1p-8
                        : dtype == DType::kFloat32  ? 0x1p-24
                                                    : 0x1p-53;
    const double k = 11 * (dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24) + unit;
    for (const Memory memory : testing::kMemories) {
      Tensor x(dtype, {6, 19, 7, 3}, memory);
      std::vector<double> values(static_cast<std::size_t>(x.numel()));
      for (double& value : values) {
        value = testing::round_to(dtype, 3 + 2 * random.signed_unit());
      }
      x.fill(values);
      std::vector<double> w(19);
      std::vector<double> b(19);
      for (std::size_t c = 0; c < 19; ++c) {
        w[c] = testing::round_to(
            DType::kFloat32, (1 + std::abs(random.signed_unit())) * (random.one_in(2) ? 1 : -1));
        b[c] = testing::round_to(DType::kFloat32, random.signed_unit());
      }
      const Tensor weight(DType::kFloat32, {19}, w);
      const Tensor bias(DType::kFloat32, {19}, b);
      Tensor y = x;
      Saved saved;
      BatchNorm({.channels = 19, .activation = {ActivationKind::kLeakyRelu, 0.01}})
          .forward({.x = y.view(), .weight = weight.view(), .bias = bias.view(), .y = y.view()},
                   saved);
      const std::span<const double> mean = saved.mean(), rstd = saved.rstd();
      const std::vector<double> written = y.values();
      std::vector<std::uint8_t> mask(
          static_cast<std::size_t>(activation_mask_bytes(std::as_const(y).view())));
      recover_input({std::as_const(y).view(), mean.data(), rstd.data(), weight.view(), bias.view(),
                     y.view(), mask.data(), 0.01},
                    serial_executor());
      EXPECT_TRUE(y.gaps_untouched());
      const std::vector<double> back = y.values();
      for (std::size_t i = 0; i < back.size(); ++i) {
        const std::size_t c = i / 21 % 19;
        const double allowed =
            k * (std::abs(values[i] - mean[c]) + std::abs(b[c] / (w[c] * rstd[c]))) +
            2 * unit * std::abs(values[i]);
        ASSERT_LE(std::abs(back[i] - values[i]), allowed) << i;
      }
      // The mask sends dy back as it went through y's sign.
      Tensor dy(dtype, {6, 19, 7, 3}, memory);
      dy.fill(std::vector<double>(values.size(), 1.0));
      Tensor u = dy;
      std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(dtype, 19)));
      local_gradients({std::as_const(dy).view(),
                       std::as_const(y).view(),
                       {},
                       mean.data(),
                       rstd.data(),
                       {{ActivationKind::kLeakyRelu, 0.5}, {}, {}, mask.data()},
                       u.view()},
                      message.data(), 0, serial_executor());
      const std::vector<double> sent = u.values();
      for (std::size_t i = 0; i < sent.size(); ++i) {
        ASSERT_EQ(sent[i], written[i] > 0 ? 1.0 : 0.5) << i;
      }
    }
  }
}

}  // namespace
}  // namespace syncbn
