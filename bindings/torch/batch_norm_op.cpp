// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm_op.hpp"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/torch/new_output.hpp"
#include "bindings/torch/tensors.hpp"

// batch_norm as one operator, which exchanges inside. Shapes and dtypes stand beside its fakes in
// python/syncbn/ops.py.
namespace syncbn::torch_layer {
namespace {

/// The sum over the ranks of the process group of that name. The operator for it is in
/// python/syncbn/ops.py: since PyTorch 2.15 the stable ABI cannot call PyTorch's own, whose
/// arguments are of any type.
Tensor all_reduce(const Tensor& words, const std::string& group) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::array<StableIValue, 2> stack{from(words), from(group)};
  // The stable ABI hands on that a call failed, but not why.
  if (torch_call_dispatcher("syncbn::sum_over_group", "", stack.data(), TORCH_ABI_VERSION) != 0) {
    throw Error(
        "batch_norm: the exchange over the process group failed (a rank did not come in time, or "
        "was lost)");
  }
  return to<Tensor>(stack[0]);
}

/// One exchange of an operator over a process group. Its first message has one length for all
/// calls of the group, because Gloo ends the process when lengths differ; only when that message
/// shows that the calls agree, a second one brings the words that did not fit.
class GroupExchange {
 public:
  /// group: none to exchange with nobody. like: a tensor on the device of the messages.
  GroupExchange(const Tensor& like, std::int64_t channels, std::optional<std::string> group,
                std::int64_t ranks, std::int64_t frame)
      : like_(like),
        channels_(channels),
        group_(std::move(group)),
        ranks_(ranks),
        frame_(checked_frame(frame)) {}

  MessageInfo operator()(std::vector<std::int64_t>& message) {
    if (!group_.has_value()) {
      const MessageInfo info = read_header(message.data(), 1);
      check_header(info);
      return info;
    }
    exchanged_ = true;
    const std::int64_t* first = sum(message, 0, frame_);
    const MessageInfo info = read_header(first, ranks_of(ranks_));
    check_header(info);
    // A rank without samples may be of another dtype than the group, whose length then counts.
    const std::int64_t words =
        info.any_data ? message_words(info.dtype, channels_) : std::int64_t{kHeaderWords};
    std::vector<std::int64_t> merged(first, first + std::min(frame_, words));
    if (words > frame_) {
      const std::int64_t* rest = sum(message, frame_, words - frame_);
      merged.insert(merged.end(), rest, rest + words - frame_);
    }
    message = std::move(merged);
    return info;
  }

  /// Takes part with the word that this rank cannot, unless the exchange has begun.
  void reject() {
    if (!group_.has_value() || exchanged_) {
      return;
    }
    std::vector<std::int64_t> message(kHeaderWords);
    rejection_header(0, message.data());
    sum(message, 0, frame_);
  }

 private:
  /// Sums `size` words from `begin` on; zeros stand for words that the message lacks.
  const std::int64_t* sum(const std::vector<std::int64_t>& message, std::int64_t begin,
                          std::int64_t size) {
    Tensor words = empty(like_, size, ScalarType::Long);
    std::int64_t* data = int64_data("words", words, size);
    const std::int64_t have =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(message.size()) - begin, 0, size);
    std::copy_n(message.data() + (have > 0 ? begin : 0), have, data);
    std::fill(data + have, data + size, 0);
    merged_ = all_reduce(words, group_.value_or(""));
    return int64_data("merged", *merged_, size);
  }

  const Tensor& like_;
  std::int64_t channels_;
  std::optional<std::string> group_;
  std::int64_t ranks_;
  std::int64_t frame_;
  std::optional<Tensor> merged_;
  bool exchanged_ = false;
};

/// Runs body(exchange); an error that only this rank has reaches the others through the exchange.
/// The text of an error begins with the class that python/syncbn/ops.py raises.
template <class Body>
auto with_exchange(GroupExchange exchange, const Body& body) {
  try {
    return body(exchange);
  } catch (const DivergenceError& error) {
    throw Error(std::string("DivergenceError: ") + error.what());
  } catch (const InvalidArgument& error) {
    exchange.reject();
    throw Error(std::string("ValueError: ") + error.what());
  } catch (const std::exception&) {
    exchange.reject();
    throw;
  }
}

std::int64_t channels_of(const Tensor& x) { return x.dim() < 2 ? 0 : x.size(1); }

