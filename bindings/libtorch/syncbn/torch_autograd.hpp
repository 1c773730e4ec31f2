// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "syncbn/batch_norm.hpp"
#include "syncbn/step.hpp"
#include "syncbn/torch_executor.hpp"
#include "syncbn/torch_process_group.hpp"

// The autograd function behind syncbn/torch.hpp, and its checks and views of tensors.
namespace syncbn::torch {

namespace detail {

[[noreturn]] inline void refuse(const char* name, const std::string& got, const char* expected) {
  throw InvalidArgument(std::string(name) + ": got " + got + ", expected " + expected);
}

/// Returns the dtype's name in Python. PyTorch 2.11 returns it as a string, 2.15 as a view.
inline std::string dtype_name(const at::Tensor& tensor) {
  return std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

inline void check_tensor(const char* name, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    refuse(name, "an undefined tensor", "a defined one");
  }
  if (tensor.layout() != c10::kStrided || tensor.is_nested()) {
    refuse(name, "a tensor without strides", "one with strides");
  }
  if (!tensor.is_cpu()) {
    refuse(name, "a tensor on " + tensor.device().str(),
           "the CPU; syncbn.SyncBatchNorm of the Python package takes CUDA tensors");
  }
}

inline DType dtype_of(const char* name, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      refuse(name, "dtype " + dtype_name(tensor), "float16, bfloat16, float32 or float64");
  }
}

/// Returns a view of the tensor, which is absent if the tensor is undefined.
inline MutableTensorView view(const char* name, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return {};
  }
  check_tensor(name, tensor);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return MutableTensorView(tensor.data_ptr(), dtype_of(name, tensor), {sizes.begin(), sizes.end()},
                           {strides.begin(), strides.end()});
}

/// Throws InvalidArgument if there is only 1 element per channel over all ranks. All ranks have the
/// same count, so all get the same error.
inline void check_count(std::int64_t count) {
  if (count == 1) {
    throw InvalidArgument(
        "x: got 1 value per channel over all ranks, expected more than 1 when training");
  }
}

/// The exchanges of a layer. They go over the group if there is one.
class LayerExchange final : public Communicator {
 public:
  explicit LayerExchange(std::shared_ptr<Communicator> group)
      : group_(std::move(group)), named_(dynamic_cast<ProcessGroupCommunicator*>(group_.get())) {}
  int rank() const override { return group_ ? group_->rank() : 0; }
  int size() const override { return group_ ? group_->size() : 1; }
  /// Says which call the next exchange belongs to.
  void begin(const std::string& call, bool forward) {
    forward_ = forward;
    if (named_ != nullptr) {
      named_->set_call(call);
    }
  }
  void all_reduce_sum(std::span<std::int64_t> words) override {
    if (group_) {
      group_->all_reduce_sum(words);
    }
    if (std::exchange(forward_, false)) {
      const MessageInfo info = read_header(words.data(), size());
      if (info.agree) {
        check_count(info.count);
      }
    }
  }
  void abandon(const std::string& reason) override {
    if (group_) {
      group_->abandon(reason);
    }
  }
  void refuse(const std::string& reason) override {
    if (group_) {
      group_->refuse(reason);
    }
  }

 private:
  std::shared_ptr<Communicator> group_;
  ProcessGroupCommunicator* named_;
  bool forward_ = false;
};

/// The state that a module and the graphs of its calls share.
struct Layer {
  LayerExchange exchange;
  BatchNorm batch_norm;
  std::string name;
  Layer(std::shared_ptr<Communicator> group, const BatchNorm::Options& options)
      : exchange(std::move(group)), batch_norm(options, exchange), name(options.name) {}

  /// Returns a call's text in errors: "bn1, call 7, backward, 64 channels, float32".
  std::string text(std::uint64_t call, const char* direction, const at::Tensor& x) const {
    std::string text = name + ", call " + std::to_string(call) + ", " + direction;
    if (x.defined() && x.layout() == c10::kStrided && !x.is_nested() && x.dim() > 1) {
      text += ", " + std::to_string(x.size(1)) + " channels, " + dtype_name(x);
    }
    return text;
  }

  /// Runs the work before the layer's own forward. If it throws, the other ranks get an error.
  template <class Body>
  void before_forward(const std::string& call, const Body& body) {
    exchange.begin(call, true);
    try {
      body();
    } catch (Error& error) {
      error.set_layer(name, call);
      batch_norm.abandon_forward(error.what());
      throw;
    } catch (const std::exception& error) {
      batch_norm.abandon_forward(call + ": " + error.what());
      throw;
    }
  }
};

/// One training call: the arguments of its forward, and the data besides tensors that its backward
/// needs.
struct Call final : ::torch::CustomClassHolder {
  std::shared_ptr<Layer> layer;
  std::uint64_t number = 0;
  at::Tensor running_mean, running_var;
  std::int64_t* num_batches_tracked = nullptr;
  Saved saved;
};

