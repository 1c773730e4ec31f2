#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "bindings/torch/cpu_ops.hpp"
#include "bindings/torch/layer.hpp"
#include "bindings/torch/new_output.hpp"
#include "bindings/torch/resolved.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/diagnosis.hpp"
#include "syncbn/passes.hpp"

// The operators on CPU: the core's passes with PyTorch's tensors and threads. Functional, but for
// update_running_statistics. Shapes and dtypes stand beside their fakes in
// python/syncbn/operators.py.
namespace syncbn::torch_layer {
Tensor new_message(const Tensor& x, DType dtype, std::int64_t channels, std::int64_t frame) {
  const std::int64_t words = message_words(dtype, channels);
  Tensor message = empty(x, std::max(checked_frame(frame), words), ScalarType::Long);
  std::int64_t* data = int64_data("message", message, words);
  std::fill(data + words, data + message.numel(), 0);
  return message;
}

Tensor local_moments(const Tensor& x, std::int64_t layer, std::optional<Tensor> call, double eps,
                     std::int64_t frame, std::optional<Tensor> mask, std::int64_t backward) {
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  const std::int64_t number = call.has_value() ? *int64_data("call", *call, 1) : 0;
  TorchExecutor executor;
  Tensor message = new_message(x, samples.dtype, channels, frame);
  syncbn::local_moments(
      samples, mask_view(mask), int64_data("message", message, kHeaderWords),
      fingerprint(static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(number),
                  Direction::kForward, channels, eps),
      executor);
  int64_data("message", message, kHeaderWords)[kHeaderBackward] = backward;
  return message;
}

namespace {

Tensor rejection(const Tensor& like, std::int64_t frame) {
  Tensor message =
      empty(like, std::max<std::int64_t>(checked_frame(frame), kHeaderWords), ScalarType::Long);
  std::int64_t* data = int64_data("message", message, kHeaderWords);
  std::fill(data, data + message.numel(), 0);
  rejection_header(0, data);
  return message;
}

Tensor header(const Tensor& merged, std::int64_t ranks) {
  const MessageInfo info =
      syncbn::read_header(int64_data("merged", merged, kHeaderWords), ranks_of(ranks));
  Tensor out = empty(merged, 4, ScalarType::Long);
  std::int64_t* data = int64_data("out", out, 4);
  data[0] = info.count;
  data[1] = info.agree ? 1 : 0;
  data[2] = info.any_rejected ? 1 : 0;
  data[3] = info.any_data ? static_cast<std::int64_t>(info.dtype) : -1;
  return out;
}

Tensor remaining_words(const Tensor& message, const Tensor& merged, std::int64_t ranks,
                       std::int64_t channels, std::int64_t size) {
  const MessageInfo info =
      syncbn::read_header(int64_data("merged", merged, kHeaderWords), ranks_of(ranks));
  check_header(info);
  const std::int64_t most = message_words(DType::kFloat64, channels);
  if (channels > message.numel() || size > most) {
    throw InvalidArgument("channels, size: got " + std::to_string(channels) + " and " +
                          std::to_string(size) + ", expected those of the message");
  }
  const std::int64_t frame = merged.numel();
  if (size < 0) {
    size =
        info.any_data ? std::max<std::int64_t>(0, message_words(info.dtype, channels) - frame) : 0;
  }
  Tensor rest = empty(message, size, ScalarType::Long);
  std::int64_t* data = int64_data("rest", rest, size);
  const std::int64_t* from = int64_data("message", message, kHeaderWords);
  // A rank without samples, of another dtype than the group, brings zeros in the group's length.
  const std::int64_t have = std::clamp<std::int64_t>(message.numel() - frame, 0, size);
  std::copy(from + frame, from + frame + have, data);
  std::fill(data + have, data + size, 0);
  return rest;
}

/// mean, var, rstd and (count, fingerprint) from the merged message.
Statistics statistics_of(const Tensor& x, const Tensor& message, const Tensor& merged,
                         const std::optional<Tensor>& rest, double eps, std::int64_t ranks) {
  const std::int64_t channels = channels_of(x);
  const Merged words(merged, rest, ranks, channels);
  Statistics out(x, words.info, message);
  TorchExecutor executor;
  finalize_moments(words.info, words.words(), double_data(out.mean), double_data(out.var),
                   double_data(out.rstd), channels, eps, executor);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> normalize(
    const Tensor& x, const Tensor& message, const Tensor& merged, std::optional<Tensor> rest,
    std::optional<Tensor> weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
    double eps, std::int64_t ranks, std::int64_t activation, double negative_slope,
    std::optional<Tensor> mask) {
  const Statistics statistics = statistics_of(x, message, merged, rest, eps, ranks);
  return normalized(x, statistics, weight, bias, residual,
                    activation_of(activation, negative_slope), mask);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> normalize_in_place(
    Tensor x, const Tensor& message, const Tensor& merged, std::optional<Tensor> rest,
    std::optional<Tensor> weight, std::optional<Tensor> bias, double eps, std::int64_t ranks,
    double negative_slope) {
  Statistics s = statistics_of(x, message, merged, rest, eps, ranks);
  TorchExecutor executor;
  syncbn::normalize(view("x", x), {}, double_data(s.mean), double_data(s.rstd),
                    view("weight", weight), view("bias", bias), {}, mutable_view("x", x), nullptr,
                    {ActivationKind::kLeakyRelu, negative_slope}, executor);
  return {s.mean, s.var, s.rstd, s.info};
}

std::tuple<Tensor, Tensor> recover_input(const Tensor& y, const Tensor& mean, const Tensor& rstd,
                                         std::optional<Tensor> weight, std::optional<Tensor> bias,
                                         double negative_slope) {
  const std::int64_t channels = channels_of(y);
  Tensor x = new_output(y);
  Tensor activation_mask = new_activation_mask(y, true);
  TorchExecutor executor;
  syncbn::recover_input(view("y", y), double_data("mean", mean, channels),
                        double_data("rstd", rstd, channels), view("weight", weight),
                        view("bias", bias), mutable_view("x", x), byte_data(activation_mask),
                        negative_slope, executor);
  return {x, activation_mask};
}

}  // namespace

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
  const std::int64_t batches = num_batches_tracked == nullptr ? 0 : *num_batches_tracked + 1;
  const double factor = momentum_.value_or(batches > 0 ? 1.0 / static_cast<double>(batches) : 0.0);
  syncbn::update_running_statistics(running_mean, running_var, mean, var, channels, count, factor);
  if (num_batches_tracked != nullptr && count > 0) {
    *num_batches_tracked = batches;
  }
  if (call_ != nullptr) {
    *call_ = static_cast<std::int64_t>(static_cast<std::uint64_t>(*call_) + 1);
  }
}

namespace {

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
    std::optional<Tensor> call, std::optional<Tensor> last_count, std::optional<double> momentum) {
  auto out = normalize(x, message, merged, rest, weight, bias, residual, eps, ranks, activation,
                       negative_slope, mask);
  const auto& [y, mean, var, rstd, info, activation_mask] = out;
  update_running_statistics(running_mean, running_var, num_batches_tracked, call, mean, var, info,
                            momentum);
  if (last_count.has_value()) {
    *int64_data("last_count", *last_count, 1) = int64_data("info", info, 2)[0];
  }
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> local_gradients(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                           const Tensor& rstd, const Tensor& info,
                                           std::optional<Tensor> weight, std::optional<Tensor> bias,
                                           std::optional<Tensor> activation_mask,
                                           std::int64_t activation, double negative_slope,
                                           bool keep, std::int64_t frame,
                                           std::optional<Tensor> mask) {
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  const auto tag = static_cast<std::uint32_t>(int64_data("info", info, 2)[1]);
  TorchExecutor executor;
  Tensor message = new_message(x, samples.dtype, channels, frame);
  Tensor u = keep ? new_output(x) : empty(x, 0, x.scalar_type());
  syncbn::local_gradients(view("dy", dy), samples, mask_view(mask),
                          double_data("mean", mean, channels), double_data("rstd", rstd, channels),
                          through(x, weight, bias, activation_mask, activation, negative_slope),
                          keep ? mutable_view("u", u) : MutableTensorView(),
                          int64_data("message", message, kHeaderWords), backward_fingerprint(tag),
                          executor);
  return {message, u};
}

namespace {

std::tuple<Tensor, Tensor> affine_gradient_shares(const Tensor& message, const Tensor& x,
                                                  const Tensor& mean, const Tensor& rstd,
                                                  std::optional<ScalarType> weight_dtype,
                                                  std::optional<ScalarType> bias_dtype) {
  const std::int64_t channels = channels_of(x);
  const DType dtype = dtype_of("x", x);
  const std::int64_t* words =
      int64_data("message", message, message_words(dtype, channels)) + kHeaderWords;
  Tensor dweight = new_parameter_gradient(x, weight_dtype);
  Tensor dbias = new_parameter_gradient(x, bias_dtype);
  TorchExecutor executor;
  syncbn::affine_gradient_shares(words, dtype, double_data("mean", mean, channels),
                                 double_data("rstd", rstd, channels),
                                 wanted("dweight", dweight, weight_dtype),
                                 wanted("dbias", dbias, bias_dtype), channels, executor);
  return {dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> input_gradient(
    const Tensor& dy, const Tensor& x, const Tensor& merged, std::optional<Tensor> rest,
    const Tensor& mean, const Tensor& rstd, const Tensor& info, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> activation_mask, std::int64_t activation,
    double negative_slope, std::optional<ScalarType> weight_dtype,
    std::optional<ScalarType> bias_dtype, std::int64_t ranks, std::optional<Tensor> mask,
    std::optional<Tensor> own) {
  const std::int64_t channels = channels_of(x);
  const Merged words(merged, rest, ranks, channels);
  const std::int64_t count = int64_data("info", info, 2)[0];
  if (words.info.count != count) {
    throw DivergenceError("backward: the ranks bring " + std::to_string(words.info.count) +
                          " elements per channel, forward had " + std::to_string(count));
  }
  const double* means = double_data("mean", mean, channels);
  const double* rstds = double_data("rstd", rstd, channels);
  Tensor dweight = new_parameter_gradient(x, weight_dtype);
  Tensor dbias = new_parameter_gradient(x, bias_dtype);
  std::vector<double> coefficients(static_cast<std::size_t>(3 * channels));
  TorchExecutor executor;
  const MutableTensorView out_weight = wanted("dweight", dweight, weight_dtype);
  const MutableTensorView out_bias = wanted("dbias", dbias, bias_dtype);
  if (own.has_value()) {
    const DType dtype = dtype_of("x", x);
    syncbn::affine_gradient_shares(
        int64_data("own", *own, message_words(dtype, channels)) + kHeaderWords, dtype, means, rstds,
        out_weight, out_bias, channels, executor);
  }
  finalize_gradients(words.info, words.words(), means, rstds, view("weight", weight),
                     coefficients.data(), own.has_value() ? MutableTensorView() : out_weight,
                     own.has_value() ? MutableTensorView() : out_bias, channels, count, executor);
  Tensor dx = new_output(x);
  syncbn::input_gradient(view("dy", dy), view("x", x), mask_view(mask), means, rstds,
                         coefficients.data(),
                         through(x, weight, bias, activation_mask, activation, negative_slope),
                         mutable_view("dx", dx), executor);
  return {dx, dweight, dbias};
}

std::string cpu_instruction_set() { return syncbn::cpu_instruction_set(); }

/// What ranks must have in common of a layer besides eps. kind, statistics: of the core's enums.
std::int64_t layer_identity(std::int64_t layer, std::int64_t kind, double negative_slope,
                            std::int64_t statistics, bool residual) {
  return static_cast<std::int64_t>(
      syncbn::layer_identity(static_cast<std::uint64_t>(layer), activation_of(kind, negative_slope),
                             static_cast<syncbn::Statistics>(statistics), residual));
}

bool force_cpu_instruction_set(std::string name) {
  return syncbn::force_cpu_instruction_set(name.c_str());
}

/// On every device.
void register_written(torch::stable::detail::StableLibrary& m) {
  m.impl("normalize_in_place", TORCH_BOX(&OnlyResolved<&normalize_in_place>::call));
  m.impl("update_running_statistics", TORCH_BOX(&OnlyResolved<&update_running_statistics>::call));
  m.impl("normalize_and_update", TORCH_BOX(&OnlyResolved<&normalize_and_update>::call));
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY(syncbn, m) {
  m.def(
      "local_moments(Tensor x, int layer, Tensor? call, float eps, int frame, Tensor? mask=None, "
      "int backward=0) "
      "-> Tensor");
  m.def("rejection(Tensor like, int frame) -> Tensor");
  m.def("header(Tensor merged, int ranks) -> Tensor");
  m.def(
      "remaining_words(Tensor message, Tensor merged, int ranks, int channels, int size) -> "
      "Tensor");
  m.def(
      "normalize(Tensor x, Tensor message, Tensor merged, Tensor? rest, Tensor? weight, "
      "Tensor? bias, Tensor? residual, float eps, int ranks, int activation, "
      "float negative_slope, Tensor? mask=None) -> "
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
      "float? momentum) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "local_gradients(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor info, "
      "Tensor? weight, Tensor? bias, Tensor? activation_mask, int activation, "
      "float negative_slope, bool keep, int frame, Tensor? mask=None) -> (Tensor, Tensor)");
  m.def(
      "affine_gradient_shares(Tensor message, Tensor x, Tensor mean, Tensor rstd, "
      "ScalarType? weight_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor)");
  m.def(
      "input_gradient(Tensor dy, Tensor x, Tensor merged, Tensor? rest, Tensor mean, Tensor rstd, "
      "Tensor info, Tensor? weight, Tensor? bias, Tensor? activation_mask, int activation, "
      "float negative_slope, ScalarType? weight_dtype, ScalarType? bias_dtype, int ranks, "
      "Tensor? mask=None, Tensor? own=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "layer_identity(int layer, int activation, float negative_slope, int statistics, "
      "bool residual) -> int");
  m.def("cpu_instruction_set() -> str");
  m.def("force_cpu_instruction_set(str name) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn::torch_layer;
  m.impl("local_moments", TORCH_BOX(&local_moments));
  m.impl("rejection", TORCH_BOX(&rejection));
  m.impl("header", TORCH_BOX(&header));
  m.impl("remaining_words", TORCH_BOX(&remaining_words));
  m.impl("normalize", TORCH_BOX(&normalize));
  m.impl("normalize_in_place", TORCH_BOX(&normalize_in_place));
  m.impl("recover_input", TORCH_BOX(&recover_input));
  m.impl("update_running_statistics", TORCH_BOX(&update_running_statistics));
  m.impl("normalize_and_update", TORCH_BOX(&normalize_and_update));
  m.impl("local_gradients", TORCH_BOX(&local_gradients));
  m.impl("affine_gradient_shares", TORCH_BOX(&affine_gradient_shares));
  m.impl("input_gradient", TORCH_BOX(&input_gradient));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CompositeExplicitAutograd, m) {
  using namespace syncbn::torch_layer;
  m.impl("layer_identity", TORCH_BOX(&layer_identity));
  m.impl("cpu_instruction_set", TORCH_BOX(&cpu_instruction_set));
  m.impl("force_cpu_instruction_set", TORCH_BOX(&force_cpu_instruction_set));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Negative, m) {
  using namespace syncbn::torch_layer;
  register_written(m);
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Conjugate, m) {
  using namespace syncbn::torch_layer;
  register_written(m);
}