std::int64_t count_of(const Tensor& batches) {
  if (batches.scalar_type() != ScalarType::Long || batches.numel() != 1) {
    throw InvalidArgument("batches: got " + std::to_string(batches.numel()) + " entries of " +
                          torch::headeronly::toString(batches.scalar_type()) +
                          ", expected one int64");
  }
  return *int64_data("batches", batches, 1);
}

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Outputs batch_norm(const Tensor& x, const Tensor& estimated_mean, const Tensor& estimated_var,
                   std::optional<Tensor> scale, std::optional<Tensor> bias, const Tensor& batches,
                   bool is_infer, bool use_global_est, double epsilon, double momentum,
                   std::int64_t layer, std::optional<std::string> group, std::int64_t ranks,
                   std::int64_t frame) {
  const std::int64_t channels = channels_of(x);
  if (is_infer) {
    group.reset();
  }
  return with_exchange({x, channels, group, ranks, frame}, [&](GroupExchange& exchange) -> Outputs {
    const BatchNormOpInputs inputs{view("x", x),
                                   view("estimated_mean", estimated_mean),
                                   view("estimated_var", estimated_var),
                                   view("scale", scale),
                                   view("bias", bias),
                                   count_of(batches)};
    Tensor y = new_output(x);
    Tensor batch_mean = empty(x, channels, ScalarType::Double);
    Tensor batch_var = empty(x, channels, ScalarType::Double);
    Tensor saved_mean = empty(x, channels, estimated_mean.scalar_type());
    Tensor saved_var = empty(x, channels, estimated_var.scalar_type());
    Tensor saved_batches = empty(x, 1, ScalarType::Long);
    const BatchNormOpOutputs outputs{mutable_view("y", y),
                                     mutable_view("batch_mean", batch_mean),
                                     mutable_view("batch_var", batch_var),
                                     mutable_view("saved_mean", saved_mean),
                                     mutable_view("saved_var", saved_var),
                                     int64_data("saved_batches", saved_batches, 1)};
    const Exchange sum = [&](std::vector<std::int64_t>& message) {
      const MessageInfo info = exchange(message);
      if (info.count == 1) {  // on every rank: the count is global
        throw InvalidArgument(
            "x: got 1 value per channel over all ranks, expected more than 1 when training");
      }
      return info;
    };
    TorchExecutor executor;
    const BatchNormOpStatistics used = batch_norm_op(
        inputs, outputs,
        {is_infer, use_global_est, epsilon, momentum, static_cast<std::uint64_t>(layer)}, sum,
        executor);
    Tensor mean_rstd = empty(x, 2 * channels, ScalarType::Double);
    std::copy(used.mean.begin(), used.mean.end(), double_data(mean_rstd));
    std::copy(used.rstd.begin(), used.rstd.end(), double_data(mean_rstd) + channels);
    Tensor info = empty(x, 2, ScalarType::Long);
    int64_data("info", info, 2)[0] = used.count;
    int64_data("info", info, 2)[1] = used.fingerprint;
    return {y, batch_mean, batch_var, saved_mean, saved_var, saved_batches, mean_rstd, info};
  });
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(
    const Tensor& dy, const Tensor& x, std::optional<Tensor> scale, const Tensor& mean_rstd,
    const Tensor& info, bool constant, bool needs_x, std::optional<ScalarType> scale_dtype,
    std::optional<ScalarType> bias_dtype, std::optional<std::string> group, std::int64_t ranks,
    std::int64_t frame) {
  const std::int64_t channels = channels_of(x);
  if (constant || !needs_x) {
    group.reset();
  }
  using Gradients = std::tuple<Tensor, Tensor, Tensor>;
  return with_exchange(
      {x, channels, group, ranks, frame}, [&](GroupExchange& exchange) -> Gradients {
        const double* values = double_data("mean_rstd", mean_rstd, 2 * channels);
        BatchNormOpStatistics used;
        used.mean.assign(values, values + channels);
        used.rstd.assign(values + channels, values + 2 * channels);
        used.count = int64_data("info", info, 2)[0];
        used.fingerprint = static_cast<std::uint32_t>(int64_data("info", info, 2)[1]);
        BatchNormOpAttributes attributes;
        attributes.use_global_est = constant;
        Tensor dx = needs_x ? new_output(x) : empty(x, 0, x.scalar_type());
        Tensor dscale =
            empty(x, scale_dtype ? channels : 0, scale_dtype.value_or(ScalarType::Float));
        Tensor dbias = empty(x, bias_dtype ? channels : 0, bias_dtype.value_or(ScalarType::Float));
        TorchExecutor executor;
        batch_norm_op_backward(
            view("dy", dy), view("x", x), view("scale", scale), used, attributes,
            needs_x ? mutable_view("dx", dx) : MutableTensorView(),
            scale_dtype ? mutable_view("dscale", dscale) : MutableTensorView(),
            bias_dtype ? mutable_view("dbias", dbias) : MutableTensorView(),
            Exchange([&](std::vector<std::int64_t>& message) { return exchange(message); }),
            executor);
        return {dx, dscale, dbias};
      });
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def(
      "batch_norm(Tensor x, Tensor estimated_mean, Tensor estimated_var, Tensor? scale, "
      "Tensor? bias, Tensor batches, bool is_infer=False, bool use_global_est=False, "
      "float epsilon=1e-06, float momentum=0.99, int layer=0, str? group=None, int ranks=1, "
      "int frame=0) -> (Tensor y, Tensor batch_mean, Tensor batch_var, Tensor saved_mean, "
      "Tensor saved_var, Tensor saved_batches, Tensor mean_rstd, Tensor info)");
  m.def(
      "batch_norm_backward(Tensor dy, Tensor x, Tensor? scale, Tensor mean_rstd, Tensor info, "
      "bool constant, bool needs_x, ScalarType? scale_dtype, ScalarType? bias_dtype, "
      "str? group=None, int ranks=1, int frame=0) -> (Tensor dx, Tensor dscale, Tensor dbias)");
  // On CUDA alone, where an operator cannot exchange: what the layer's operators lack.
  m.def(
      "evaluate(Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps) -> "
      "(Tensor, Tensor, Tensor)");
  m.def("evaluation_input_gradient(Tensor dy, Tensor rstd, Tensor? weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn::torch_layer;
  m.impl("batch_norm", TORCH_BOX(&batch_norm));
  m.impl("batch_norm_backward", TORCH_BOX(&batch_norm_backward));
}
