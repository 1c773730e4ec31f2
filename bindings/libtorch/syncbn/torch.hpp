// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "syncbn/torch_autograd.hpp"
#include "syncbn/torch_gradients.hpp"

/// Synchronized batch normalization as a module of LibTorch, for tensors on the CPU. It is
/// header-only, for programs that have LibTorch. docs/libtorch.md describes it.
namespace syncbn::torch {

namespace detail {
inline constexpr const char* kUnnamed = "SyncBatchNorm";
class Conversion;
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
  friend class detail::Conversion;

  /// Takes the parameters of a plain layer, which an optimizer may hold, and its buffers' memory.
  template <class Plain>
  void take_tensors(const Plain& plain) {
    parameters_["weight"] = weight = plain.weight;
    parameters_["bias"] = bias = plain.bias;
    if (plain.running_mean.defined()) {
      running_mean.set_data(plain.running_mean);
      running_var.set_data(plain.running_var);
      num_batches_tracked.set_data(plain.num_batches_tracked);
    }
  }

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

namespace detail {

/// A model's batch norms, and their places in containers, which are all that can be written to: a
/// member of another class is that class's own.
class Conversion {
 public:
  using Module = ::torch::nn::Module;

  explicit Conversion(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  void look(Module& model, const std::string& prefix) {
    if (like_batch_norm(model)) {
      members_ = "the whole model";
    }
    look_into(model, prefix);
  }

  std::size_t replace() const {
    if (!members_.empty()) {
      refuse("model", "batch norms outside of containers: " + members_,
             "each in a Sequential, ModuleList or ModuleDict, or declared as "
             "syncbn::torch::SyncBatchNorm");
    }
    for (const auto& step : plan_) {
      step();
    }
    return made_.size();
  }

 private:
  using Made = std::shared_ptr<SyncBatchNormImpl>;

  void look_into(Module& parent, const std::string& path) {
    if (!seen_.insert(&parent).second) {
      return;
    }
    for (const auto& child : parent.named_children()) {
      const std::string place = path.empty() ? child.key() : path + "." + child.key();
      const Made made = like_batch_norm(*child.value());
      if (!made) {
        look_into(*child.value(), place);
      } else if (!plan(parent, child.key(), child.value().get(), made)) {
        members_ += (members_.empty() ? "" : ", ") + place;
      }
    }
  }

  /// Returns null for a module of another class.
  Made like_batch_norm(const Module& module) {
    return like_any<::torch::nn::BatchNorm1dImpl, ::torch::nn::BatchNorm2dImpl,
                    ::torch::nn::BatchNorm3dImpl>(module);
  }

  template <class... Plain>
  Made like_any(const Module& module) {
    Made made;
    (void)((typeid(module) == typeid(Plain) && (made = like(static_cast<const Plain&>(module)))) ||
           ...);
    return made;
  }

  template <class Plain>
  Made like(const Plain& plain) {
    Made& made = made_[&plain];  // a module with two places has one layer
    if (!made) {
      made = std::make_shared<SyncBatchNormImpl>(
          SyncBatchNormOptions(plain.options.num_features())
              .eps(plain.options.eps())
              .momentum(plain.options.momentum())
              .affine(plain.options.affine())
              .track_running_stats(plain.options.track_running_stats())
              .process_group(group_));
      made->take_tensors(plain);
      made->train(plain.is_training());
    }
    return made;
  }

  /// Returns whether the parent is a container.
  bool plan(Module& parent, const std::string& key, const Module* plain, const Made& made) {
    if (auto* const sequential = parent.as<::torch::nn::SequentialImpl>()) {
      plan_.emplace_back([=] {
        for (::torch::nn::AnyModule& any : *sequential) {
          if (any.ptr().get() == plain) {
            any = ::torch::nn::AnyModule(made);
          }
        }
      });
    } else if (auto* const list = parent.as<::torch::nn::ModuleListImpl>()) {
      plan_.emplace_back([=] {
        for (std::shared_ptr<Module>& module : *list) {
          if (module.get() == plain) {
            module = made;
          }
        }
      });
    } else if (auto* const dict = parent.as<::torch::nn::ModuleDictImpl>()) {
      plan_.emplace_back([=] {
        for (auto& item : *dict) {
          if (item.value().get() == plain) {
            item.value() = made;
          }
        }
      });
    } else {
      return false;
    }
    plan_.emplace_back([&parent, key, made] { parent.replace_module(key, made); });
    return true;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::set<const Module*> seen_;
  std::map<const Module*, Made> made_;
  std::vector<std::function<void()>> plan_;
  std::string members_;
};

}  // namespace detail

/// Replaces every torch::nn::BatchNorm1d, 2d and 3d in the Sequential, ModuleList and ModuleDict
/// containers of a model by a SyncBatchNorm over the group, and names the layers as name_layers
/// does. Returns how many it replaced. Options and mode stay. Parameters are the same tensors, so
/// an optimizer may be made before. Call it with the same model on all ranks.
///
/// LibTorch gives no way to replace a layer that is a member of another class, or the whole model.
/// If there is one, this throws InvalidArgument with the paths, and changes nothing.
inline std::size_t convert(::torch::nn::Module& model,
                           c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                           const std::string& prefix = {}) {
  detail::Conversion conversion(std::move(process_group));
  conversion.look(model, prefix);
  const std::size_t replaced = conversion.replace();
  name_layers(model, prefix);
  return replaced;
}

}  // namespace syncbn::torch
