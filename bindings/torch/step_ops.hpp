// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/library.h>

#include <chrono>
#include <optional>
#include <span>
#include <tuple>

#include "bindings/torch/cpu_ops.hpp"
#include "bindings/torch/outputs.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/step.hpp"

// The two doors of a training step's directions as operators, for python/syncbn/step/training.py:
// on both devices, of which a Place is the one of a call's tensors. An argument that is refused has
// changed nothing, and nobody has waited for this rank. Shapes and dtypes stand beside their fakes
// in python/syncbn/operators.py.
namespace syncbn::torch_layer {

/// How far begin goes, where it is not given the number of a group in shared memory (0 and more),
/// whose exchange it makes as well.
enum Way : std::int64_t {
  kAlone = -1,    ///< to the end: there is one rank
  kMessage = -2,  ///< the message, and room for the outputs
  kInPlace = -3,  ///< the message, and no room for y
  kOwn = -4,      ///< of a backward without an exchange: the message, and no room for dx
  kNoted = -5,    ///< on the CPU as kAlone, and the sums are given back; on CUDA as kMessage
};

using Outputs =
    std::tuple<std::optional<Tensor>, Tensor, std::optional<Tensor>, std::int64_t, std::int64_t,
               std::int64_t, std::optional<Tensor>, std::optional<Tensor>, std::int64_t>;
using Gradients = std::tuple<std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
                             std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
                             std::optional<Tensor>, std::int64_t>;

inline std::span<std::int64_t> words_of(Tensor& tensor, Device device = Device::kCpu) {
  return {int64_data("message", tensor, kHeaderWords, device),
          static_cast<std::size_t>(tensor.numel())};
}

/// A message of at least `frame` words: zeros follow those of the channels.
inline Tensor new_message(const Tensor& x, std::int64_t words, std::int64_t frame) {
  const Device device = device_of("x", x);
  if (device == Device::kCuda) {  // whose messages have no frame
    frame = 0;
  }
  Tensor message = empty(x, std::max(checked_frame(frame), words), ScalarType::Long);
  if (message.numel() > words) {
    const std::span<std::int64_t> all = words_of(message);
    std::fill(all.begin() + words, all.end(), 0);
  }
  return message;
}

/// The sum over one rank: what it brings, which lies where the sum is looked for.
class OwnSum final : public SumInParts {
 public:
  void open(std::span<const std::int64_t>, std::span<std::int64_t>) override {}
  void publish(std::size_t) override {}
  bool wait(std::size_t, std::chrono::milliseconds) override { return true; }
};

/// What ended a direction in shared memory, or of one rank by kNoted; the sums, and this rank's
/// message where it did not come to its end.
struct InGroup {
  std::optional<Tensor> message, merged;
  std::int64_t status = kDone;
  MessageInfo info;
  std::int64_t backward = 0;  ///< the merged header's word

