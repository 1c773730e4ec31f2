#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "syncbn/batch_norm.hpp"
#include "syncbn/torch_process_group.hpp"

/// Synchronized batch normalization as a module of LibTorch: header-only, for programs that have
/// LibTorch. Tensors on the CPU; docs/libtorch.md.
namespace syncbn::torch {

namespace detail {
inline constexpr const char* kUnnamed = "SyncBatchNorm";
}  // namespace detail

/// As torch::nn::BatchNormOptions, and the ranks that share statistics.
struct SyncBatchNormOptions {
  /* implicit */ SyncBatchNormOptions(std::int64_t num_features) : num_features_(num_features) {}

  /// C of an input (N, C, spatial...).
  TORCH_ARG(std::int64_t, num_features);
  /// Added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  /// Share of the batch in the running statistics; nullopt: cumulative averaging.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Learn weight and bias, (C,) each.
  TORCH_ARG(bool, affine) = true;
  /// Keep running statistics; without them evaluation normalizes with the local batch.
  TORCH_ARG(bool, track_running_stats) = true;
  /// The ranks that share statistics; without one this process alone.
  TORCH_ARG(c10::intrusive_ptr<c10d::ProcessGroup>, process_group) = {};
  /// How long an exchange waits for the slowest rank.
  TORCH_ARG(std::chrono::milliseconds, timeout) = ProcessGroupCommunicator::kDefaultTimeout;
  /// What errors call the layer, and by which ranks tell it from others of its shape: see
  /// name_layers. With several ranks a layer without a name of its own is refused.
  TORCH_ARG(std::string, layer_name) = detail::kUnnamed;
};

namespace detail {

/// PyTorch's own threads. Not at::parallel_for, which is a plain loop in a program without OpenMP.
class TorchExecutor final : public Executor {
 public:
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const Body& body) override {
    const auto run = [](std::int64_t first, std::int64_t last, void* what) {
      (*static_cast<const Body*>(what))(first, last);
    };
    if (torch_parallel_for(begin, end, grain, run, const_cast<Body*>(&body)) != 0) {
      throw Error("parallel_for of PyTorch failed");
    }
  }
  int concurrency() const override { return at::get_num_threads(); }
};

[[noreturn]] inline void refuse(const char* name, const std::string& got, const char* expected) {
  throw InvalidArgument(std::string(name) + ": got " + got + ", expected " + expected);
}

/// As Python names it: PyTorch 2.11 returns strings, 2.15 views.
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

/// Absent for an undefined tensor.
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

/// Elements per channel over all ranks: on every rank the same error.
inline void check_count(std::int64_t count) {
  if (count == 1) {
    throw InvalidArgument(
        "x: got 1 value per channel over all ranks, expected more than 1 when training");
  }
}

/// One exchange of a layer: over the process group if there is one.
class LayerExchange final : public Communicator {
 public:
  LayerExchange(ProcessGroupCommunicator* group, const std::string& call, bool forward)
      : group_(group), forward_(forward) {
    if (group_ != nullptr) {
      group_->set_call(call);
    }
  }
  int rank() const override { return group_ == nullptr ? 0 : group_->rank(); }
  int size() const override { return group_ == nullptr ? 1 : group_->size(); }
  void all_reduce_sum(std::span<std::int64_t> words) override {
    if (group_ != nullptr) {
      group_->all_reduce_sum(words);
    }
    const MessageInfo info = read_header(words.data(), size());
    if (group_ != nullptr && !info.agree) {
      group_->diverge();
    }
    if (forward_) {
      check_count(info.count);
    }
  }
  void all_gather(std::span<const std::byte>, std::span<std::byte>) override {
    throw Error("all_gather: a layer makes sums alone");
  }
  void abandon(const std::string& reason) override {
    if (group_ != nullptr) {
      group_->abandon(reason);
    }
  }

 private:
  ProcessGroupCommunicator* group_;
  bool forward_;
};

/// A layer's number in the fingerprint, from its name (FNV-1a). Never 0, which is none.
inline std::uint64_t layer_number(const std::string& name) {
  std::uint32_t hash = 2166136261U;
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  }
  return std::uint64_t{1} << 32 | hash;
}

/// One training call: what its forward is given, and its backward needs besides tensors.
struct Call final : ::torch::CustomClassHolder {
  std::shared_ptr<ProcessGroupCommunicator> group;
  BatchNormOptions options;
  std::string layer_name;
  at::Tensor running_mean, running_var;
  std::int64_t* num_batches_tracked = nullptr;
  BatchStatistics statistics;

