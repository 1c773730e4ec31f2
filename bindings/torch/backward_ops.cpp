// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/torch/cpu_ops.hpp"
#include "bindings/torch/layer.hpp"
#include "bindings/torch/new_output.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/passes.hpp"

// The operators of the backward direction on CPU. Shapes and dtypes stand beside their fakes in
// python/syncbn/operators.py.
namespace syncbn::torch_layer {
namespace {

std::tuple<Tensor, Tensor> local_gradients(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                           const Tensor& rstd, const Tensor& info,
                                           std::optional<Tensor> weight, std::optional<Tensor> bias,
                                           std::optional<Tensor> activation_mask,
                                           std::int64_t activation, double negative_slope,
                                           bool keep, std::int64_t frame,
                                           std::optional<Tensor> mask, bool /*twice*/) {
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  const auto tag = static_cast<std::uint32_t>(int64_data("info", info, 2)[1]);
  TorchExecutor executor;
  Tensor message = new_message(x, samples.dtype, channels, frame);
  Tensor u = keep ? new_output(x) : empty(x, 0, x.scalar_type());
  syncbn::local_gradients({view("dy", dy), samples, mask_view(mask),
                           double_data("mean", mean, channels), double_data("rstd", rstd, channels),
                           through(x, weight, bias, activation_mask, activation, negative_slope),
                           keep ? mutable_view("u", u) : MutableTensorView()},
                          int64_data("message", message, kHeaderWords), backward_fingerprint(tag),
                          executor);
  return {message, u};
}

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
  syncbn::affine_gradient_shares(words, dtype,
                                 {.mean = double_data("mean", mean, channels),
                                  .rstd = double_data("rstd", rstd, channels),
                                  .dweight = wanted("dweight", dweight, weight_dtype),
                                  .dbias = wanted("dbias", dbias, bias_dtype),
                                  .channels = channels},
                                 executor);
  return {dweight, dbias};
}

/// What input_gradient writes to, as its `room`: dx, dweight, dbias, and three numbers per channel.
std::vector<Tensor> backward_outputs(const Tensor& x, std::optional<ScalarType> weight_dtype,
                                     std::optional<ScalarType> bias_dtype) {
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
  const std::int64_t channels = channels_of(x);
  std::vector<Tensor> out =
      room.has_value() ? *std::move(room) : backward_outputs(x, weight_dtype, bias_dtype);
  check_room(out, 4);
  Tensor &dx = out[0], &dweight = out[1], &dbias = out[2];
  (void)double_data("room", out[3], 3 * channels);
  double* const coefficients = double_data(out[3]);
  const Merged words(merged, rest, ranks, channels);
  const std::int64_t count = int64_data("info", info, 2)[0];
  if (words.info.count != count) {
    throw DivergenceError("backward: the ranks bring " + std::to_string(words.info.count) +
                          " elements per channel, forward had " + std::to_string(count));
  }
  const double* means = double_data("mean", mean, channels);
  const double* rstds = double_data("rstd", rstd, channels);
  TorchExecutor executor;
  const MutableTensorView out_weight = wanted("dweight", dweight, weight_dtype);
  const MutableTensorView out_bias = wanted("dbias", dbias, bias_dtype);
  if (own.has_value()) {
    const DType dtype = dtype_of("x", x);
    syncbn::affine_gradient_shares(
        int64_data("own", *own, message_words(dtype, channels)) + kHeaderWords, dtype,
        {.mean = means,
         .rstd = rstds,
         .dweight = out_weight,
         .dbias = out_bias,
         .channels = channels},
        executor);
  }
  finalize_gradients(words.info, words.words(),
                     {means, rstds, view("weight", weight), coefficients,
                      own.has_value() ? MutableTensorView() : out_weight,
                      own.has_value() ? MutableTensorView() : out_bias, channels},
                     count, executor);
  syncbn::input_gradient({view("dy", dy), view("x", x), mask_view(mask), means, rstds, coefficients,
                          through(x, weight, bias, activation_mask, activation, negative_slope),
                          mutable_view("dx", dx)},
                         executor);
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def(
      "local_gradients(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor info, "
      "Tensor? weight, Tensor? bias, Tensor? activation_mask, int activation, "
      "float negative_slope, bool keep, int frame, Tensor? mask=None, bool twice=False) -> "
      "(Tensor, Tensor)");
  m.def(
      "affine_gradient_shares(Tensor message, Tensor x, Tensor mean, Tensor rstd, "
      "ScalarType? weight_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor)");
  m.def(
      "input_gradient(Tensor dy, Tensor x, Tensor merged, Tensor? rest, Tensor mean, Tensor rstd, "
      "Tensor info, Tensor? weight, Tensor? bias, Tensor? activation_mask, int activation, "
      "float negative_slope, ScalarType? weight_dtype, ScalarType? bias_dtype, int ranks, "
      "Tensor? mask=None, Tensor? own=None, Tensor[]? room=None) -> (Tensor, Tensor, Tensor)");
  m.def("backward_outputs(Tensor x, ScalarType? weight_dtype, ScalarType? bias_dtype) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn::torch_layer;
  m.impl("local_gradients", TORCH_BOX(&local_gradients));
  m.impl("affine_gradient_shares", TORCH_BOX(&affine_gradient_shares));
  m.impl("input_gradient", TORCH_BOX(&input_gradient));
  m.impl("backward_outputs", TORCH_BOX(&backward_outputs));
}
