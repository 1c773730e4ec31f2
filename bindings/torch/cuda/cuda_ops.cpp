// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/torch/cuda/device_tensors.hpp"
#include "bindings/torch/cuda/on_device.hpp"
#include "bindings/torch/layer.hpp"
#include "bindings/torch/new_output.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/welford.hpp"

// The operators on CUDA: the core's passes on PyTorch's current stream, with memory of PyTorch's
// allocator. The host reads nothing, so `header` and `remaining_words` do not exist here: messages
// have no frame, and merged ones lie in one piece of exactly the group's length.
namespace syncbn::torch_layer {
namespace {

void check_frame(std::int64_t frame) {
  if (frame != 0) {
    throw InvalidArgument("frame: got " + std::to_string(frame) + " words, expected 0 on CUDA");
  }
}

void check_rest(const std::optional<Tensor>& rest) {
  if (rest.has_value()) {
    throw InvalidArgument("rest: got " + std::to_string(rest->numel()) +
                          " words, expected none on CUDA");
  }
}

/// The dtype of the group's messages, each of `length` words by `words` (a function of dtype and
/// channels), which their length tells. It is x's, unless this rank has no samples and autocast
/// gave it another one than the others.
template <class Words>
DType dtype_of_messages(const char* name, std::int64_t length, const Tensor& x,
                        const Words& words) {
  const std::int64_t channels = channels_of(x);
  if (const DType dtype = dtype_of("x", x); length == words(dtype, channels)) {
    return dtype;
  }
  for (int number = 0; number < kDtypeCount; ++number) {
    if (const auto dtype = static_cast<DType>(number); length == words(dtype, channels)) {
      return dtype;
    }
  }
  throw InvalidArgument(std::string(name) + ": got " + std::to_string(length) +
                        " words, expected a whole message of " + std::to_string(channels) +
                        " channels");
}

std::int64_t welford_message_words(DType dtype, std::int64_t channels) {
  return kHeaderWords + welford_words(dtype, channels);
}

Tensor local_moments(const Tensor& x, std::int64_t layer, std::optional<Tensor> call, double eps,
                     std::int64_t frame, std::optional<Tensor> mask, std::int64_t backward) {
  const OnDevice device(x, call, mask);
  check_frame(frame);
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  Tensor message = empty(x, message_words(samples.dtype, channels), ScalarType::Long);
  const Workspace workspace(x, samples.dtype, device.stream());
  const cuda::ForwardCall forward{static_cast<std::uint64_t>(layer),
                                  call.has_value() ? cuda_int64("call", *call, 1) : nullptr, eps,
                                  backward};
  cuda::local_moments(samples, mask_view(mask), forward, cuda_int64("message", message, 0),
                      workspace.words(), device.stream());
  return message;
}

Tensor local_welford(const Tensor& x, std::int64_t layer, std::optional<Tensor> call, double eps,
                     std::optional<Tensor> mask, std::int64_t backward) {
  const OnDevice device(x, call, mask);
  const TensorView samples = view("x", x);
  Tensor message = empty(x, welford_message_words(samples.dtype, channels_of(x)), ScalarType::Long);
  const cuda::ForwardCall forward{static_cast<std::uint64_t>(layer),
                                  call.has_value() ? cuda_int64("call", *call, 1) : nullptr, eps,
                                  backward};
  cuda::local_welford(samples, mask_view(mask), forward, cuda_int64("message", message, 0),
                      device.stream());
  return message;
}

/// From the messages' sum.
void finalize(DeviceStatistics& s, const Tensor& x, const Tensor& merged,
              const std::optional<Tensor>& rest, double eps, std::int64_t ranks,
              const OnDevice& device, const cuda::RunningStatistics& running = {},
              std::optional<double> momentum = {}) {
  check_rest(rest);
  const DType dtype = dtype_of_messages("merged", merged.numel(), x, message_words);
  cuda::finalize_moments(cuda_int64("merged", merged, kHeaderWords), dtype, static_cast<int>(ranks),
                         double_data(s.mean), double_data(s.var), double_data(s.rstd),
                         cuda_int64("info", s.info, 0), channels_of(x), eps, running, momentum,
                         device.stream());
}

Normalized normalized(Outputs& out, const Tensor& x, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                      const Activation& activation, const std::optional<Tensor>& mask,
                      const OnDevice& device) {
  cuda::normalize({view("x", x), mask_view(mask), double_data(out.mean), double_data(out.rstd),
                   view("weight", weight), view("bias", bias), view("residual", residual),
                   mutable_view("y", out.y), byte_data(out.activation_mask), activation},
                  device.stream());
  return {out.y, out.mean, out.var, out.rstd, out.info, out.activation_mask};
}

Normalized normalize_and_update(const Tensor& x, const Tensor& message, const Tensor& merged,
                                std::optional<Tensor> rest, std::optional<Tensor> weight,
                                std::optional<Tensor> bias, std::optional<Tensor> residual,
                                double eps, std::int64_t ranks, std::int64_t activation,
                                double negative_slope, std::optional<Tensor> mask,
                                std::optional<Tensor> running_mean,
                                std::optional<Tensor> running_var,
                                std::optional<Tensor> num_batches_tracked,
                                std::optional<Tensor> call, std::optional<Tensor> last_count,
                                std::optional<double> momentum, Room room) {
  const OnDevice device(x, message, merged, weight, bias, residual, mask, running_mean, running_var,
                        num_batches_tracked, call, last_count);
  cuda::RunningStatistics running =
      running_statistics(running_mean, running_var, num_batches_tracked, call);
  running.count = counter("last_count", last_count);
  const Activation applied = activation_of(activation, negative_slope);
  Outputs out(room, x, residual, applied);  // before anything is updated: there may be no memory
  finalize(out, x, merged, rest, eps, ranks, device, running, momentum);
  return normalized(out, x, weight, bias, residual, applied, mask, device);
}

Normalized normalize(const Tensor& x, const Tensor& message, const Tensor& merged,
                     std::optional<Tensor> rest, std::optional<Tensor> weight,
                     std::optional<Tensor> bias, std::optional<Tensor> residual, double eps,
                     std::int64_t ranks, std::int64_t activation, double negative_slope,
                     std::optional<Tensor> mask, Room room) {
  return normalize_and_update(x, message, merged, rest, weight, bias, residual, eps, ranks,
                              activation, negative_slope, mask, {}, {}, {}, {}, {}, {},
                              std::move(room));
}

/// records: here whole messages, because the device looks at their headers; `merged` is not read.
Normalized normalize_gathered(const Tensor& x, const Tensor& message, const Tensor& merged,
                              const Tensor& records, std::optional<Tensor> weight,
                              std::optional<Tensor> bias, std::optional<Tensor> residual,
                              double eps, std::int64_t ranks, std::int64_t activation,
                              double negative_slope, std::optional<Tensor> mask, Room room) {
  const OnDevice device(x, message, merged, records, weight, bias, residual, mask);
  if (ranks < 1 || records.numel() % ranks != 0) {
    throw InvalidArgument("records: got " + std::to_string(records.numel()) +
                          " words, expected a message of each of " + std::to_string(ranks) +
                          " ranks");
  }
  const DType dtype =
      dtype_of_messages("records", records.numel() / ranks, x, welford_message_words);
  const Activation applied = activation_of(activation, negative_slope);
  Outputs out(room, x, residual, applied);
  cuda::merge_welford(cuda_int64("records", records, 0), dtype, static_cast<int>(ranks),
                      double_data(out.mean), double_data(out.var), double_data(out.rstd),
                      cuda_int64("info", out.info, 0), channels_of(x), eps, device.stream());
  return normalized(out, x, weight, bias, residual, applied, mask, device);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> normalize_in_place(
    Tensor x, const Tensor& message, const Tensor& merged, std::optional<Tensor> rest,
    std::optional<Tensor> weight, std::optional<Tensor> bias, double eps, std::int64_t ranks,
    double negative_slope) {
  const OnDevice device(x, message, merged, weight, bias);
  DeviceStatistics s(x);
  finalize(s, x, merged, rest, eps, ranks, device);
  cuda::normalize({view("x", x),
                   {},
                   double_data(s.mean),
                   double_data(s.rstd),
                   view("weight", weight),
                   view("bias", bias),
                   {},
                   mutable_view("x", x),
                   nullptr,
                   {ActivationKind::kLeakyRelu, negative_slope}},
                  device.stream());
  return {s.mean, s.var, s.rstd, s.info};
}

std::tuple<Tensor, Tensor> recover_input(const Tensor& y, const Tensor& mean, const Tensor& rstd,
                                         std::optional<Tensor> weight, std::optional<Tensor> bias,
                                         double negative_slope) {
  const OnDevice device(y, mean, rstd, weight, bias);
  const std::int64_t channels = channels_of(y);
  Tensor x = new_output(y);
  Tensor activation_mask = new_zero_mask(y, true);
  cuda::recover_input(
      {view("y", y), cuda_double("mean", mean, channels), cuda_double("rstd", rstd, channels),
       view("weight", weight), view("bias", bias), mutable_view("x", x), byte_data(activation_mask),
       negative_slope},
      device.stream());
  return {x, activation_mask};
}

void update_running_statistics(std::optional<Tensor> running_mean,
                               std::optional<Tensor> running_var,
                               std::optional<Tensor> num_batches_tracked,
                               std::optional<Tensor> call, const Tensor& mean, const Tensor& var,
                               const Tensor& info, std::optional<double> momentum) {
  const OnDevice device(mean, var, info, running_mean, running_var, num_batches_tracked, call);
  const std::int64_t channels = mean.numel();
  cuda::update_running_statistics(
      running_statistics(running_mean, running_var, num_batches_tracked, call),
      cuda_double("mean", mean, channels), cuda_double("var", var, channels),
      cuda_int64("info", info, cuda::kInfoWords), channels, momentum, device.stream());
}

std::tuple<Tensor, Tensor> local_gradients(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                           const Tensor& rstd, const Tensor& info,
                                           std::optional<Tensor> weight, std::optional<Tensor> bias,
                                           std::optional<Tensor> activation_mask,
                                           std::int64_t activation, double negative_slope,
                                           bool keep, std::int64_t frame,
                                           std::optional<Tensor> mask, bool twice) {
  const OnDevice device(x, dy, mean, rstd, info, weight, bias, activation_mask, mask);
  check_frame(frame);
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  const std::int64_t words = message_words(samples.dtype, channels);
  Tensor message = empty(x, twice ? 2 * words : words, ScalarType::Long);
  std::int64_t* const to = cuda_int64("message", message, 0);
  const Workspace workspace(x, samples.dtype, device.stream());
  Tensor u = keep ? new_output(x) : empty(x, 0, x.scalar_type());
  cuda::local_gradients({view("dy", dy), samples, mask_view(mask),
                         cuda_double("mean", mean, channels), cuda_double("rstd", rstd, channels),
                         through(x, weight, bias, activation_mask, activation, negative_slope),
                         keep ? mutable_view("u", u) : MutableTensorView()},
                        cuda_int64("info", info, cuda::kInfoWords), to, workspace.words(),
                        device.stream(), twice ? to + words : nullptr);
  return {message, u};
}

std::tuple<Tensor, Tensor> affine_gradient_shares(const Tensor& message, const Tensor& x,
                                                  const Tensor& mean, const Tensor& rstd,
                                                  std::optional<ScalarType> weight_dtype,
                                                  std::optional<ScalarType> bias_dtype) {
  const OnDevice device(x, message, mean, rstd);
  const std::int64_t channels = channels_of(x);
  const DType dtype = dtype_of("x", x);
  Tensor dweight = new_parameter_gradient(x, weight_dtype);
  Tensor dbias = new_parameter_gradient(x, bias_dtype);
  Tensor unused = empty(x, 3 * channels, ScalarType::Double);
  // A rank's own message, as if it were alone.
  cuda::finalize_gradients(
      cuda_int64("message", message, message_words(dtype, channels)), dtype, 1, nullptr, nullptr,
      {cuda_double("mean", mean, channels), cuda_double("rstd", rstd, channels), TensorView(),
       double_data(unused), wanted("dweight", dweight, weight_dtype),
       wanted("dbias", dbias, bias_dtype), channels},
      device.stream());
  return {dweight, dbias};
}

std::vector<Tensor> forward_outputs(const Tensor& x, bool activation_mask) {
  const OnDevice device(x);
  const Outputs out(x, activation_mask);
  return {out.y, out.mean, out.var, out.rstd, out.info, out.activation_mask};
}

std::vector<Tensor> backward_outputs(const Tensor& x, std::optional<ScalarType> weight_dtype,
                                     std::optional<ScalarType> bias_dtype) {
  const OnDevice device(x);
  return {new_output(x), new_parameter_gradient(x, weight_dtype),
          new_parameter_gradient(x, bias_dtype), empty(x, 3 * channels_of(x), ScalarType::Double)};
}

std::tuple<Tensor, Tensor, Tensor> input_gradient(
    const Tensor& dy, const Tensor& x, const Tensor& merged, std::optional<Tensor> rest,
    const Tensor& mean, const Tensor& rstd, const Tensor& info, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> activation_mask, std::int64_t activation,
    double negative_slope, std::optional<ScalarType> weight_dtype,
    std::optional<ScalarType> bias_dtype, std::int64_t ranks, std::optional<Tensor> mask,
    std::optional<Tensor> own, Room room) {
  const OnDevice device(x, dy, merged, mean, rstd, info, weight, bias, activation_mask, mask, own);
  check_rest(rest);
  const std::int64_t channels = channels_of(x);
  const DType dtype = dtype_of_messages("merged", merged.numel(), x, message_words);
  const double* means = cuda_double("mean", mean, channels);
  const double* rstds = cuda_double("rstd", rstd, channels);
  std::vector<Tensor> out =
      room.has_value() ? *std::move(room) : backward_outputs(x, weight_dtype, bias_dtype);
  Tensor &dx = out[0], &dweight = out[1], &dbias = out[2], &coefficients = out[3];
  if (own.has_value() && own->numel() != merged.numel()) {
    // No samples, in another dtype than the group: zeros in any format.
    own = torch::stable::new_zeros(*own, std::array<std::int64_t, 1>{merged.numel()});
  }
  cuda::finalize_gradients(
      cuda_int64("merged", merged, kHeaderWords), dtype, static_cast<int>(ranks),
      own.has_value() ? cuda_int64("own", *own, merged.numel()) : nullptr,
      cuda_int64("info", info, cuda::kInfoWords),
      {means, rstds, view("weight", weight), double_data(coefficients),
       wanted("dweight", dweight, weight_dtype), wanted("dbias", dbias, bias_dtype), channels},
      device.stream());
  cuda::input_gradient(
      {view("dy", dy), view("x", x), mask_view(mask), means, rstds, double_data(coefficients),
       through(x, weight, bias, activation_mask, activation, negative_slope),
       mutable_view("dx", dx)},
      device.stream());
  return {dx, dweight, dbias};
}

/// y, and mean and rstd that normalized, from given statistics.
std::tuple<Tensor, Tensor, Tensor> evaluate(const Tensor& x, const Tensor& mean, const Tensor& var,
                                            std::optional<Tensor> weight,
                                            std::optional<Tensor> bias, double eps) {
  const OnDevice device(x, mean, var, weight, bias);
  const std::int64_t channels = channels_of(x);
  Tensor means = empty(x, channels, ScalarType::Double);
  Tensor rstds = empty(x, channels, ScalarType::Double);
  if (mean.numel() != channels) {
    throw InvalidArgument("mean: got " + std::to_string(mean.numel()) +
                          " entries, expected one per channel, " + std::to_string(channels));
  }
  cuda::evaluation_statistics(view("mean", mean), view("var", var), double_data(means),
                              double_data(rstds), eps, device.stream());
  Tensor y = new_output(x);
  cuda::normalize({view("x", x),
                   {},
                   double_data(means),
                   double_data(rstds),
                   view("weight", weight),
                   view("bias", bias),
                   {},
                   mutable_view("y", y)},
                  device.stream());
  return {y, means, rstds};
}

Tensor evaluation_input_gradient(const Tensor& dy, const Tensor& rstd,
                                 std::optional<Tensor> weight) {
  const OnDevice device(dy, rstd, weight);
  Tensor dx = new_output(dy);
  cuda::evaluation_input_gradient(view("dy", dy), {}, cuda_double("rstd", rstd, channels_of(dy)),
                                  view("weight", weight), mutable_view("dx", dx), device.stream());
  return dx;
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  using namespace syncbn::torch_layer;
  m.impl("local_moments", TORCH_BOX(&local_moments));
  m.impl("normalize", TORCH_BOX(&normalize));
  m.impl("normalize_in_place", TORCH_BOX(&normalize_in_place));
  m.impl("recover_input", TORCH_BOX(&recover_input));
  m.impl("local_welford", TORCH_BOX(&local_welford));
  m.impl("normalize_gathered", TORCH_BOX(&normalize_gathered));
  m.impl("update_running_statistics", TORCH_BOX(&update_running_statistics));
  m.impl("normalize_and_update", TORCH_BOX(&normalize_and_update));
  m.impl("local_gradients", TORCH_BOX(&local_gradients));
  m.impl("affine_gradient_shares", TORCH_BOX(&affine_gradient_shares));
  m.impl("input_gradient", TORCH_BOX(&input_gradient));
  m.impl("forward_outputs", TORCH_BOX(&forward_outputs));
  m.impl("backward_outputs", TORCH_BOX(&backward_outputs));
  m.impl("evaluate", TORCH_BOX(&evaluate));
  m.impl("evaluation_input_gradient", TORCH_BOX(&evaluation_input_gradient));
}