  /// "bn1, call 7, backward, 64 channels, float32".
  std::string text(const char* direction, const at::Tensor& x) const {
    std::string text = layer_name + ", call " + std::to_string(options.call) + ", " + direction;
    if (x.defined() && x.layout() == c10::kStrided && !x.is_nested() && x.dim() > 1) {
      text += ", " + std::to_string(x.size(1)) + " channels, " + dtype_name(x);
    }
    return text;
  }
};

class BatchNormTraining : public ::torch::autograd::Function<BatchNormTraining> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight_or_none,
                            const std::optional<at::Tensor>& bias_or_none,
                            const c10::intrusive_ptr<Call>& call) {
    const at::Tensor weight = weight_or_none.value_or(at::Tensor());
    const at::Tensor bias = bias_or_none.value_or(at::Tensor());
    LayerExchange exchange(call->group.get(), call->text("forward", input), true);
    at::Tensor x, y;
    MutableTensorView x_view, y_view, weight_view, bias_view;
    RunningStatistics running;
    try {
      x = input.resolve_neg();
      x_view = view("input", x);
      if (exchange.size() == 1 && x.dim() > 1 && x.size(1) > 0) {  // nothing is summed
        check_count(x.numel() / x.size(1));
      }
      y = at::empty_like(x);
      y_view = view("y", y);
      weight_view = view("weight", weight);
      bias_view = view("bias", bias);
      running = {view("running_mean", call->running_mean), view("running_var", call->running_var),
                 call->num_batches_tracked};
    } catch (const std::exception& error) {
      exchange.abandon(error.what());
      throw;
    }
    TorchExecutor executor;
    call->statistics = batch_norm_forward(x_view, {}, weight_view, bias_view, {}, y_view, running,
                                          call->options, exchange, executor);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    ctx->saved_data["bias"] = bias.defined() ? c10::IValue(bias.scalar_type()) : c10::IValue();
    return y;
  }

  static ::torch::autograd::variable_list backward(
      ::torch::autograd::AutogradContext* ctx,
      const ::torch::autograd::variable_list& output_gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const c10::IValue& bias_dtype = ctx->saved_data["bias"];
    // Edges are those of defined inputs.
    const bool needs_x = ctx->needs_input_grad(0);
    std::size_t edge = 1;
    at::Tensor dx, dweight, dbias;
    if (weight.defined() && ctx->needs_input_grad(edge++)) {
      dweight = at::empty({x.size(1)}, x.options().dtype(weight.scalar_type()));
    }
    if (!bias_dtype.isNone() && ctx->needs_input_grad(edge)) {
      dbias = at::empty({x.size(1)}, x.options().dtype(bias_dtype.toScalarType()));
    }
    at::Tensor dy = output_gradients[0].resolve_neg();
    if (dy.strides() != x.strides()) {
      dy = at::empty_like(x).copy_(dy);
    }
    if (needs_x) {
      dx = at::empty_like(x);
      LayerExchange exchange(call->group.get(), call->text("backward", x), false);
      TorchExecutor executor;
      batch_norm_backward(view("dy", dy), view("x", x), {}, view("weight", weight), {},
                          call->statistics, view("dx", dx), view("dweight", dweight),
                          view("dbias", dbias), {}, AffineGradients::kShare, exchange, executor);
    } else {
      local_shares(*call, dy, x, dweight, dbias);
    }
    return once({dx, dweight, dbias, at::Tensor()}, call->layer_name);
  }

 private:
  /// Without a gradient of x nothing is exchanged.
  static void local_shares(const Call& call, const at::Tensor& dy, const at::Tensor& x,
                           const at::Tensor& dweight, const at::Tensor& dbias) {
    const TensorView x_view = view("x", x);
    std::vector<std::int64_t> message(
        static_cast<std::size_t>(message_words(x_view.dtype, x.size(1))));
    TorchExecutor executor;
    local_gradients(view("dy", dy), x_view, {}, call.statistics.mean.data(),
                    call.statistics.rstd.data(), {}, {}, message.data(), 0, executor);
    affine_gradient_shares(message.data() + kHeaderWords, x_view.dtype, call.statistics.mean.data(),
                           call.statistics.rstd.data(), view("dweight", dweight),
                           view("dbias", dbias), x.size(1), executor);
  }

  /// Gradients whose own differentiation is an error: what made them is no graph.
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

