// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer's tensors with data that breaks ordinary sums, and its directions with messages and
// without, on every level.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"

namespace syncbn::testing {

/// 120 binades, cancelling neighbours, constants, subnormals, and plain numbers, mixed or each for
/// 97 elements; or all around 1, so that every window fits. One_in `special` is an infinity or NaN
/// (0: none). Many have a prime period: fresh ones would take longer than the test.
inline std::vector<double> nasty_values(Random& random, DType dtype, std::int64_t count,
                                        std::int64_t special = 0) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::int64_t range = dtype == DType::kFloat16 ? 15 : 60;
  const std::int64_t order = random.between(0, 3);
  std::vector<double> values;
  for (std::int64_t i = 0; i < count; ++i) {
    if (i >= 100003) {
      values.push_back(values[static_cast<std::size_t>(i % 100003)]);
      continue;
    }
    const std::int64_t kind = order == 0 ? random.between(0, 4) : order == 1 ? 5 : i / 97 % 5;
    double value = random.signed_unit();
    if (kind == 0) {
      value = std::ldexp(value, static_cast<int>(random.between(-range, range)));
    } else if (kind == 1 && i % 2 == 1) {
      value = -values.back();
    } else if (kind == 2) {
      value = 3.25;
    } else if (kind == 3) {
      value = std::ldexp(value, dtype == DType::kFloat16 ? -15 : -130);
    } else if (kind == 5) {
      value += 1;
    }
    if (special != 0 && random.one_in(special)) {
      value = random.pick(std::vector<double>{infinity, -infinity, nan, -0.0});
    }
    values.push_back(round_to(dtype, value));
  }
  return values;
}

/// One rank's layer. Outputs are fresh for each direction.
struct OneRank {
  DType dtype;
  std::vector<std::int64_t> sizes;
  Tensor x, dy, residual, y, dx, u, weight, bias, dweight, dbias;
  std::vector<std::uint8_t> mask;
  std::vector<std::int64_t> mask_sizes;
  Activation activation;
  bool with_residual = false;
  bool keep = false;  ///< u is wanted
  std::vector<std::uint8_t> bits;
  std::vector<double> mean, var, rstd, coefficients;
  std::vector<std::int64_t> moments, gradients;  ///< messages
  MessageInfo forward_info, backward_info;
  std::uint32_t forward_tag = 1, backward_tag = 1;
  static constexpr double kEps = 1e-5;

  std::int64_t channels() const { return sizes[1]; }
  MaskView mask_view() const { return {mask.data(), mask_sizes}; }
  TensorView residual_view() const { return with_residual ? residual.view() : TensorView(); }
  MutableTensorView u_view() { return keep ? u.view() : MutableTensorView(); }
  std::uint8_t* bits_data() {
    return with_residual && activation.kind != ActivationKind::kNone ? bits.data() : nullptr;
  }
  ActivationGradient through() {
    return {activation, std::as_const(weight).view(), std::as_const(bias).view(), bits_data()};
  }
  TensorView x_view() const { return x.view(); }

  OneRank(Random& random, DType type, std::vector<std::int64_t> shape, Memory memory,
          std::int64_t offset, std::int64_t special = 0)
      : dtype(type), sizes(std::move(shape)) {
    const auto tensor = [&] {
      Tensor out(dtype, sizes, memory, offset);
      out.fill(nasty_values(random, dtype, out.numel(), special));
      return out;
    };
    x = tensor();
    dy = tensor();
    residual = tensor();
    y = dx = u = Tensor(dtype, sizes, memory, offset + 1);
    const auto parameter = [&] {
      return Tensor(DType::kFloat32, {channels()},
                    unit_values(random, DType::kFloat32, channels()));
    };
    weight = parameter();
    bias = parameter();
    dweight = dbias = Tensor(DType::kFloat32, {channels()});
    const auto c = static_cast<std::size_t>(channels());
    mean = var = rstd = std::vector<double>(c, -1);
    coefficients.resize(3 * c, -1);
    bits.resize(static_cast<std::size_t>(activation_mask_bytes(x_view())) + 1);
  }
  /// Two of three elements count.
  void choose_mask(Random& random) {
    mask_sizes = sizes;
    mask_sizes.erase(mask_sizes.begin() + 1);
    const std::int64_t per_channel = channels() == 0 ? 0 : x.numel() / channels();
    for (std::int64_t i = 0; i < per_channel; ++i) {
      mask.push_back(random.one_in(3) ? 0 : 1);
    }
  }

