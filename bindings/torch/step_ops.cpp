#include <torch/csrc/stable/library.h>

#include <new>
#include <tuple>
#include <vector>

#include "bindings/torch/cpu_ops.hpp"
#include "bindings/torch/layer.hpp"
#include "bindings/torch/resolved.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/passes.hpp"

// A whole direction of a training step in one operator, for python/syncbn/step/in_one.py: checks,
// sums, the exchange between processes of a node, and what follows. An argument that is refused has
// changed nothing, and nobody has waited for this rank.
namespace syncbn::torch_layer {
namespace {

/// In the place of a group's number: one rank, with nobody to exchange with.
constexpr std::int64_t kAlone = -1;

/// This rank's message, and the sum of all ranks' messages.
struct Exchange {
  std::optional<Tensor> message, merged;
  std::int64_t status = kDone;
  MessageInfo info;  ///< of the sum, once it is done

  /// Sums what `sums` writes to a message.
  template <class Sums>
  void run(const Tensor& x, std::int64_t handle, std::int64_t slice, const Sums& sums) {
    Tensor own = new_message(x, dtype_of("x", x), channels_of(x), 0);
    sums(int64_data("message", own, kHeaderWords));
    auto [sum, ended] = sum_message(own, handle, slice);
    status = ended;
    if (status == kDone) {
      info = read_header(words(sum), ranks_of_group(handle));
    }
    message = own;
    merged = sum;
  }

  /// Leaves the rest to the general way, which has the words for what is wrong.
  void refuse_if(bool wrong) {
    if (status == kDone && wrong) {
      status = kUnchecked;
    }
  }

  static const std::int64_t* words(const Tensor& message) {
    return int64_data("message", message, kHeaderWords);
  }

  /// What follows the exchange. Where memory is lacking the general way goes on from here: to begin
  /// again would exchange again.
  template <class Body>
  void finish(const Body& body) {
    if (status != kDone) {
      return;
    }
    try {
      body();
      message.reset();
      merged.reset();
    } catch (const std::bad_alloc&) {
      status = kUnchecked;
    }
  }
};

int ranks_of_handle(std::int64_t handle) { return handle == kAlone ? 1 : ranks_of_group(handle); }

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
  const BatchNormOptions options{.eps = eps,
                                 .momentum = momentum,
                                 .layer = static_cast<std::uint64_t>(layer),
                                 .activation = activation_of(activation, negative_slope)};
  const MaskView counted = mask_view(mask);
  const TensorView scale = view("weight", weight);
  const TensorView shift = view("bias", bias);
  const TensorView added = view("residual", residual);
  Updates updates(running_mean, running_var, num_batches_tracked, call, momentum);
  const std::int64_t number = call.has_value() ? *int64_data("call", *call, 1) : 0;
  std::int64_t* count = last_count.has_value() ? int64_data("last_count", *last_count, 1) : nullptr;
  Tensor y = new_output(x);
  const MutableTensorView out = mutable_view("y", y);
  check_forward(samples, counted, scale, shift, added, out, updates.running_mean,
                updates.running_var, updates.num_batches_tracked, options, ranks_of_handle(handle));
  std::optional<Tensor> activation_mask;
  if (residual.has_value() && options.activation.kind != ActivationKind::kNone) {
    activation_mask = new_activation_mask(x, true);
  }
  Tensor statistics = empty(x, 2 * channels, ScalarType::Double);
  double* mean = double_data(statistics);
  double* rstd = mean + channels;
  std::vector<double> var(static_cast<std::size_t>(channels));

  TorchExecutor executor;
  const std::uint32_t tag = fingerprint(options.layer, static_cast<std::uint64_t>(number),
                                        Direction::kForward, channels, eps);
  std::uint8_t* bits = activation_mask.has_value() ? byte_data(*activation_mask) : nullptr;
  Exchange exchange;
  std::int64_t word = 0;
  if (handle == kAlone) {
    exchange.info = forward_of_one_rank(samples, counted, scale, shift, added, out, bits, mean,
                                        var.data(), rstd, eps, options.activation, executor);
    exchange.refuse_if(exchange.info.count == 1);
  } else {
    exchange.run(x, handle, slice, [&](std::int64_t* message) {
      syncbn::local_moments(samples, counted, message, tag, executor);
      message[kHeaderBackward] = backward;
    });
    exchange.refuse_if(exchange.info.count == 1);
  }
  exchange.finish([&] {
    if (handle != kAlone) {
      const std::int64_t* words = Exchange::words(*exchange.merged);
      word = words[kHeaderBackward];
      finalize_moments(exchange.info, words + kHeaderWords, mean, var.data(), rstd, channels, eps,
                       executor);
      syncbn::normalize(samples, counted, mean, rstd, scale, shift, added, out, bits,
                        options.activation, executor);
    }
    updates.apply(mean, var.data(), channels, exchange.info.count);
    if (count != nullptr) {
      *count = exchange.info.count;
    }
  });
  return {y,    statistics,       activation_mask, exchange.info.count, tag,
          word, exchange.message, exchange.merged, exchange.status};
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
  check_backward(gradient, samples, counted, scale, out, out_weight, out_bias, kept,
                 share ? AffineGradients::kShare : AffineGradients::kGlobal,
                 ranks_of_handle(handle));
  TorchExecutor executor;
  Exchange exchange;
  if (handle == kAlone) {
    exchange.info = backward_of_one_rank(gradient, samples, counted, mean, rstd, back, scale, kept,
                                         out, out_weight, out_bias, count, executor);
    exchange.refuse_if(exchange.info.count != count);
    return {dx, dweight, dbias, u, exchange.message, exchange.merged, exchange.status};
  }
  exchange.run(x, handle, slice, [&](std::int64_t* message) {
    syncbn::local_gradients(gradient, samples, counted, mean, rstd, back, kept, message,
                            backward_fingerprint(static_cast<std::uint32_t>(tag)), executor);
  });
  exchange.refuse_if(exchange.info.count != count);
  exchange.finish([&] {
    const MutableTensorView none;
    std::vector<double> coefficients(static_cast<std::size_t>(3 * channels));
    finalize_gradients(exchange.info, Exchange::words(*exchange.merged) + kHeaderWords, mean, rstd,
                       scale, coefficients.data(), share ? none : out_weight,
                       share ? none : out_bias, channels, count, executor);
    if (share) {
      syncbn::affine_gradient_shares(Exchange::words(*exchange.message) + kHeaderWords,
                                     samples.dtype, mean, rstd, out_weight, out_bias, channels,
                                     executor);
    }
    syncbn::input_gradient(keep ? TensorView(kept) : gradient, samples, counted, mean, rstd,
                           coefficients.data(), keep ? ActivationGradient{} : back, out, executor);
  });
  return {dx, dweight, dbias, u, exchange.message, exchange.merged, exchange.status};
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