/// Batch normalization over the batches of all ranks of a process group, as torch::nn::BatchNorm*d
/// with the same parameters and buffers. Input: (N, C, spatial...) of float16, bfloat16, float32 or
/// float64 on the CPU, any strides; N may differ between ranks and may be 0 (of the others' dtype).
/// For given inputs and output gradients the statistics, the output and the input's gradient have
/// the same bits whatever the number of ranks, those of the Python package. Gradients of weight and
/// bias are the rank's own share.
/// One exchange in a training forward, one in the backward that gives the input's gradient. Throws
/// on every rank: InvalidArgument on the rank whose input is refused and PeerLost on the others, or
/// InvalidArgument on all for one value per channel; DivergenceError when the ranks did not make
/// the same call; ExchangeTimeout and PeerLost. Nothing is updated then.
/// Evaluation is torch's own operator.
class SyncBatchNormImpl
    : public ::torch::nn::NormImplBase<0, SyncBatchNormImpl, SyncBatchNormOptions> {
 public:
  using NormImplBase::NormImplBase;
  explicit SyncBatchNormImpl(std::int64_t num_features)
      : NormImplBase(SyncBatchNormOptions(num_features)) {}

  at::Tensor forward(const at::Tensor& input) {
    return is_training() ? train_step(input) : evaluate(input);
  }

  void pretty_print(std::ostream& stream) const override {
    stream << std::boolalpha << "syncbn::torch::SyncBatchNorm(" << options.num_features()
           << ", eps=" << options.eps() << ", momentum=";
    if (options.momentum().has_value()) {
      stream << *options.momentum();
    } else {
      stream << "None";
    }
    stream << ", affine=" << options.affine()
           << ", track_running_stats=" << options.track_running_stats() << ')';
  }

 protected:
  void _check_input_dim(const at::Tensor& input) override {
    if (input.dim() < 2) {
      detail::refuse("input", std::to_string(input.dim()) + " axes",
                     "at least 2 (N, C, spatial...)");
    }
  }

 private:
  at::Tensor train_step(const at::Tensor& input) {
    if (!group_ && options.process_group() && options.process_group()->getSize() > 1) {
      group_ =
          std::make_shared<ProcessGroupCommunicator>(options.process_group(), options.timeout());
    }
    const auto call = c10::make_intrusive<detail::Call>();
    call->group = group_;
    call->options.eps = options.eps();
    call->options.momentum = options.momentum();
    call->options.layer = detail::layer_number(options.layer_name());
    call->options.call = calls_;
    call->layer_name = options.layer_name();
    call->running_mean = running_mean;
    call->running_var = running_var;
    try {
      if (group_ && options.layer_name() == detail::kUnnamed) {
        detail::refuse("layer_name", "none",
                       "this layer's own name, the same on all ranks; "
                       "syncbn::torch::name_layers(model) gives each layer its path");
      }
      detail::check_tensor("input", input);
    } catch (const std::exception& error) {
      detail::LayerExchange(group_.get(), call->text("forward", input), true).abandon(error.what());
      throw;
    }
    std::int64_t batches = 0;  // Module::to(dtype) may have made the buffer one of floats
    if (num_batches_tracked.defined()) {
      batches = num_batches_tracked.item<std::int64_t>();
      call->num_batches_tracked = &batches;
    }
    // As optional ones: apply() asks each plain tensor for its device.
    at::Tensor y =
        detail::BatchNormTraining::apply(input, std::optional(weight), std::optional(bias), call);
    call->num_batches_tracked = nullptr;
    ++calls_;
    if (call->statistics.count > 0 && running_mean.defined()) {
      running_mean.unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
      running_var.unsafeGetTensorImpl()->bump_version();
      num_batches_tracked.fill_(batches);
    }
    return y;
  }

  at::Tensor evaluate(const at::Tensor& input) {
    _check_input_dim(input);
    return ::torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight,
                                                       bias, !running_mean.defined(), 0.0,
                                                       options.eps());
  }

  std::shared_ptr<ProcessGroupCommunicator> group_;  ///< of the first training forward on
  std::uint64_t calls_ = 0;
};

/// The module's holder, as TORCH_MODULE makes it; that macro finds no torch:: in this namespace.
class SyncBatchNorm : public ::torch::nn::ModuleHolder<SyncBatchNormImpl> {
 public:
  using ::torch::nn::ModuleHolder<SyncBatchNormImpl>::ModuleHolder;
  using Impl [[maybe_unused]] = SyncBatchNormImpl;
};

/// Names each synchronized layer of a model by its path in it, as in "stem.bn1", so that errors say
/// where they are and ranks at different layers are told. Call it once the model is whole. A layer
/// that is the whole model has no path: give it a layer_name.
inline void name_layers(::torch::nn::Module& model) {
  for (const auto& item : model.named_modules(/*name_prefix=*/std::string(),
                                              /*include_self=*/false)) {
    if (auto* layer = item.value()->as<SyncBatchNormImpl>()) {
      layer->options.layer_name(item.key());
    }
  }
}

}  // namespace syncbn::torch
