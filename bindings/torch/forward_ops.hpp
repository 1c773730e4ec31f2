// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/torch/exchange.hpp"
#include "bindings/torch/form.hpp"
#include "bindings/torch/outputs.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/step.hpp"

// A forward as operators (step_ops.hpp).
namespace syncbn::torch_layer {

/// y, saved, activation_mask, backward, number, message, merged, status.
using Outputs =
    std::tuple<std::optional<Tensor>, Tensor, std::optional<Tensor>, std::int64_t, std::int64_t,
               std::optional<Tensor>, std::optional<Tensor>, std::int64_t>;

/// Where the layer's two counters are: its next call, and the elements per channel over all ranks
/// in the last one.
inline std::int64_t* counters_of(std::optional<Tensor>& counters, Device device) {
  return counters.has_value() ? int64_data("counters", *counters, 2, device) : nullptr;
}

template <class Place>
Running running_of(std::optional<Tensor>& mean, std::optional<Tensor>& var,
                   std::optional<Tensor>& batches, std::int64_t* counters,
                   std::optional<double> momentum) {
  constexpr Device kDevice = Place::kDevice;
  if (batches.has_value() && batches->numel() != 1) {
    throw InvalidArgument("num_batches_tracked: got " + std::to_string(batches->numel()) +
                          " numbers, expected one");
  }
  return {mutable_view("running_mean", mean),
          mutable_view("running_var", var),
          optional_int64("num_batches_tracked", batches, kDevice),
          counters,
          counters == nullptr ? nullptr : counters + 1,
          momentum};
}

/// PyTorch's layer refuses one value per channel.
inline bool is_no_single_value(const MessageInfo& info) { return info.count != 1; }

/// The check at the door; in place y lies over x.
inline void check_forward_of(const ForwardStep& step, std::int64_t channels, bool in_place) {
  const ForwardPass& p = step.pass;
  check_forward({.channels = channels,
                 .eps = p.eps,
                 .momentum = step.running.momentum,
                 .activation = p.activation,
                 .statistics = step.statistics},
                {.x = p.x,
                 .mask = p.mask,
                 .weight = p.weight,
                 .bias = p.bias,
                 .residual = p.residual,
                 .y = in_place ? MutableTensorView(const_cast<void*>(p.x.data), p.x.dtype,
                                                   p.x.sizes, p.x.strides, p.x.device)
                               : p.y,
                 .running_mean = step.running.mean,
                 .running_var = step.running.var,
                 .num_batches_tracked = step.running.batches});
}

template <class Place>
Outputs forward_begin(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                      std::optional<Tensor> residual, std::optional<Tensor> mask,
                      std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
                      std::optional<Tensor> num_batches_tracked, std::optional<Tensor> counters,
                      const Tensor& options, std::int64_t backward, std::int64_t way) {
  Place place(x, weight, bias, residual, mask, running_mean, running_var, num_batches_tracked,
              counters);
  constexpr bool kOnCpu = Place::kDevice == Device::kCpu;
  const Form form = form_of(options);
  const std::int64_t channels = channels_of(x);
  std::int64_t* const counted = counters_of(counters, Place::kDevice);
  const Saved saved(x);
  std::optional<Tensor> y;
  std::optional<Tensor> activation_mask;
  if (form.in_place == 0) {
    y = new_output(x);
    if (residual.has_value() && form.activation != 0) {
      activation_mask = new_activation_mask(x);
    }
  }
  ForwardStep step{
      {view("x", x), mask_view(mask), view("weight", weight), view("bias", bias),
       view("residual", residual), mutable_view("y", y), byte_data(activation_mask), saved.mean(),
       saved.var(), saved.rstd(), form.eps, form.act()},
      form.mode(),
      layer_identity(form.layer, form.act(), form.mode(), residual.has_value(), weight.has_value(),
                     bias.has_value()),
      counted,
      backward,
      running_of<Place>(running_mean, running_var, num_batches_tracked, counted, form.factor()),
      saved.info()};
  check_forward_of(step, channels, form.in_place != 0);
  const std::int64_t number = kOnCpu && counted != nullptr ? *counted : -1;
  const auto result = [&](std::optional<Tensor> message, std::optional<Tensor> merged,
                          std::int64_t word, std::int64_t status) -> Outputs {
    return {y, saved.tensor, activation_mask, word, number, message, merged, status};
  };
  const Execution execution = place.execution();
  const bool one_call = way == kAlone && step.statistics == Statistics::kReproducible;
  if (kOnCpu && (one_call || way >= 0)) {
    GroupSum group{.accept = is_no_single_value};
    if (one_call) {
      const Reached reached = forward_at_once(step, group, execution);
      return result({}, {}, backward, reached == Reached::kOutput ? kDone : kUnchecked);
    }
    InGroup in(x, way, group, [&](GroupSum& sum) { return forward_at_once(step, sum, execution); });
    return result(in.message, in.merged, in.backward, in.status);
  }
  if (one_call && !mask.has_value() && x.numel() == channels) {  // one value per channel
    return result({}, {}, backward, kUnchecked);
  }
  Tensor message = new_message(x, forward_words(step.statistics, step.pass.x.dtype, channels), way);
  const auto workspace = place.workspace(x, step.pass.x.dtype);
  step.workspace = workspace.words();
  if (one_call && !mask.has_value()) {
    GroupSum alone{.message = words_of(message, Place::kDevice)};
    forward_at_once(step, alone, execution);
    return result({}, {}, backward, kDone);
  }
  syncbn::forward_begin(step, words_of(message, Place::kDevice).data(), execution);
  return result(message, {}, backward, kUnchecked);
}

/// running: mean, variance, number of batches and counters. sum: the merged message, and what lies
/// beyond its first part.
template <class Place>
void forward_finish(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                    std::optional<Tensor> residual, std::optional<Tensor> mask,
                    std::optional<Tensor> y, Tensor saved, std::optional<Tensor> activation_mask,
                    Tensors running, Tensors sum, const Tensor& options, std::int64_t ranks) {
  auto [mean, var, batches, counters] = each<4>("running", running);
  const auto [merged, rest] = each<2>("sum", sum);
  Place place(x, weight, bias, residual, mask, y, saved, activation_mask, mean, var, batches,
              counters, merged, rest);
  const Form form = form_of(options);
  const Saved to(saved, x);
  const ForwardStep step{
      {view("x", x), mask_view(mask), view("weight", weight), view("bias", bias),
       view("residual", residual), mutable_view("y", y), byte_data(activation_mask), to.mean(),
       to.var(), to.rstd(), form.eps, form.act()},
      form.mode(),
      0,
      nullptr,
      0,
      running_of<Place>(mean, var, batches, counters_of(counters, Place::kDevice), form.factor()),
      to.info()};
  const MergedTensors total(merged, rest, x, step.statistics, ranks);
  syncbn::forward_finish(step, total.get(), place.execution());
}

template <class Place>
void update_running_statistics(std::optional<Tensor> running_mean,
                               std::optional<Tensor> running_var,
                               std::optional<Tensor> num_batches_tracked, const Tensor& saved,
                               std::optional<double> momentum) {
  Place place(saved, running_mean, running_var, num_batches_tracked);
  const Running running =
      running_of<Place>(running_mean, running_var, num_batches_tracked, nullptr, momentum);
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