  /// direction(GroupSum): the rest of it.
  template <class Direction>
  InGroup(const Tensor& x, std::int64_t handle, std::int64_t slice, GroupSum group,
          const Direction& direction)
      : message(new_message(x, message_words(dtype_of("x", x), channels_of(x)), 0)),
        merged(handle == kNoted ? *message : empty(x, message->numel(), ScalarType::Long)) {
    const auto run = [&](SumInParts& sum) {
      group.sum = &sum;
      return direction(group);
    };
    group.message = words_of(*message);
    group.merged = words_of(*merged);
    group.slice = std::chrono::milliseconds(slice);
    if (handle == kNoted) {
      OwnSum own;
      status = run(own) == Reached::kOutput ? kDone : kUnchecked;
    } else {
      group.ranks = ranks_of_group(handle);
      status = run_in_group(handle, *message, *merged, run);
    }
    info = group.info;
    backward = group.merged[kHeaderBackward];
    if (status == kDone || handle == kNoted) {
      message.reset();
    }
  }
};

template <class Place>
Running running_of(std::optional<Tensor>& mean, std::optional<Tensor>& var,
                   std::optional<Tensor>& batches, std::optional<Tensor>& call,
                   std::optional<Tensor>& count, std::optional<double> momentum) {
  constexpr Device kDevice = Place::kDevice;
  if (batches.has_value() && batches->numel() != 1) {
    throw InvalidArgument("num_batches_tracked: got " + std::to_string(batches->numel()) +
                          " numbers, expected one");
  }
  Running running{mutable_view("running_mean", mean),
                  mutable_view("running_var", var),
                  optional_int64("num_batches_tracked", batches, kDevice),
                  optional_int64("call", call, kDevice),
                  optional_int64("last_count", count, kDevice),
                  momentum};
  if (kDevice == Device::kCpu) {
    running.check();
  }
  return running;
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
                     statistics_of(statistics), residual.has_value()),
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
  if (!merged.has_value()) {  // the statistics are there
    forward_map(step.pass, place.execution());
    return;
  }
  const MergedTensors sum(*merged, rest, x, step.statistics, ranks);
  syncbn::forward_finish(step, sum.get(), place.execution());
}

