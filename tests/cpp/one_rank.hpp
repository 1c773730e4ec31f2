// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer's tensors with data that breaks ordinary sums, and its directions through messages, for
// tests that compare a group of one rank with them.

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"

namespace syncbn::testing {

/// Kinds change every 97 elements: 120 binades, cancelling neighbours, constants, subnormals, and
/// plain numbers. one_in `special` is an infinity or NaN (0: none).
inline std::vector<double> nasty_values(Random& random, DType dtype, std::int64_t count,
                                        std::int64_t special = 0) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t kind = i / 97 % 5;
    double value = random.signed_unit();
    if (kind == 0) {
      value = std::ldexp(value, static_cast<int>(random.between(-60, 60)));
    } else if (kind == 1 && i % 2 == 1) {
      value = -values.back();
    } else if (kind == 2) {
      value = 3.25;
    } else if (kind == 3) {
      value = std::ldexp(value, -130);
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
  MessageInfo forward_info, backward_info;
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
    y = dx = u = Tensor(dtype, sizes, memory, offset);
    const auto parameter = [&] {
      std::vector<double> values;
      for (std::int64_t c = 0; c < channels(); ++c) {
        values.push_back(round_to(DType::kFloat32, random.signed_unit()));
      }
      return Tensor(DType::kFloat32, {channels()}, values);
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
    std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(dtype, channels())));
    local_moments(x_view(), mask_view(), message.data(), 1, executor);
    forward_info = read_header(message.data(), 1);
    finalize_moments(forward_info, message.data() + kHeaderWords, mean.data(), var.data(),
                     rstd.data(), channels(), kEps, executor);
    normalize({x_view(), mask_view(), mean.data(), rstd.data(), std::as_const(weight).view(),
               std::as_const(bias).view(), residual_view(), y.view(), bits_data(), activation},
              executor);
  }
  void backward(Executor& executor) {
    std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(dtype, channels())));
    local_gradients({std::as_const(dy).view(), x_view(), mask_view(), mean.data(), rstd.data(),
                     through(), u_view()},
                    message.data(), 1, executor);
    backward_info = read_header(message.data(), 1);
    finalize_gradients(backward_info, message.data() + kHeaderWords,
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
    EXPECT_TRUE(same_bits((actual.*member).values(), (expected.*member).values())) << name;
    EXPECT_TRUE((actual.*member).gaps_untouched()) << name;
  }
}

}  // namespace syncbn::testing
