// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "placed_rank.hpp"
#include "properties.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Evaluation: section 4 of docs/numerics.md with the running statistics, and the last line of
// section 6. Everything is local.
namespace syncbn::testing {
namespace {

const std::vector<std::int64_t> kSizes = {4, 5, 3, 7};
constexpr std::int64_t kChannels = 5;
constexpr std::int64_t kPlane = 21;

/// Samples, parameters and running statistics of any dtypes.
struct Data {
  DType dtype;
  Tensor x, dy, weight, bias, mean, var;
  double eps = 1e-3;

  Data(Random& random, DType type, DType parameters, DType buffers)
      : dtype(type),
        x(type, kSizes, rough_values(random, type, 4, kChannels * kPlane)),
        dy(type, kSizes, rough_values(random, type, 4, kChannels * kPlane)),
        weight(parameters, {kChannels}),
        bias(parameters, {kChannels}),
        mean(buffers, {kChannels}),
        var(buffers, {kChannels}) {
    for (std::int64_t c = 0; c < kChannels; ++c) {
      weight.set(c, random.signed_unit());
      bias.set(c, random.signed_unit());
      mean.set(c, 10 * random.signed_unit());
      var.set(c, std::exp2(8 * random.signed_unit()));
    }
  }
  BatchNorm layer() const { return BatchNorm({.channels = kChannels, .eps = eps}); }
  double rstd(std::int64_t c) const { return 1 / std::sqrt(var.get(c) + eps); }
  std::int64_t channel(std::int64_t i) const { return i / kPlane % kChannels; }
};

/// Section 4 for one element.
double normalized(const Data& d, std::int64_t i, double weight, double bias) {
  const std::int64_t c = d.channel(i);
  const double w = weight * d.rstd(c);
  if (d.dtype == DType::kFloat64) {
    return std::fma(w, d.x.get(i) - d.mean.get(c), bias);
  }
  const auto mean_high = static_cast<float>(d.mean.get(c));
  const auto mean_low = static_cast<float>(d.mean.get(c) - static_cast<double>(mean_high));
  const float t = (static_cast<float>(d.x.get(i)) - mean_high) - mean_low;
  const float y = std::fma(static_cast<float>(w), t, static_cast<float>(bias));
  return round_to(d.dtype, static_cast<double>(y));
}

TEST(Evaluation, ForwardExact) {
  Random random(100);
  std::vector<std::uint8_t> kept(4 * kPlane);
  for (std::uint8_t& byte : kept) {
    byte = random.one_in(3) ? 0 : 1;
  }
  for (const DType dtype : kDtypes) {
    for (const DType buffers : kDtypes) {
      const Data d(random, dtype, buffers == DType::kFloat64 ? DType::kBFloat16 : DType::kFloat32,
                   buffers);
      std::vector<double> expected, masked;
      std::vector<double> without_parameters;
      for (std::int64_t i = 0; i < d.x.numel(); ++i) {
        const std::int64_t c = d.channel(i);
        expected.push_back(normalized(d, i, d.weight.get(c), d.bias.get(c)));
        without_parameters.push_back(normalized(d, i, 1.0, 0.0));
        const std::int64_t element = i / (kChannels * kPlane) * kPlane + i % kPlane;
        masked.push_back(kept[static_cast<std::size_t>(element)] != 0 ? expected.back() : 0.0);
      }
      for (const std::string& level : available_levels()) {
        const LevelScope scope(level);
        for (const Memory memory : kMemories) {
          SCOPED_TRACE(level + ", " + name(dtype) + ", statistics " + name(buffers));
          Tensor x(dtype, kSizes, memory);
          x.fill(d.x.values());
          Tensor y(dtype, kSizes, memory);
          d.layer().evaluate({.x = x.view(),
                              .weight = d.weight.view(),
                              .bias = d.bias.view(),
                              .running_mean = d.mean.view(),
                              .running_var = d.var.view(),
                              .y = y.view()});
          EXPECT_TRUE(same_bits(y.values(), expected));
          d.layer().evaluate({.x = x.view(),
                              .mask = {kept, {4, 3, 7}},
                              .weight = d.weight.view(),
                              .bias = d.bias.view(),
                              .running_mean = d.mean.view(),
                              .running_var = d.var.view(),
                              .y = y.view()});
          EXPECT_TRUE(same_bits(y.values(), masked));
          d.layer().evaluate({.x = x.view(),
                              .running_mean = d.mean.view(),
                              .running_var = d.var.view(),
                              .y = x.view()});
          EXPECT_TRUE(same_bits(x.values(), without_parameters));
          EXPECT_TRUE(x.gaps_untouched() && y.gaps_untouched());
        }
      }
    }
  }
}

TEST(Evaluation, WithoutRunningStatisticsThoseOfTheBatchExact) {
  Random random(101);
  for (const DType dtype : kDtypes) {
    const Data d(random, dtype, DType::kFloat32, DType::kFloat32);
    Tensor evaluated(dtype, kSizes);
    Tensor trained(dtype, kSizes);
    d.layer().evaluate(
        {.x = d.x.view(), .weight = d.weight.view(), .bias = d.bias.view(), .y = evaluated.view()});
    Saved saved;
    d.layer().forward(
        {.x = d.x.view(), .weight = d.weight.view(), .bias = d.bias.view(), .y = trained.view()},
        saved);
    EXPECT_TRUE(same_bits(evaluated.values(), trained.values()));
  }
}

TEST(Evaluation, InputGradientExact) {
  Random random(102);
  for (const DType dtype : kDtypes) {
    const Data d(random, dtype, DType::kFloat32, DType::kFloat64);
    for (const bool with_weight : {true, false}) {
      std::vector<double> expected;
      for (std::int64_t i = 0; i < d.dy.numel(); ++i) {
        const std::int64_t c = d.channel(i);
        const double w = (with_weight ? d.weight.get(c) : 1.0) * d.rstd(c);
        expected.push_back(
            dtype == DType::kFloat64
                ? w * d.dy.get(i)
                : round_to(dtype, static_cast<double>(static_cast<float>(w) *
                                                      static_cast<float>(d.dy.get(i)))));
      }
      for (const std::string& level : available_levels()) {
        const LevelScope scope(level);
        for (const Memory memory : kMemories) {
          Tensor dx(dtype, kSizes, memory);
          d.layer().evaluate_backward({.dy = d.dy.view(),
                                       .x = d.x.view(),
                                       .weight = with_weight ? d.weight.view() : TensorView(),
                                       .running_mean = d.mean.view(),
                                       .running_var = d.var.view(),
                                       .dx = dx.view()});
          EXPECT_TRUE(same_bits(dx.values(), expected)) << level << name(dtype);
        }
      }
    }
  }
}

// "From local sums in the same order": A = sum of dy, B = sum of dy x, small integers here;
// dweight = RN(rstd RN(B - mean A)), dbias = A.
TEST(Evaluation, ParameterGradientsExact) {
  Random random(103);
  for (const DType dtype : kDtypes) {
    Data d(random, dtype, DType::kFloat32, DType::kFloat32);
    std::vector<double> a(kChannels);
    std::vector<double> b(kChannels);
    for (std::int64_t i = 0; i < d.x.numel(); ++i) {
      const auto c = static_cast<std::size_t>(d.channel(i));
      d.x.set(i, static_cast<double>(random.between(-100, 100)));
      d.dy.set(i, static_cast<double>(random.between(-100, 100)) / 8);
      a[c] += d.dy.get(i);
      b[c] += d.dy.get(i) * d.x.get(i);
    }
    for (const std::string& level : available_levels()) {
      const LevelScope scope(level);
      Tensor dx(dtype, kSizes);
      Tensor dweight(DType::kFloat64, {kChannels});
      Tensor dbias(DType::kFloat32, {kChannels});
      d.layer().evaluate_backward({.dy = d.dy.view(),
                                   .x = d.x.view(),
                                   .weight = d.weight.view(),
                                   .running_mean = d.mean.view(),
                                   .running_var = d.var.view(),
                                   .dx = dx.view(),
                                   .dweight = dweight.view(),
                                   .dbias = dbias.view()});
      for (std::int64_t c = 0; c < kChannels; ++c) {
        const auto k = static_cast<std::size_t>(c);
        EXPECT_EQ(dweight.get(c), d.rstd(c) * std::fma(-d.mean.get(c), a[k], b[k]));
        EXPECT_EQ(dbias.get(c), round_to(DType::kFloat32, a[k]));
      }
    }
  }
}

// In evaluation u = dy through the activation, dx = weight * rstd * u; running statistics 0 and 1.
TEST(Evaluation, ActivationByHandExact) {
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

TEST(Evaluation, EmptyAndNotFinite) {
  Random random(104);
  const Data d(random, DType::kFloat32, DType::kFloat32, DType::kFloat32);
  const Tensor none(DType::kFloat32, {0, kChannels, 4});
  Tensor y = none;
  Tensor dweight(DType::kFloat32, {kChannels}, std::vector<double>(kChannels, 7.0));
  const TensorView mean = d.mean.view(), var = d.var.view();
  d.layer().evaluate({.x = none.view(), .running_mean = mean, .running_var = var, .y = y.view()});
  d.layer().evaluate({.x = none.view(), .y = y.view()});
  d.layer().evaluate_backward({.dy = none.view(),
                               .x = none.view(),
                               .running_mean = mean,
                               .running_var = var,
                               .dx = y.view(),
                               .dweight = dweight.view()});
  EXPECT_EQ(dweight.values(), std::vector<double>(kChannels, 0.0));

  // An infinite element is normalized like any other; it does not touch its neighbours.
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor x(DType::kFloat16, {3, 1}, std::vector<double>{inf, 1, -inf});
  const Tensor zero(DType::kFloat64, {1}, std::vector<double>{0});
  const Tensor one(DType::kFloat64, {1}, std::vector<double>{1});
  Tensor out = x;
  BatchNorm({.channels = 1, .eps = 0})
      .evaluate(
          {.x = x.view(), .running_mean = zero.view(), .running_var = one.view(), .y = out.view()});
  EXPECT_TRUE(same_bits(out.values(), {inf, 1, -inf}));
}

}  // namespace
}  // namespace syncbn::testing