template <class Place>
Gradients backward_begin(const Tensor& dy, const Tensor& x, const Tensor& saved,
                         std::optional<Tensor> weight, std::optional<Tensor> bias,
                         std::optional<Tensor> activation_mask, std::optional<Tensor> mask,
                         std::int64_t activation, double negative_slope, bool keep,
                         std::optional<ScalarType> weight_dtype,
                         std::optional<ScalarType> bias_dtype, bool share, std::int64_t way,
                         std::int64_t amount) {
  Place place(x, dy, saved, weight, bias, activation_mask, mask);
  const std::int64_t channels = channels_of(x);
  const Saved from(saved, x);
  const bool exchanges = way != kOwn;
  std::optional<Tensor> dx = exchanges ? std::optional(new_output(x)) : std::nullopt;
  std::optional<Tensor> u = keep ? std::optional(new_output(x)) : std::nullopt;
  std::optional<Tensor> dweight = new_parameter_gradient(x, weight_dtype);
  std::optional<Tensor> dbias = new_parameter_gradient(x, bias_dtype);
  BackwardStep step{{view("dy", dy), view("x", x), mask_view(mask), from.mean(), from.rstd(),
                     through(x, weight, bias, activation_mask, activation, negative_slope),
                     view("weight", weight), mutable_view("u", u), mutable_view("dx", dx),
                     mutable_view("dweight", dweight), mutable_view("dbias", dbias), share},
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
  if (Place::kDevice == Device::kCpu && (way >= 0 || way == kNoted)) {
    InGroup in(x, way, amount, {},
               [&](GroupSum& sum) { return backward_at_once(step, sum, execution); });
    if (in.status != kDone) {
      coefficients = empty(x, 3 * channels, ScalarType::Double);
    }
    return result(in.message, in.merged, in.status);
  }
  coefficients = empty(x, 3 * channels, ScalarType::Double);
  step.coefficients = static_cast<double*>(coefficients->mutable_data_ptr());
  const std::int64_t words = message_words(step.pass.x.dtype, channels);
  Tensor message = new_message(x, words, amount);
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

template <class Place>
void backward_finish(const Tensor& dy, const Tensor& x, const Tensor& saved,
                     std::optional<Tensor> weight, std::optional<Tensor> bias,
                     std::optional<Tensor> activation_mask, std::optional<Tensor> mask,
                     std::int64_t activation, double negative_slope, std::optional<Tensor> dx,
                     std::optional<Tensor> dweight, std::optional<Tensor> dbias,
                     Tensor coefficients, std::optional<Tensor> own, std::optional<Tensor> merged,
                     std::optional<Tensor> rest, std::int64_t ranks) {
  Place place(x, dy, saved, weight, bias, activation_mask, mask, dx, dweight, dbias, coefficients,
              own, merged, rest);
  const Saved from(saved, x);
  const std::int64_t words = message_words(dtype_of("x", x), channels_of(x));
  const BackwardStep step{
      {view("dy", dy), view("x", x), mask_view(mask), from.mean(), from.rstd(),
       through(x, weight, bias, activation_mask, activation, negative_slope),
       view("weight", weight), MutableTensorView(), mutable_view("dx", dx),
       mutable_view("dweight", dweight), mutable_view("dbias", dbias), own.has_value()},
      from.info(),
      const_cast<double*>(
          double_data("coefficients", coefficients, 3 * channels_of(x), Place::kDevice))};
  if (!merged.has_value()) {
    if (!own.has_value()) {
      throw InvalidArgument("own: got none without merged, expected this rank's message");
    }
    backward_shares(step, int64_data("own", *own, words, Place::kDevice), place.execution());
    return;
  }
  const MergedTensors sum(*merged, rest, x, Statistics::kReproducible, ranks);
  if (own.has_value() && Place::kDevice == Device::kCuda && own->numel() != merged->numel()) {
    // No samples, in another dtype than the group: zeros in any format.
    own = torch::stable::new_zeros(*own, std::array<std::int64_t, 1>{merged->numel()});
  }
  const std::int64_t least = Place::kDevice == Device::kCpu ? words : 0;
  syncbn::backward_finish(
      step, own.has_value() ? int64_data("own", *own, least, Place::kDevice) : nullptr, sum.get(),
      place.execution());
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

/// x and the activation mask, from what an in-place forward wrote.
template <class Place>
std::tuple<Tensor, Tensor> recover_input(const Tensor& y, const Tensor& saved,
                                         std::optional<Tensor> weight, std::optional<Tensor> bias,
                                         double negative_slope) {
  Place place(y, saved, weight, bias);
  const Saved from(saved, y);
  Tensor x = new_output(y);
  std::optional<Tensor> activation_mask = new_activation_mask(y);
  syncbn::recover_input(
      {view("y", y), from.mean(), from.rstd(), view("weight", weight), view("bias", bias),
       mutable_view("x", x), byte_data(activation_mask), negative_slope},
      place.execution());
  return {x, *activation_mask};
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
  forward_map({.x = view("x", x),
               .weight = view("weight", weight),
               .bias = view("bias", bias),
               .y = mutable_view("y", y),
               .mean = saved.mean(),
               .rstd = saved.rstd()},
              place.execution());
  return {y, saved.tensor};
}

/// dx, where the statistics are constants.
template <class Place>
Tensor evaluation_input_gradient(const Tensor& dy, const Tensor& saved,
                                 std::optional<Tensor> weight) {
  Place place(dy, saved, weight);
  Tensor dx = new_output(dy);
  syncbn::evaluation_input_gradient(view("dy", dy), {}, Saved(saved, dy).rstd(),
                                    view("weight", weight), mutable_view("dx", dx),
                                    place.execution());
  return dx;
}

/// Registers them for the dispatch key of the Place.
template <class Place>
void register_step(torch::stable::detail::StableLibrary& m) {
  m.impl("forward_begin", TORCH_BOX(&forward_begin<Place>));
  m.impl("forward_finish", TORCH_BOX(&forward_finish<Place>));
  m.impl("backward_begin", TORCH_BOX(&backward_begin<Place>));
  m.impl("backward_finish", TORCH_BOX(&backward_finish<Place>));
  m.impl("update_running_statistics", TORCH_BOX(&update_running_statistics<Place>));
  m.impl("recover_input", TORCH_BOX(&recover_input<Place>));
  m.impl("evaluate", TORCH_BOX(&evaluate<Place>));
  m.impl("evaluation_input_gradient", TORCH_BOX(&evaluation_input_gradient<Place>));
}

}  // namespace syncbn::torch_layer
