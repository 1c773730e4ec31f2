// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "placed_rank.hpp"
#include "properties.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Fused activation and residual besides a step's bits, which properties_test.cpp has and, against
// the oracle, tests/python.
namespace syncbn::testing {
namespace {

// In evaluation u = dy through the activation, dx = weight * rstd * u; running statistics 0 and 1.
TEST(Activation, EvaluationByHandExact) {
  using Doubles = std::vector<double>;
  Random random(90);
  for (const DType dtype : kDtypes) {
    for (const bool with_residual : {false, true}) {
      Step step(random, dtype, {1, 2, 2});
      step.x = {-1, 1, -2, 4};
      step.dy = {1, 2, 4, 8};
      step.residual = with_residual ? Doubles{4, -4, 0, 0} : Doubles();
      step.keep = with_residual;
      step.weight.values = {2, 0.5};
      step.bias.present = false;
      step.running_mean.values = {0, 0};
      step.running_var.values = {1, 1};
      step.options.eps = 0;
      step.options.activation = {ActivationKind::kRelu};
      const Outcome out = evaluate(step);
      EXPECT_EQ(out.y, with_residual ? (Doubles{2, 0, 0, 2}) : (Doubles{0, 2, 0, 2}));
      EXPECT_EQ(out.dx, with_residual ? (Doubles{2, 0, 0, 4}) : (Doubles{0, 4, 0, 4}));
      EXPECT_EQ(out.ranks[0].dweight, with_residual ? (Doubles{-1, 32}) : (Doubles{2, 32}));
      EXPECT_EQ(out.u, with_residual ? (Doubles{1, 0, 0, 8}) : Doubles());
    }
  }
}

// |x' - x| <= k (|x - mean| + |bias / scale|) + 2 u |x| with k = 11 u32 + u, u the type's unit
// roundoff, u32 = 2^-24 (2^-53 for float64): docs/options.md.
TEST(Activation, RecoveredInputWithinBound) {
  Random random(91);
  for (const DType dtype : kDtypes) {
    const double unit = dtype == DType::kFloat16    ? 0x1p-11
                        : dtype == DType::kBFloat16 ? 0x1p-8
                        : dtype == DType::kFloat32  ? 0x1p-24
                                                    : 0x1p-53;
    const double k = 11 * (dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24) + unit;
    for (const Memory memory : kMemories) {
      Tensor x(dtype, {6, 19, 7, 3}, memory);
      const std::vector<double> values = unit_values(random, dtype, x.numel(), 3, 2);
      x.fill(values);
      std::vector<double> w(19);
      std::vector<double> b(19);
      for (std::size_t c = 0; c < 19; ++c) {
        w[c] = round_to(DType::kFloat32,
                        (1 + std::abs(random.signed_unit())) * (random.one_in(2) ? 1 : -1));
        b[c] = round_to(DType::kFloat32, random.signed_unit());
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
}  // namespace syncbn::testing
