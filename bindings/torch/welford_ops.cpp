// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "bindings/torch/layer.hpp"
#include "syncbn/welford.hpp"

// The operators of the welford mode's forward direction. Shapes and dtypes stand beside their fakes
// in python/syncbn/operators.py.
namespace syncbn::torch_layer {
namespace {

Tensor local_welford(const Tensor& x, std::int64_t layer, std::optional<Tensor> call, double eps,
                     std::optional<Tensor> mask, std::int64_t backward) {
  const TensorView samples = view("x", x);
  const std::int64_t channels = channels_of(x);
  const std::uint32_t tag = forward_fingerprint(layer, call, channels, eps);
  const std::int64_t words = kHeaderWords + welford_words(samples.dtype, channels);
  Tensor message = empty(x, words, ScalarType::Long);
  TorchExecutor executor;
  syncbn::local_welford(samples, mask_view(mask), int64_data("message", message, words), tag,
                        executor);
  int64_data("message", message, kHeaderWords)[kHeaderBackward] = backward;
  return message;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> normalize_gathered(
    const Tensor& x, const Tensor& message, const Tensor& merged, const Tensor& records,
    std::optional<Tensor> weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
    double eps, std::int64_t ranks, std::int64_t activation, double negative_slope,
    std::optional<Tensor> mask, Room room) {
  const Activation applied = activation_of(activation, negative_slope);
  ForwardOutputs out = outputs_of(room, x, residual, applied);
  const std::int64_t channels = channels_of(x);
  const MessageInfo info = read_header(int64_data("merged", merged, kHeaderWords), ranks_of(ranks));
  check_header(info);
  const DType dtype = info.any_data ? info.dtype : dtype_of("x", x);
  const std::int64_t stride = welford_words(dtype, channels);
  out.set_info(info, message);
  merge_welford(info, int64_data("records", records, ranks * stride), double_data(out.mean),
                double_data(out.var), double_data(out.rstd), channels, ranks_of(ranks), stride,
                eps);
  return normalized(x, out, weight, bias, residual, applied, mask);
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def(
      "local_welford(Tensor x, int layer, Tensor? call, float eps, Tensor? mask=None, "
      "int backward=0) -> Tensor");
  m.def(
      "normalize_gathered(Tensor x, Tensor message, Tensor merged, Tensor records, "
      "Tensor? weight, Tensor? bias, Tensor? residual, float eps, int ranks, int activation, "
      "float negative_slope, Tensor? mask=None, Tensor[]? room=None) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn::torch_layer;
  m.impl("local_welford", TORCH_BOX(&local_welford));
  m.impl("normalize_gathered", TORCH_BOX(&normalize_gathered));
}
