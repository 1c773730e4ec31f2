// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <chrono>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "bindings/torch/cpu_ops.hpp"
#include "bindings/torch/layer.hpp"
#include "bindings/torch/resolved.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/group_passes.hpp"
#include "syncbn/passes.hpp"

// A whole direction of a training step in one operator, for python/syncbn/step/in_one.py: checks,
// sums, the exchange between processes of a node, and what follows. An argument that is refused has
// changed nothing, and nobody has waited for this rank.
namespace syncbn::torch_layer {
namespace {

/// In the place of a group's number: one rank, with nobody to exchange with.
constexpr std::int64_t kAlone = -1;

/// What a direction has come to, and its messages where it did not come to its end.
struct Outcome {
  std::optional<Tensor> message, merged;
  std::int64_t status = kDone;
  MessageInfo info;
  std::int64_t backward = 0;  ///< the merged header's word

  /// One rank's. What is refused is left to the general way, which has the words for it.
  Outcome(const MessageInfo& of_one_rank, bool refused)
      : status(refused ? kUnchecked : kDone), info(of_one_rank) {}

  /// A group's; direction(GroupSum): the rest of it.
  template <class Direction>
  Outcome(const Tensor& x, std::int64_t handle, std::int64_t slice, GroupSum group,
          const Direction& direction)
      : message(new_message(x, dtype_of("x", x), channels_of(x), 0)),
        merged(empty(x, message->numel(), ScalarType::Long)) {
    group.ranks = ranks_of_group(handle);
    group.message = words(*message);
    group.merged = words(*merged);
    group.slice = std::chrono::milliseconds(slice);
    status = run_in_group(handle, *message, *merged, [&](SumInParts& sum) {
      group.sum = &sum;
      return direction(group);
    });
    info = group.info;
    backward = group.merged[kHeaderBackward];
    if (status == kDone) {
      message.reset();
      merged.reset();
    }
  }

