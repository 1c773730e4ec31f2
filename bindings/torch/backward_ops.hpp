// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "bindings/torch/exchange.hpp"
#include "bindings/torch/form.hpp"
#include "bindings/torch/outputs.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/step.hpp"

// A backward as operators (step_ops.hpp).
namespace syncbn::torch_layer {

/// dx, dweight, dbias, u, coefficients, message, merged, status.
using Gradients = std::tuple<std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
                             std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
                             std::optional<Tensor>, std::int64_t>;

/// What backward_begin is asked for: bits. A gradient of weight or bias is wanted if it has a
/// dtype.
enum Wanted : std::int64_t {
  kU = 1,      ///< the gradient that comes back through the activation
  kShare = 2,  ///< gradients of weight and bias are of this rank's samples
};

template <class Place>
Gradients backward_begin(const Tensor& dy, const Tensor& x, const Tensor& saved,
                         std::optional<Tensor> weight, std::optional<Tensor> bias,
                         std::optional<Tensor> activation_mask, std::optional<Tensor> mask,
                         const Tensor& options, std::int64_t wanted,
                         std::optional<ScalarType> weight_dtype,
                         std::optional<ScalarType> bias_dtype, std::int64_t way) {
  Place place(x, dy, saved, weight, bias, activation_mask, mask);
  const Form form = form_of(options);
  const std::int64_t channels = channels_of(x);
  const Saved from(saved, x);
  const bool exchanges = way != kOwn;
  const bool share = (wanted & kShare) != 0;
  std::optional<Tensor> dx = exchanges ? std::optional(new_output(x)) : std::nullopt;
  std::optional<Tensor> u = (wanted & kU) != 0 ? std::optional(new_output(x)) : std::nullopt;
  std::optional<Tensor> dweight = new_parameter_gradient(x, weight_dtype);
  std::optional<Tensor> dbias = new_parameter_gradient(x, bias_dtype);
  BackwardStep step{{view("dy", dy), view("x", x), mask_view(mask), from.mean(), from.rstd(),
                     through(x, weight, bias, activation_mask, form.act()), view("weight", weight),
                     mutable_view("u", u), mutable_view("dx", dx), mutable_view("dweight", dweight),
                     mutable_view("dbias", dbias), share},
                    from.info()};
  if (exchanges) {
    check_backward({.dy = step.pass.dy,
                    .x = step.pass.x,
                    .mask = step.pass.mask,
                    .weight = step.pass.weight,
                    .bias = step.pass.through.bias,
                    .dx = step.pass.dx,
                    .dweight = step.pass.dweight,
                    .dbias = step.pass.dbias,
                    .dresidual = step.pass.u});
  }
  std::optional<Tensor> coefficients;
  const auto result = [&](std::optional<Tensor> message, std::optional<Tensor> merged,
                          std::int64_t status) -> Gradients {
    return {dx, dweight, dbias, u, coefficients, message, merged, status};
  };
  const Execution execution = place.execution();
  if (Place::kDevice == Device::kCpu && way == kAlone) {
    GroupSum alone;
    backward_at_once(step, alone, execution);
    return result({}, {}, kDone);
  }
  if (Place::kDevice == Device::kCpu && way >= 0) {
    InGroup in(x, way, {}, [&](GroupSum& sum) { return backward_at_once(step, sum, execution); });
    if (in.status != kDone) {
      coefficients = empty(x, 3 * channels, ScalarType::Double);
    }
    return result(in.message, in.merged, in.status);
  }
  coefficients = empty(x, 3 * channels, ScalarType::Double);
  step.coefficients = static_cast<double*>(coefficients->mutable_data_ptr());
  const std::int64_t words = message_words(step.pass.x.dtype, channels);
  Tensor message = new_message(x, words, way);
  const auto workspace = place.workspace(x, step.pass.x.dtype);
  step.workspace = workspace.words();
  if (way == kAlone) {
    GroupSum alone{.message = words_of(message, Place::kDevice)};
    backward_at_once(step, alone, execution);
    return result({}, {}, kDone);
  }
  // On CUDA the sum is written over what is sent; shares are of what this rank sent.
  std::optional<Tensor> copy;
  if (Place::kDevice == Device::kCuda && share && exchanges) {
    copy = empty(x, words, ScalarType::Long);
  }
  syncbn::backward_begin(step, words_of(message, Place::kDevice).data(),
                         copy ? words_of(*copy, Place::kDevice).data() : nullptr, execution);
  return result(message, copy, kUnchecked);
}

/// kept: dy has gone back through the activation already. gradients: dx, dweight, dbias, and the
/// coefficients of backward_begin. sum: the message that this rank sent, the merged one, and what
/// lies beyond its first part.
template <class Place>
void backward_finish(const Tensor& dy, const Tensor& x, const Tensor& saved,
                     std::optional<Tensor> weight, std::optional<Tensor> bias,
                     std::optional<Tensor> activation_mask, std::optional<Tensor> mask,
                     const Tensor& options, bool kept, Tensors gradients, Tensors sum,
                     std::int64_t ranks) {
  auto [dx, dweight, dbias, coefficients] = each<4>("gradients", gradients);
  auto [own, merged, rest] = each<3>("sum", sum);
  Place place(x, dy, saved, weight, bias, activation_mask, mask, dx, dweight, dbias, coefficients,
              own, merged, rest);
  const Form form = form_of(options);
  const Saved from(saved, x);
  const std::int64_t words = message_words(dtype_of("x", x), channels_of(x));
  const BackwardStep step{
      {view("dy", dy), view("x", x), mask_view(mask), from.mean(), from.rstd(),
       kept ? through(x, weight, {}, {}, {})
            : through(x, weight, bias, activation_mask, form.act()),
       view("weight", weight), MutableTensorView(), mutable_view("dx", dx),
       mutable_view("dweight", dweight), mutable_view("dbias", dbias), own.has_value()},
      from.info(),
      coefficients.has_value()
          ? const_cast<double*>(
                double_data("coefficients", *coefficients, 3 * channels_of(x), Place::kDevice))
          : nullptr};
  const MergedTensors total(merged, rest, x, Statistics::kReproducible, ranks);
  if (own.has_value() && merged.has_value() && Place::kDevice == Device::kCuda &&
      own->numel() != merged->numel()) {
    // No samples, in another dtype than the group: zeros in any format.
    own = torch::stable::new_zeros(*own, std::array<std::int64_t, 1>{merged->numel()});
  }
  const std::int64_t least = Place::kDevice == Device::kCpu || !merged.has_value() ? words : 0;
  syncbn::backward_finish(
      step, own.has_value() ? int64_data("own", *own, least, Place::kDevice) : nullptr, total.get(),
      place.execution());
}

/// x and the activation mask, from what an in-place forward wrote.
template <class Place>
std::tuple<Tensor, Tensor> recover_input(const Tensor& y, const Tensor& saved,
                                         std::optional<Tensor> weight, std::optional<Tensor> bias,
                                         const Tensor& options) {
  Place place(y, saved, weight, bias);
  const double negative_slope = form_of(options).negative_slope;
  const Saved from(saved, y);
  Tensor x = new_output(y);
  std::optional<Tensor> activation_mask = new_activation_mask(y);
  syncbn::recover_input(
      {view("y", y), from.mean(), from.rstd(), view("weight", weight), view("bias", bias),
       mutable_view("x", x), byte_data(activation_mask), negative_slope},
      place.execution());
  return {x, *activation_mask};
}

}  // namespace syncbn::torch_layer