class BatchNormTraining : public ::torch::autograd::Function<BatchNormTraining> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight_or_none,
                            const std::optional<at::Tensor>& bias_or_none,
                            const c10::intrusive_ptr<Call>& call) {
    const at::Tensor weight = weight_or_none.value_or(at::Tensor());
    const at::Tensor bias = bias_or_none.value_or(at::Tensor());
    Layer& layer = *call->layer;
    const std::string text = layer.text(call->number, "forward", input);
    at::Tensor x, y;
    BatchNorm::Forward arguments;
    layer.before_forward(text, [&] {
      x = input.resolve_neg();
      arguments.x = view("input", x);
      if (layer.exchange.size() == 1 && x.dim() > 1 && x.size(1) > 0) {  // nothing is summed
        check_count(x.numel() / x.size(1));
      }
      y = at::empty_like(x);
      arguments.y = view("y", y);
      arguments.weight = view("weight", weight);
      arguments.bias = view("bias", bias);
      arguments.running_mean = view("running_mean", call->running_mean);
      arguments.running_var = view("running_var", call->running_var);
      arguments.num_batches_tracked = call->num_batches_tracked;
    });
    syncbn::detail::TorchExecutor executor;
    layer.batch_norm.forward(arguments, call->saved, executor);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    // The bias is not a saved variable: the backward does not read its values, so they may change.
    ctx->saved_data["bias"] = bias.defined() ? c10::IValue(bias.detach()) : c10::IValue();
    return y;
  }

  static ::torch::autograd::variable_list backward(
      ::torch::autograd::AutogradContext* ctx,
      const ::torch::autograd::variable_list& output_gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const c10::IValue& kept_bias = ctx->saved_data["bias"];
    const at::Tensor bias = kept_bias.isNone() ? at::Tensor() : kept_bias.toTensor();
    // Only defined inputs have edges.
    const bool needs_x = ctx->needs_input_grad(0);
    std::size_t edge = 1;
    at::Tensor dx, dweight, dbias;
    if (weight.defined() && ctx->needs_input_grad(edge++)) {
      dweight = at::empty({x.size(1)}, x.options().dtype(weight.scalar_type()));
    }
    if (bias.defined() && ctx->needs_input_grad(edge)) {
      dbias = at::empty({x.size(1)}, x.options().dtype(bias.scalar_type()));
    }
    at::Tensor dy = output_gradients[0].resolve_neg();
    if (dy.strides() != x.strides()) {
      dy = at::empty_like(x).copy_(dy);
    }
    if (needs_x) {
      dx = at::empty_like(x);
      syncbn::detail::TorchExecutor executor;
      Layer& layer = *call->layer;
      layer.exchange.begin(layer.text(call->number, "backward", x), false);
      layer.batch_norm.backward({.dy = view("dy", dy),
                                 .x = view("x", x),
                                 .weight = view("weight", weight),
                                 .bias = view("bias", bias),
                                 .dx = view("dx", dx),
                                 .dweight = view("dweight", dweight),
                                 .dbias = view("dbias", dbias)},
                                call->saved, executor);
    } else {
      local_shares(*call, dy, x, dweight, dbias);
    }
    return once({dx, dweight, dbias, at::Tensor()}, call->layer->name);
  }

 private:
  /// Computes this rank's dweight and dbias. Without a gradient of x nothing is exchanged.
  static void local_shares(const Call& call, const at::Tensor& dy, const at::Tensor& x,
                           const at::Tensor& dweight, const at::Tensor& dbias) {
    const TensorView x_view = view("x", x);
    std::vector<std::int64_t> message(
        static_cast<std::size_t>(message_words(x_view.dtype, x.size(1))));
    syncbn::detail::TorchExecutor executor;
    const BackwardStep step{{.dy = view("dy", dy),
                             .x = x_view,
                             .mean = call.saved.mean().data(),
                             .rstd = call.saved.rstd().data(),
                             .dweight = view("dweight", dweight),
                             .dbias = view("dbias", dbias)}};
    backward_begin(step, message.data(), nullptr, executor);
    backward_finish(step, message.data(), {}, executor);
  }

  /// Makes a second differentiation an error, because no graph computed these gradients.
  static ::torch::autograd::variable_list once(::torch::autograd::variable_list gradients,
                                               const std::string& layer_name) {
    if (!at::GradMode::is_enabled()) {  // create_graph
      return gradients;
    }
    for (at::Tensor& gradient : gradients) {
      if (gradient.defined()) {
        gradient.set_requires_grad(true);
      }
    }
    const std::string text =
        layer_name +
        ": got a second derivative, expected first ones alone, or syncbn.SyncBatchNorm of the "
        "Python package";
    ::torch::autograd::DelayedError refused(text, static_cast<std::int64_t>(gradients.size()));
    return refused.apply(std::move(gradients));
  }
};

}  // namespace detail

}  // namespace syncbn::torch
