// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/torch/cpu_ops.hpp"
#include "bindings/torch/layer.hpp"
#include "bindings/torch/new_output.hpp"
#include "bindings/torch/resolved.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/passes.hpp"

// The operators of the forward direction on CPU: the core's passes with PyTorch's tensors and
// threads. Shapes and dtypes stand beside their fakes in python/syncbn/operators.py.
namespace syncbn::torch_layer {

Updates::Updates(std::optional<Tensor>& mean, std::optional<Tensor>& var,
                 std::optional<Tensor>& batches, std::optional<Tensor>& call,
                 std::optional<double> momentum)
    : running_mean(mutable_view("running_mean", mean)),
      running_var(mutable_view("running_var", var)),
      num_batches_tracked(batches.has_value() ? int64_data("num_batches_tracked", *batches, 1)
                                              : nullptr),
      call_(call.has_value() ? int64_data("call", *call, 1) : nullptr),
      momentum_(momentum) {
  if (!momentum.has_value() && num_batches_tracked == nullptr && mean.has_value()) {
    throw InvalidArgument(
        "momentum: got None without num_batches_tracked, expected a number in [0, 1]");
  }
  if (batches.has_value() && batches->numel() != 1) {
    throw InvalidArgument("num_batches_tracked: got " + std::to_string(batches->numel()) +
                          " numbers, expected one");
  }
  if (num_batches_tracked == nullptr) {
    return;
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 53;  // what a quotient is made of
  const std::int64_t batches_before = *num_batches_tracked;
  if (!momentum.has_value() && (batches_before < 0 || batches_before > kMost)) {
    throw InvalidArgument("num_batches_tracked: got " + std::to_string(batches_before) +
                          ", expected 0 to 2^53");
  }
  if (batches_before == std::numeric_limits<std::int64_t>::max()) {
    throw InvalidArgument("num_batches_tracked: got 2^63 - 1, expected room for one batch more");
  }
}

void Updates::apply(const double* mean, const double* var, std::int64_t channels,
                    std::int64_t count) {
  const std::int64_t batches = num_batches_tracked == nullptr ? 0 : *num_batches_tracked;
  const double factor =
      momentum_.has_value() ? *momentum_ : cumulative_factor(static_cast<double>(batches));
  syncbn::update_running_statistics(running_mean, running_var, mean, var, channels, count, factor);
  if (num_batches_tracked != nullptr && count > 0) {
    *num_batches_tracked = batches + 1;
  }
  if (call_ != nullptr) {
    *call_ = static_cast<std::int64_t>(static_cast<std::uint64_t>(*call_) + 1);
  }
}

namespace {

Tensor local_moments(const Tensor& x, std::int64_t layer, std::optional<Tensor> call, double eps,
                     std::int64_t frame, std::optional<Tensor> mask, std::int64_t backward) {
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  const std::uint32_t tag = forward_fingerprint(layer, call, channels, eps);
  TorchExecutor executor;
  Tensor message = new_message(x, samples.dtype, channels, frame);
  syncbn::local_moments(samples, mask_view(mask), int64_data("message", message, kHeaderWords), tag,
                        executor);
  int64_data("message", message, kHeaderWords)[kHeaderBackward] = backward;
  return message;
}

/// What normalize writes to, as its `room`.
std::vector<Tensor> forward_outputs(const Tensor& x, bool activation_mask) {
  const ForwardOutputs out(x, activation_mask);
  return {out.y, out.mean, out.var, out.rstd, out.info, out.activation_mask};
}

/// From the merged message.
void set_statistics(Statistics& out, const Tensor& x, const Tensor& message, const Tensor& merged,
                    const std::optional<Tensor>& rest, double eps, std::int64_t ranks) {
  const std::int64_t channels = channels_of(x);
  const Merged words(merged, rest, ranks, channels);
  out.set_info(words.info, message);
  TorchExecutor executor;
  finalize_moments(words.info, words.words(), double_data(out.mean), double_data(out.var),
                   double_data(out.rstd), channels, eps, executor);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> normalize(
    const Tensor& x, const Tensor& message, const Tensor& merged, std::optional<Tensor> rest,
    std::optional<Tensor> weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
    double eps, std::int64_t ranks, std::int64_t activation, double negative_slope,
    std::optional<Tensor> mask, Room room) {
  const Activation applied = activation_of(activation, negative_slope);
  ForwardOutputs out = outputs_of(room, x, residual, applied);
  set_statistics(out, x, message, merged, rest, eps, ranks);
  return normalized(x, out, weight, bias, residual, applied, mask);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> normalize_in_place(
    Tensor x, const Tensor& message, const Tensor& merged, std::optional<Tensor> rest,
    std::optional<Tensor> weight, std::optional<Tensor> bias, double eps, std::int64_t ranks,
    double negative_slope) {
  Statistics s(x);
  set_statistics(s, x, message, merged, rest, eps, ranks);
  TorchExecutor executor;
  syncbn::normalize({view("x", x),
                     {},
                     double_data(s.mean),
                     double_data(s.rstd),
                     view("weight", weight),
                     view("bias", bias),
                     {},
                     mutable_view("x", x),
                     nullptr,
                     {ActivationKind::kLeakyRelu, negative_slope}},
                    executor);
  return {s.mean, s.var, s.rstd, s.info};
}

std::tuple<Tensor, Tensor> recover_input(const Tensor& y, const Tensor& mean, const Tensor& rstd,
                                         std::optional<Tensor> weight, std::optional<Tensor> bias,
                                         double negative_slope) {
  const std::int64_t channels = channels_of(y);
  Tensor x = new_output(y);
  Tensor activation_mask = new_activation_mask(y, true);
  TorchExecutor executor;
  syncbn::recover_input(
      {view("y", y), double_data("mean", mean, channels), double_data("rstd", rstd, channels),
       view("weight", weight), view("bias", bias), mutable_view("x", x), byte_data(activation_mask),
       negative_slope},
      executor);
  return {x, activation_mask};
}

void update_running_statistics(std::optional<Tensor> running_mean,
                               std::optional<Tensor> running_var,
                               std::optional<Tensor> num_batches_tracked,
                               std::optional<Tensor> call, const Tensor& mean, const Tensor& var,
                               const Tensor& info, std::optional<double> momentum) {
  const std::int64_t channels = mean.numel();
  Updates(running_mean, running_var, num_batches_tracked, call, momentum)
      .apply(double_data("mean", mean, channels), double_data("var", var, channels), channels,
             int64_data("info", info, 2)[0]);
}

/// The one operator after the exchange of an eager step.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> normalize_and_update(
    const Tensor& x, const Tensor& message, const Tensor& merged, std::optional<Tensor> rest,
    std::optional<Tensor> weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
    double eps, std::int64_t ranks, std::int64_t activation, double negative_slope,
    std::optional<Tensor> mask, std::optional<Tensor> running_mean,
    std::optional<Tensor> running_var, std::optional<Tensor> num_batches_tracked,
    std::optional<Tensor> call, std::optional<Tensor> last_count, std::optional<double> momentum,
    Room room) {
  const std::int64_t channels = channels_of(x);
  const BatchNorm::Options options{.channels = channels,
                                   .eps = eps,
                                   .momentum = momentum,
                                   .activation = activation_of(activation, negative_slope)};
  Updates updates(running_mean, running_var, num_batches_tracked, call, momentum);
  std::int64_t* count = last_count.has_value() ? int64_data("last_count", *last_count, 1) : nullptr;
  ForwardOutputs out = outputs_of(room, x, residual, options.activation);
  check_forward(options, {.x = view("x", x),
                          .mask = mask_view(mask),
                          .weight = view("weight", weight),
                          .bias = view("bias", bias),
                          .residual = view("residual", residual),
                          .y = mutable_view("y", out.y),
                          .running_mean = updates.running_mean,
                          .running_var = updates.running_var,
                          .num_batches_tracked = updates.num_batches_tracked});
  set_statistics(out, x, message, merged, rest, eps, ranks);
  const std::int64_t elements = int64_data("info", out.info, 2)[0];
  // First: the other ranks make these updates, whatever becomes of y here.
  updates.apply(double_data(out.mean), double_data(out.var), channels, elements);
  if (count != nullptr) {
    *count = elements;
  }
  return normalized(x, out, weight, bias, residual, options.activation, mask);
}

/// On every device.
void register_written(torch::stable::detail::StableLibrary& m) {
  m.impl("normalize_in_place", TORCH_BOX(&OnlyResolved<&normalize_in_place>::call));
  m.impl("update_running_statistics", TORCH_BOX(&OnlyResolved<&update_running_statistics>::call));
  m.impl("normalize_and_update", TORCH_BOX(&OnlyResolved<&normalize_and_update>::call));
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def(
      "local_moments(Tensor x, int layer, Tensor? call, float eps, int frame, Tensor? mask=None, "
      "int backward=0) "
      "-> Tensor");
  m.def(
      "normalize(Tensor x, Tensor message, Tensor merged, Tensor? rest, Tensor? weight, "
      "Tensor? bias, Tensor? residual, float eps, int ranks, int activation, "
      "float negative_slope, Tensor? mask=None, Tensor[]? room=None) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "normalize_in_place(Tensor(a!) x, Tensor message, Tensor merged, Tensor? rest, "
      "Tensor? weight, Tensor? bias, float eps, int ranks, float negative_slope) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "recover_input(Tensor y, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
      "float negative_slope) -> (Tensor, Tensor)");
  m.def(
      "update_running_statistics(Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, Tensor(d!)? call, Tensor mean, Tensor var, Tensor info, "
      "float? momentum) -> ()");
  m.def(
      "normalize_and_update(Tensor x, Tensor message, Tensor merged, Tensor? rest, "
      "Tensor? weight, Tensor? bias, Tensor? residual, float eps, int ranks, int activation, "
      "float negative_slope, Tensor? mask, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, Tensor(d!)? call, Tensor(e!)? last_count, "
      "float? momentum, Tensor[]? room=None) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("forward_outputs(Tensor x, bool activation_mask) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn::torch_layer;
  m.impl("local_moments", TORCH_BOX(&local_moments));
  m.impl("forward_outputs", TORCH_BOX(&forward_outputs));
  m.impl("normalize", TORCH_BOX(&normalize));
  m.impl("normalize_in_place", TORCH_BOX(&normalize_in_place));
  m.impl("recover_input", TORCH_BOX(&recover_input));
  m.impl("update_running_statistics", TORCH_BOX(&update_running_statistics));
  m.impl("normalize_and_update", TORCH_BOX(&normalize_and_update));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Negative, m) {
  using namespace syncbn::torch_layer;
  register_written(m);
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Conjugate, m) {
  using namespace syncbn::torch_layer;
  register_written(m);
}
