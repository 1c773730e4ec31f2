// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include "syncbn/torch_autograd.hpp"

/// Synchronized batch normalization as a module of LibTorch, for tensors on the CPU. It is
/// header-only, for programs that have LibTorch. docs/libtorch.md describes it.
namespace syncbn::torch {

namespace detail {
inline constexpr const char* kUnnamed = "SyncBatchNorm";
}  // namespace detail

/// The options of torch::nn::BatchNormOptions, and the ranks that share statistics.
struct SyncBatchNormOptions {
  /* implicit */ SyncBatchNormOptions(std::int64_t num_features) : num_features_(num_features) {}

  /// The number of channels C of an input (N, C, spatial...).
  TORCH_ARG(std::int64_t, num_features);
  /// The number that is added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  /// The share of the batch in the running statistics. nullopt means cumulative averaging.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Whether the layer learns weight and bias, of shape (C,) each.
  TORCH_ARG(bool, affine) = true;
  /// Whether the layer keeps running statistics. If not, evaluation normalizes with the local
  /// batch.
  TORCH_ARG(bool, track_running_stats) = true;
  /// The ranks that share statistics. Without a group, this process is alone.
  TORCH_ARG(c10::intrusive_ptr<c10d::ProcessGroup>, process_group) = {};
  /// The time that an exchange of the process group waits for the slowest rank.
  TORCH_ARG(std::chrono::milliseconds, timeout) = ProcessGroupCommunicator::kDefaultTimeout;
  /// Another group of the ranks that share statistics, in place of process_group.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = {};
  /// The layer's name (see name_layers). Errors contain it, and ranks use it to tell layers of the
  /// same shape apart. With several ranks, a layer without a name of its own is refused.
  TORCH_ARG(std::string, layer_name) = detail::kUnnamed;
};

/// Batch normalization over the batches of all ranks of a group. It works like
/// torch::nn::BatchNorm*d, and has the same parameters and buffers. The input has shape
/// (N, C, spatial...), dtype float16, bfloat16, float32 or float64, and any strides, and is on the
/// CPU. N may differ between ranks and may be 0 (in the others' dtype). For given inputs and output
/// gradients, the statistics, the output and the input's gradient have the bits of the Python
/// package, for any number of ranks. Gradients of weight and bias are the rank's own share.
///
/// A training forward makes one exchange, and so does a backward that gives the input's gradient.
/// If a call fails, every rank gets an error. If an input is refused, its rank gets InvalidArgument
/// and the others PeerLost. One value per channel over all ranks is InvalidArgument on all. If the
/// ranks did not make the same call, all get DivergenceError. If a rank does not come, they get
/// ExchangeTimeout or PeerLost. A failed call updates nothing. Evaluation is torch's own operator.
class SyncBatchNormImpl
    : public ::torch::nn::NormImplBase<0, SyncBatchNormImpl, SyncBatchNormOptions> {
 public:
  using NormImplBase::NormImplBase;
  explicit SyncBatchNormImpl(std::int64_t num_features)
      : NormImplBase(SyncBatchNormOptions(num_features)) {}

  at::Tensor forward(const at::Tensor& input) {
    return is_training() ? train_step(input) : evaluate(input);
  }

  /// Forgets the layer and its calls. A clone is reset, so it counts its calls on its own.
  void reset() override {
    NormImplBase::reset();
    layer_.reset();
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
  /// Returns the layer. It is made in the first training forward, and made again if options change
  /// that the ranks must share.
  detail::Layer& layer() {
    const bool changed = layer_ && (made_of_.eps() != options.eps() ||
                                    made_of_.layer_name() != options.layer_name() ||
                                    made_of_.process_group() != options.process_group() ||
                                    made_of_.communicator() != options.communicator());
    if (!layer_ || changed) {
      std::shared_ptr<Communicator> group = options.communicator();
      const bool both = group && options.process_group();
      if (!group && options.process_group() && options.process_group()->getSize() > 1) {
        group =
            std::make_shared<ProcessGroupCommunicator>(options.process_group(), options.timeout());
      }
      if (group && group->size() > 1) {
        check_group(*group, both);
      }
      layer_ = std::make_shared<detail::Layer>(
          std::move(group), BatchNorm::Options{.channels = options.num_features(),
                                               .name = options.layer_name(),
                                               .eps = options.eps(),
                                               .momentum = options.momentum()});
      made_of_ = options;
    }
    return *layer_;
  }

  void check_group(Communicator& group, bool both) const {
    try {
      if (both) {
        detail::refuse("communicator", "one beside a process_group", "one of the two");
      }
      if (options.layer_name() == detail::kUnnamed) {
        detail::refuse("layer_name", "none",
                       "this layer's own name, the same on all ranks; "
                       "syncbn::torch::name_layers(model) gives each layer its path");
      }
    } catch (const Error& error) {
      group.refuse(error.what());
      throw;
    }
  }

  at::Tensor train_step(const at::Tensor& input) {
    detail::Layer& used = layer();
    const auto call = c10::make_intrusive<detail::Call>();
    call->layer = layer_;
    call->number = used.batch_norm.calls();
    call->running_mean = running_mean;
    call->running_var = running_var;
    used.before_forward(used.text(call->number, "forward", input), [&] {
      used.batch_norm.set_momentum(options.momentum());
      detail::check_tensor("input", input);
    });
    std::int64_t batches = 0;  // Module::to(dtype) may have converted the buffer to floats
    if (num_batches_tracked.defined()) {
      batches = num_batches_tracked.item<std::int64_t>();
      call->num_batches_tracked = &batches;
    }
    // weight and bias are passed as optionals, because apply() asks each plain tensor for its
    // device.
    at::Tensor y =
        detail::BatchNormTraining::apply(input, std::optional(weight), std::optional(bias), call);
    call->num_batches_tracked = nullptr;
    if (call->saved.count() > 0 && running_mean.defined()) {
      running_mean.unsafeGetTensorImpl()->bump_version();  // autograd did not see the writes
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

  std::shared_ptr<detail::Layer> layer_;
  SyncBatchNormOptions made_of_{0};  ///< the options that layer_ was made of
};

/// The module's holder. It is what TORCH_MODULE would make, but that macro does not find torch:: in
/// this namespace.
class SyncBatchNorm : public ::torch::nn::ModuleHolder<SyncBatchNormImpl> {
 public:
  using ::torch::nn::ModuleHolder<SyncBatchNormImpl>::ModuleHolder;
  using Impl [[maybe_unused]] = SyncBatchNormImpl;
};

/// Names each synchronized layer of a model by its path in the model, for example "stem.bn1". So
/// errors name the layer, and ranks that are at different layers get an error. Call it when the
/// model is complete. Several models need a prefix each, for example "critic", because layers with
/// the same name are taken for one layer. A layer that is the whole model has no path: give it a
/// layer_name.
inline void name_layers(::torch::nn::Module& model, const std::string& prefix = {}) {
  for (const auto& item : model.named_modules(prefix, /*include_self=*/false)) {
    if (auto* layer = item.value()->as<SyncBatchNormImpl>()) {
      layer->options.layer_name(item.key());
    }
  }
}

}  // namespace syncbn::torch