 private:
  static std::span<std::int64_t> words(Tensor& tensor) {
    return {int64_data("message", tensor, kHeaderWords), static_cast<std::size_t>(tensor.numel())};
  }
};

/// PyTorch's layer refuses one value per channel.
bool is_no_single_value(const MessageInfo& info) { return info.count != 1; }

std::tuple<Tensor, Tensor, std::optional<Tensor>, std::int64_t, std::int64_t, std::int64_t,
           std::optional<Tensor>, std::optional<Tensor>, std::int64_t>
forward_step(const Tensor& x, std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
             std::optional<Tensor> num_batches_tracked, std::optional<Tensor> weight,
             std::optional<Tensor> bias, std::optional<Tensor> residual, std::optional<Tensor> mask,
             std::optional<Tensor> call, std::optional<Tensor> last_count, std::int64_t layer,
             double eps, std::optional<double> momentum, std::int64_t activation,
             double negative_slope, std::int64_t backward, std::int64_t handle,
             std::int64_t slice) {
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  const BatchNorm::Options options{.channels = channels,
                                   .eps = eps,
                                   .momentum = momentum,
                                   .activation = activation_of(activation, negative_slope)};
  const MaskView counted = mask_view(mask);
  const TensorView scale = view("weight", weight);
  const TensorView shift = view("bias", bias);
  const TensorView added = view("residual", residual);
  Updates updates(running_mean, running_var, num_batches_tracked, call, momentum);
  const std::uint32_t tag = forward_fingerprint(layer, call, channels, eps);
  std::int64_t* count = last_count.has_value() ? int64_data("last_count", *last_count, 1) : nullptr;
  Tensor y = new_output(x);
  const MutableTensorView out = mutable_view("y", y);
  check_forward(options, {.x = samples,
                          .mask = counted,
                          .weight = scale,
                          .bias = shift,
                          .residual = added,
                          .y = out,
                          .running_mean = updates.running_mean,
                          .running_var = updates.running_var,
                          .num_batches_tracked = updates.num_batches_tracked});
  std::optional<Tensor> activation_mask;
  if (residual.has_value() && options.activation.kind != ActivationKind::kNone) {
    activation_mask = new_activation_mask(x, true);
  }
  Tensor statistics = empty(x, 2 * channels, ScalarType::Double);
  double* mean = double_data(statistics);
  double* rstd = mean + channels;
  std::vector<double> var(static_cast<std::size_t>(channels));

  TorchExecutor executor;
  std::uint8_t* bits = activation_mask.has_value() ? byte_data(*activation_mask) : nullptr;
  Outcome outcome = [&] {
    if (handle == kAlone) {
      const MessageInfo info =
          forward_of_one_rank({samples, counted, scale, shift, added, out, bits, mean, var.data(),
                               rstd, eps, options.activation},
                              executor);
      return Outcome(info, !is_no_single_value(info));
    }
    const GroupSum group{.fingerprint = tag, .backward = backward, .accept = is_no_single_value};
    return Outcome(x, handle, slice, group, [&](GroupSum& sum) {
      return forward_in_group({samples, counted, scale, shift, added, out, bits, mean, var.data(),
                               rstd, eps, options.activation},
                              sum, executor);
    });
  }();
  if (outcome.status == kDone) {
    updates.apply(mean, var.data(), channels, outcome.info.count);
    if (count != nullptr) {
      *count = outcome.info.count;
    }
  }
  return {y,
          statistics,
          activation_mask,
          outcome.info.count,
          tag,
          outcome.backward,
          outcome.message,
          outcome.merged,
          outcome.status};
}

/// An output that may not be wanted.
std::optional<Tensor> parameter_gradient(const Tensor& x, std::optional<ScalarType> dtype) {
  return dtype.has_value() ? std::optional(new_parameter_gradient(x, dtype)) : std::nullopt;
}

std::tuple<Tensor, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
           std::optional<Tensor>, std::optional<Tensor>, std::int64_t>
backward_step(const Tensor& dy, const Tensor& x, const Tensor& statistics,
              std::optional<Tensor> weight, std::optional<Tensor> bias,
              std::optional<Tensor> activation_mask, std::optional<Tensor> mask, std::int64_t count,
              std::int64_t tag, std::int64_t activation, double negative_slope, bool keep,
              std::optional<ScalarType> weight_dtype, std::optional<ScalarType> bias_dtype,
              bool share, std::int64_t handle, std::int64_t slice) {
  const TensorView samples = view("x", x);
  const TensorView gradient = view("dy", dy);
  const std::int64_t channels = channels_of(x);
  const MaskView counted = mask_view(mask);
  const double* mean = double_data("statistics", statistics, 2 * channels);
  const double* rstd = mean + channels;
  const ActivationGradient back =
      through(x, weight, bias, activation_mask, activation, negative_slope);
  const TensorView scale = view("weight", weight);
  Tensor dx = new_output(x);
  std::optional<Tensor> u = keep ? std::optional(new_output(x)) : std::nullopt;
  std::optional<Tensor> dweight = parameter_gradient(x, weight_dtype);
  std::optional<Tensor> dbias = parameter_gradient(x, bias_dtype);
  const MutableTensorView out = mutable_view("dx", dx);
  const MutableTensorView kept = mutable_view("u", u);
  const MutableTensorView out_weight = mutable_view("dweight", dweight);
  const MutableTensorView out_bias = mutable_view("dbias", dbias);
  check_backward({.dy = gradient,
                  .x = samples,
                  .mask = counted,
                  .weight = scale,
                  .dx = out,
                  .dweight = out_weight,
                  .dbias = out_bias,
                  .dresidual = kept});
  TorchExecutor executor;
  Outcome outcome = [&] {
    if (handle == kAlone) {
      const MessageInfo info = backward_of_one_rank({.dy = gradient,
                                                     .x = samples,
                                                     .mask = counted,
                                                     .mean = mean,
                                                     .rstd = rstd,
                                                     .through = back,
                                                     .weight = scale,
                                                     .u = kept,
                                                     .dx = out,
                                                     .dweight = out_weight,
                                                     .dbias = out_bias,
                                                     .count = count},
                                                    executor);
      return Outcome(info, info.count != count);
    }
    const GroupSum group{.fingerprint = backward_fingerprint(static_cast<std::uint32_t>(tag))};
    return Outcome(x, handle, slice, group, [&](GroupSum& sum) {
      return backward_in_group({gradient, samples, counted, mean, rstd, back, scale, kept, out,
                                out_weight, out_bias, share, count},
                               sum, executor);
    });
  }();
  return {dx, dweight, dbias, u, outcome.message, outcome.merged, outcome.status};
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def(
      "forward_step(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, Tensor? weight, Tensor? bias, Tensor? residual, "
      "Tensor? mask, Tensor(d!)? call, Tensor(e!)? last_count, int layer, float eps, "
      "float? momentum, int activation, float negative_slope, int backward, int handle, int slice) "
      "-> (Tensor, Tensor, Tensor?, int, int, int, Tensor?, Tensor?, int)");
  m.def(
      "backward_step(Tensor dy, Tensor x, Tensor statistics, Tensor? weight, Tensor? bias, "
      "Tensor? activation_mask, Tensor? mask, int count, int tag, int activation, "
      "float negative_slope, bool keep, ScalarType? weight_dtype, ScalarType? bias_dtype, "
      "bool share, int handle, int slice) "
      "-> (Tensor, Tensor?, Tensor?, Tensor?, Tensor?, Tensor?, int)");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn::torch_layer;
  m.impl("forward_step", TORCH_BOX(&forward_step));
  m.impl("backward_step", TORCH_BOX(&backward_step));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Negative, m) {
  using namespace syncbn::torch_layer;
  m.impl("forward_step", TORCH_BOX(&OnlyResolved<&forward_step>::call));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Conjugate, m) {
  using namespace syncbn::torch_layer;
  m.impl("forward_step", TORCH_BOX(&OnlyResolved<&forward_step>::call));
}