  /// By messages.
  void forward(Executor& executor) {
    moments.assign(static_cast<std::size_t>(message_words(dtype, channels())), -1);
    local_moments(x_view(), mask_view(), moments.data(), forward_tag, executor);
    forward_info = read_header(moments.data(), 1);
    finalize_moments(forward_info, moments.data() + kHeaderWords, mean.data(), var.data(),
                     rstd.data(), channels(), kEps, executor);
    normalize({x_view(), mask_view(), mean.data(), rstd.data(), std::as_const(weight).view(),
               std::as_const(bias).view(), residual_view(), y.view(), bits_data(), activation},
              executor);
  }
  void backward(Executor& executor) {
    gradients.assign(moments.size(), -1);
    local_gradients({std::as_const(dy).view(), x_view(), mask_view(), mean.data(), rstd.data(),
                     through(), u_view()},
                    gradients.data(), backward_tag, executor);
    backward_info = read_header(gradients.data(), 1);
    finalize_gradients(backward_info, gradients.data() + kHeaderWords,
                       {mean.data(), rstd.data(), std::as_const(weight).view(), coefficients.data(),
                        dweight.view(), dbias.view(), channels()},
                       forward_info.count, executor);
    input_gradient({keep ? std::as_const(u).view() : std::as_const(dy).view(), x_view(),
                    mask_view(), mean.data(), rstd.data(), coefficients.data(),
                    keep ? ActivationGradient() : through(), dx.view()},
                   executor);
  }
  /// The same without messages.
  void forward_alone(Executor& executor) {
    forward_info =
        forward_of_one_rank({x_view(), mask_view(), std::as_const(weight).view(),
                             std::as_const(bias).view(), residual_view(), y.view(), bits_data(),
                             mean.data(), var.data(), rstd.data(), kEps, activation},
                            executor);
  }
  void backward_alone(Executor& executor) {
    backward_info = backward_of_one_rank({.dy = std::as_const(dy).view(),
                                          .x = x_view(),
                                          .mask = mask_view(),
                                          .mean = mean.data(),
                                          .rstd = rstd.data(),
                                          .through = through(),
                                          .weight = std::as_const(weight).view(),
                                          .u = u_view(),
                                          .dx = dx.view(),
                                          .dweight = dweight.view(),
                                          .dbias = dbias.view(),
                                          .count = forward_info.count},
                                         executor);
  }
};

inline void expect_same_info(const MessageInfo& actual, const MessageInfo& expected) {
  EXPECT_EQ(actual.count, expected.count);
  EXPECT_EQ(actual.agree, expected.agree);
  EXPECT_EQ(actual.any_rejected, expected.any_rejected);
  EXPECT_EQ(actual.any_data, expected.any_data);
  EXPECT_EQ(actual.dtype, expected.dtype);
}

/// All that whole directions write.
inline void expect_same_layer(const OneRank& actual, const OneRank& expected) {
  EXPECT_TRUE(same_bits(actual.mean, expected.mean)) << "mean";
  EXPECT_TRUE(same_bits(actual.var, expected.var)) << "var";
  EXPECT_TRUE(same_bits(actual.rstd, expected.rstd)) << "rstd";
  expect_same_info(actual.forward_info, expected.forward_info);
  expect_same_info(actual.backward_info, expected.backward_info);
  const std::pair<const char*, Tensor OneRank::*> all[] = {{"y", &OneRank::y},
                                                           {"dx", &OneRank::dx},
                                                           {"u", &OneRank::u},
                                                           {"dweight", &OneRank::dweight},
                                                           {"dbias", &OneRank::dbias}};
  for (const auto& [name, member] : all) {
    if ((actual.*member).storage() != (expected.*member).storage()) {  // NaNs may differ
      EXPECT_TRUE(same_bits((actual.*member).values(), (expected.*member).values())) << name;
      EXPECT_TRUE((actual.*member).gaps_untouched()) << name;
    }
  }
}

/// A layer with all that a direction may have.
inline OneRank any_layer(Random& random, DType dtype, std::vector<std::int64_t> sizes,
                         Memory memory) {
  OneRank out(random, dtype, std::move(sizes), memory, random.between(0, 15),
              random.one_in(3) ? 3000 : 0);
  out.activation = {static_cast<ActivationKind>(random.between(0, 2)), 0.01};
  out.with_residual = random.one_in(3);
  out.keep = random.one_in(3);
  if (random.one_in(4)) {
    out.choose_mask(random);
  }
  return out;
}

/// By messages and plain loops.
inline OneRank expected_of(OneRank layer) {
  const LevelScope scope("reference");
  layer.forward(serial_executor());
  layer.backward(serial_executor());
  for (const Tensor* tensor : {&layer.y, &layer.dx, &layer.u}) {
    EXPECT_TRUE(tensor->gaps_untouched());
  }
  return layer;
}

class OneRankDirections : public ::testing::Test {
 protected:
  /// Compares on every level, by messages and without, with messages and plain loops.
  void compare(const OneRank& layer, bool serial = true) {
    const OneRank expected = expected_of(layer);
    for (const std::string& level : levels_) {
      const LevelScope scope(level);
      SCOPED_TRACE(level);
      OneRank by_messages = layer;
      by_messages.forward(three_);
      by_messages.backward(three_);
      expect_same_layer(by_messages, expected);
      EXPECT_EQ(by_messages.moments, expected.moments);
      EXPECT_EQ(by_messages.gradients, expected.gradients);
      for (Executor* executor : {static_cast<Executor*>(&three_), &serial_executor()}) {
        if (serial || executor == &three_) {
          OneRank alone = layer;
          alone.forward_alone(*executor);
          alone.backward_alone(*executor);
          expect_same_layer(alone, expected);
        }
      }
    }
  }
  const std::vector<std::string> levels_ = available_levels();
  ThreadPool three_{3};
};

}  // namespace syncbn::testing
