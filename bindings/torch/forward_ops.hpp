// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/torch/exchange.hpp"
#include "bindings/torch/outputs.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/step.hpp"

// A forward as operators (step_ops.hpp).
namespace syncbn::torch_layer {

using Outputs =
    std::tuple<std::optional<Tensor>, Tensor, std::optional<Tensor>, std::int64_t, std::int64_t,
               std::int64_t, std::optional<Tensor>, std::optional<Tensor>, std::int64_t>;
template <class Place>
Running running_of(std::optional<Tensor>& mean, std::optional<Tensor>& var,
                   std::optional<Tensor>& batches, std::optional<Tensor>& call,
                   std::optional<Tensor>& count, std::optional<double> momentum) {
  constexpr Device kDevice = Place::kDevice;
  if (batches.has_value() && batches->numel() != 1) {
    throw InvalidArgument("num_batches_tracked: got " + std::to_string(batches->numel()) +
                          " numbers, expected one");
  }
  return {mutable_view("running_mean", mean),
          mutable_view("running_var", var),
          optional_int64("num_batches_tracked", batches, kDevice),
          optional_int64("call", call, kDevice),
          optional_int64("last_count", count, kDevice),
          momentum};
}

inline Statistics statistics_of(std::int64_t number) {
  if (number != 0 && number != 1) {
    throw InvalidArgument("statistics: got number " + std::to_string(number) +
                          ", expected 0 (reproducible) or 1 (welford)");
  }
  return static_cast<Statistics>(number);
}

/// PyTorch's layer refuses one value per channel.
inline bool is_no_single_value(const MessageInfo& info) { return info.count != 1; }

template <class Place>
Outputs forward_begin(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                      std::optional<Tensor> residual, std::optional<Tensor> mask,
                      std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
                      std::optional<Tensor> num_batches_tracked, std::optional<Tensor> call,
                      std::optional<Tensor> last_count, std::int64_t layer, double eps,
                      std::optional<double> momentum, std::int64_t activation,
                      double negative_slope, std::int64_t statistics, std::int64_t backward,
                      std::int64_t way, std::int64_t amount) {
  Place place(x, weight, bias, residual, mask, running_mean, running_var, num_batches_tracked, call,
              last_count);
  const std::int64_t channels = channels_of(x);
  const Saved saved(x);
  std::optional<Tensor> y;
  std::optional<Tensor> activation_mask;
  if (way != kInPlace) {
    y = new_output(x);
    if (residual.has_value() && activation != 0) {
      activation_mask = new_activation_mask(x);
    }
  }
  ForwardStep step{
      {view("x", x), mask_view(mask), view("weight", weight), view("bias", bias),
       view("residual", residual), mutable_view("y", y), byte_data(activation_mask), saved.mean(),
       saved.var(), saved.rstd(), eps, activation_of(activation, negative_slope)},
      statistics_of(statistics),
      layer_identity(static_cast<std::uint64_t>(layer), activation_of(activation, negative_slope),
                     statistics_of(statistics), residual.has_value(), weight.has_value(),
                     bias.has_value()),
      optional_int64("call", call, Place::kDevice),
      backward,
      running_of<Place>(running_mean, running_var, num_batches_tracked, call, last_count, momentum),
      saved.info()};
  const BatchNorm::Options options{.channels = channels,
                                   .eps = eps,
                                   .momentum = momentum,
                                   .activation = step.pass.activation,
                                   .statistics = step.statistics};
  check_forward(options,
                {.x = step.pass.x,
                 .mask = step.pass.mask,
                 .weight = step.pass.weight,
                 .bias = step.pass.bias,
                 .residual = step.pass.residual,
                 .y = way == kInPlace ? MutableTensorView(const_cast<void*>(step.pass.x.data),
                                                          step.pass.x.dtype, step.pass.x.sizes,
                                                          step.pass.x.strides, step.pass.x.device)
                                      : step.pass.y,
                 .running_mean = step.running.mean,
                 .running_var = step.running.var,
                 .num_batches_tracked = step.running.batches});
  const bool counted = Place::kDevice == Device::kCpu && step.call != nullptr;
  const std::int64_t number = counted ? *step.call : -1;
  const auto result = [&](std::int64_t count, std::int64_t word, std::optional<Tensor> message,
                          std::optional<Tensor> merged, std::int64_t status) -> Outputs {
    return {y, saved.tensor, activation_mask, count, word, number, message, merged, status};
  };
  const Execution execution = place.execution();
  const bool reproducible = step.statistics == Statistics::kReproducible;
  const bool one_call = way == kAlone && reproducible;
  const bool noted = way == kNoted && reproducible;
  if (Place::kDevice == Device::kCpu && (one_call || noted || way >= 0)) {
    GroupSum group{.accept = is_no_single_value};
    if (one_call) {
      const Reached reached = forward_at_once(step, group, execution);
      return result(group.info.count, backward, {}, {},
                    reached == Reached::kOutput ? kDone : kUnchecked);
    }
    InGroup in(x, way, amount, group,
               [&](GroupSum& sum) { return forward_at_once(step, sum, execution); });
    return result(in.info.count, in.backward, in.message, in.merged, in.status);
  }
  const std::int64_t count =
      one_call && !mask.has_value() ? x.numel() / std::max<std::int64_t>(channels, 1) : 0;
  if (count == 1) {
    return result(count, backward, {}, {}, kUnchecked);
  }
  Tensor message =
      new_message(x, forward_words(step.statistics, step.pass.x.dtype, channels), amount);
  const auto workspace = place.workspace(x, step.pass.x.dtype);
  step.workspace = workspace.words();
  if (one_call && !mask.has_value()) {
    GroupSum alone{.message = words_of(message, Place::kDevice)};
    forward_at_once(step, alone, execution);
    return result(count, backward, {}, {}, kDone);
  }
  syncbn::forward_begin(step, words_of(message, Place::kDevice).data(), execution);
  return result(0, backward, message, {}, kUnchecked);
}

template <class Place>
void forward_finish(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                    std::optional<Tensor> residual, std::optional<Tensor> mask,
                    std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
                    std::optional<Tensor> num_batches_tracked, std::optional<Tensor> call,
                    std::optional<Tensor> last_count, std::optional<Tensor> y, Tensor saved,
                    std::optional<Tensor> activation_mask, std::optional<Tensor> merged,
                    std::optional<Tensor> rest, double eps, std::optional<double> momentum,
                    std::int64_t activation, double negative_slope, std::int64_t statistics,
                    std::int64_t ranks) {
  Place place(x, weight, bias, residual, mask, running_mean, running_var, num_batches_tracked, call,
              last_count, y, saved, activation_mask, merged, rest);
  const Saved to(saved, x);
  const ForwardStep step{
      {view("x", x), mask_view(mask), view("weight", weight), view("bias", bias),
       view("residual", residual), mutable_view("y", y), byte_data(activation_mask), to.mean(),
       to.var(), to.rstd(), eps, activation_of(activation, negative_slope)},
      statistics_of(statistics),
      0,
      nullptr,
      0,
      running_of<Place>(running_mean, running_var, num_batches_tracked, call, last_count, momentum),
      to.info()};
  const MergedTensors sum(merged, rest, x, step.statistics, ranks);
  syncbn::forward_finish(step, sum.get(), place.execution());
}

template <class Place>
void update_running_statistics(std::optional<Tensor> running_mean,
                               std::optional<Tensor> running_var,
                               std::optional<Tensor> num_batches_tracked,
                               std::optional<Tensor> call, const Tensor& saved,
                               std::optional<double> momentum) {
  Place place(saved, running_mean, running_var, num_batches_tracked, call);
  std::optional<Tensor> none;
  const Running running =
      running_of<Place>(running_mean, running_var, num_batches_tracked, call, none, momentum);
  const std::int64_t channels = (saved.numel() - kInfoWords) / 3;
  auto* const mean =
      const_cast<double*>(double_data("saved", saved, 3 * channels + kInfoWords, Place::kDevice));
  const Extents nothing{0, channels};
  forward_update({.pass = {.x = {nullptr, DType::kFloat32, nothing, nothing, Place::kDevice},
                           .mean = mean,
                           .var = mean + channels},
                  .running = running,
                  .info = reinterpret_cast<std::int64_t*>(mean + 3 * channels)},
                 place.execution());
}

/// y, and what a forward would have saved, with given statistics.
template <class Place>
std::tuple<Tensor, Tensor> evaluate(const Tensor& x, const Tensor& mean, const Tensor& var,
                                    std::optional<Tensor> weight, std::optional<Tensor> bias,
                                    double eps) {
  Place place(x, mean, var, weight, bias);
  const std::int64_t channels = channels_of(x);
  const Saved saved(x);
  for (const auto& [name, tensor] : {std::pair{"mean", &mean}, std::pair{"var", &var}}) {
    if (tensor->dim() != 1 || tensor->numel() != channels) {
      throw InvalidArgument(std::string(name) + ": got " + std::to_string(tensor->numel()) +
                            " entries, expected one per channel, " + std::to_string(channels));
    }
  }
  evaluation_statistics(view("mean", mean), view("var", var), saved.mean(), saved.var(),
                        saved.rstd(), eps, place.execution());
  Tensor y = new_output(x);
  syncbn::forward_finish({.pass = {.x = view("x", x),
                                   .weight = view("weight", weight),
                                   .bias = view("bias", bias),
                                   .y = mutable_view("y", y),
                                   .mean = saved.mean(),
                                   .rstd = saved.rstd()}},
                         {}, place.execution());
  return {y, saved.tensor};
}

}  // namespace syncbn::torch_layer
