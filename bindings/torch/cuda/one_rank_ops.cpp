// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "bindings/torch/cuda/device_tensors.hpp"
#include "bindings/torch/cuda/on_device.hpp"
#include "bindings/torch/layer.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/cuda_passes.hpp"

// Whole directions of a step of one rank, on CUDA alone: there is no exchange between their passes.
namespace syncbn::torch_layer {
namespace {

Normalized forward_of_one_rank(const Tensor& x, std::int64_t layer, std::optional<Tensor> call,
                               double eps, std::optional<Tensor> weight, std::optional<Tensor> bias,
                               std::optional<Tensor> residual, std::int64_t activation,
                               double negative_slope, std::optional<Tensor> mask,
                               std::optional<Tensor> running_mean,
                               std::optional<Tensor> running_var,
                               std::optional<Tensor> num_batches_tracked,
                               std::optional<Tensor> last_count, std::optional<double> momentum) {
  const OnDevice device(x, call, weight, bias, residual, mask, running_mean, running_var,
                        num_batches_tracked, last_count);
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  cuda::RunningStatistics running =
      running_statistics(running_mean, running_var, num_batches_tracked, call);
  running.count = counter("last_count", last_count);
  const Activation applied = activation_of(activation, negative_slope);
  Outputs out(Room(), x, residual, applied);  // before anything is updated: there may be no memory
  Tensor message = empty(x, message_words(samples.dtype, channels), ScalarType::Long);
  const Workspace workspace(x, samples.dtype, device.stream());
  cuda::forward_of_one_rank({.x = samples,
                             .mask = mask_view(mask),
                             .weight = view("weight", weight),
                             .bias = view("bias", bias),
                             .residual = view("residual", residual),
                             .y = mutable_view("y", out.y),
                             .activation_mask = byte_data(out.activation_mask),
                             .mean = double_data(out.mean),
                             .var = double_data(out.var),
                             .rstd = double_data(out.rstd),
                             .activation = applied},
                            {static_cast<std::uint64_t>(layer), running.call, eps},
                            cuda_int64("info", out.info, 0), running, momentum,
                            cuda_int64("message", message, 0), workspace.words(), device.stream());
  return {out.y, out.mean, out.var, out.rstd, out.info, out.activation_mask};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_of_one_rank(
    const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& info,
    std::optional<Tensor> weight, std::optional<Tensor> bias, std::optional<Tensor> activation_mask,
    std::int64_t activation, double negative_slope, bool keep,
    std::optional<ScalarType> weight_dtype, std::optional<ScalarType> bias_dtype,
    std::optional<Tensor> mask) {
  const OnDevice device(x, dy, mean, rstd, info, weight, bias, activation_mask, mask);
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  Tensor message = empty(x, message_words(samples.dtype, channels), ScalarType::Long);
  const Workspace workspace(x, samples.dtype, device.stream());
  Tensor coefficients = empty(x, 3 * channels, ScalarType::Double);
  Tensor u = keep ? new_output(x) : empty(x, 0, x.scalar_type());
  Tensor dweight = new_parameter_gradient(x, weight_dtype);
  Tensor dbias = new_parameter_gradient(x, bias_dtype);
  Tensor dx = new_output(x);
  cuda::backward_of_one_rank(
      {.dy = view("dy", dy),
       .x = samples,
       .mask = mask_view(mask),
       .mean = cuda_double("mean", mean, channels),
       .rstd = cuda_double("rstd", rstd, channels),
       .through = through(x, weight, bias, activation_mask, activation, negative_slope),
       .weight = view("weight", weight),
       .u = keep ? mutable_view("u", u) : MutableTensorView(),
       .dx = mutable_view("dx", dx),
       .dweight = wanted("dweight", dweight, weight_dtype),
       .dbias = wanted("dbias", dbias, bias_dtype)},
      cuda_int64("info", info, cuda::kInfoWords), double_data(coefficients),
      cuda_int64("message", message, 0), workspace.words(), device.stream());
  return {dx, dweight, dbias, u};
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def(
      "forward_of_one_rank(Tensor x, int layer, Tensor(a!)? call, float eps, Tensor? weight, "
      "Tensor? bias, Tensor? residual, int activation, float negative_slope, Tensor? mask, "
      "Tensor(b!)? running_mean, Tensor(c!)? running_var, Tensor(d!)? num_batches_tracked, "
      "Tensor(e!)? last_count, float? momentum) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "backward_of_one_rank(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor info, "
      "Tensor? weight, Tensor? bias, Tensor? activation_mask, int activation, "
      "float negative_slope, bool keep, ScalarType? weight_dtype, ScalarType? bias_dtype, "
      "Tensor? mask) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  using namespace syncbn::torch_layer;
  m.impl("forward_of_one_rank", TORCH_BOX(&forward_of_one_rank));
  m.impl("backward_of_one_rank", TORCH_BOX(&backward_of_one_rank));
}
