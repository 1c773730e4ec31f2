// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>

#include "agreement.hpp"
#include "channel_values.hpp"
#include "checks.hpp"
#include "cpu/float_environment.hpp"
#include "cpu/scratch.hpp"
#include "layer.hpp"
#include "sample_view.hpp"
#include "statistics/finalize.hpp"
#include "statistics/scalar.hpp"
#include "syncbn/group_passes.hpp"
#include "syncbn/step.hpp"
#include "syncbn/welford.hpp"

// Checks, passes and exchange in their order; the arithmetic is elsewhere.
namespace syncbn {
namespace {

/// Running statistics as evaluation uses them.
struct EvaluationStatistics {
  EvaluationStatistics(const TensorView& running_mean, const TensorView& running_var,
                       std::int64_t channels, double eps)
      : mean(static_cast<std::size_t>(channels)), var(mean.size()), rstd(mean.size()) {
    evaluation_statistics(running_mean, running_var, mean.data(), var.data(), rstd.data(), eps, {});
  }
  cpu::ScratchArray<double> mean;
  cpu::ScratchArray<double> var;
  cpu::ScratchArray<double> rstd;
};

bool has_elements(const TensorView& x) {
  return std::find(x.sizes.begin(), x.sizes.end(), 0) == x.sizes.end();
}

void check_on_cpu(const TensorView& x) {
  if (x.device != Device::kCpu) {
    throw InvalidArgument(
        "x: got a tensor on CUDA, expected one on the CPU, as the layer's communicator is; "
        "cuda::staged_communicator makes a communicator for CUDA from it");
  }
}

/// The one exchange of a direction.
class LayerSum final : public SumInParts {
 public:
  LayerSum(const TensorView& x, const AgreedCall& call, Communicator& communicator)
      : communicator_(communicator),
        parts_(communicator.parts()),
        words_(2 * static_cast<std::size_t>(message_words(x.dtype, x.sizes[1]))),
        message_(words_.data(), words_.size() / 2),
        merged_(words_.data() + message_.size(), message_.size()) {
    group_.sum = this;
    group_.in_parts = parts_ != nullptr;
    group_.ranks = communicator.size();
    group_.message = message_;
    group_.merged = merged_;
    group_.fingerprint = call.fingerprint();
  }

  LayerSum(const LayerSum&) = delete;
  LayerSum& operator=(const LayerSum&) = delete;

  /// run(GroupSum): the direction. Gives back the count of elements.
  template <class Run>
  std::int64_t run(const LayerCall& layer_call, const AgreedCall& call, const Run& run) {
    Reached reached{};
    try {
      before_exchange(*this, layer_call, [&] { reached = run(group_); });
    } catch (const DivergenceError& error) {
      explain_divergence(error, call, communicator_);
    }
    if (reached != Reached::kOutput) {
      check_agreement(group_.info, call, communicator_);
    }
    return group_.info.count;
  }

  /// After an error that the others do not see.
  void refuse(const std::string& reason) {
    if (!over_) {
      communicator_.refuse(reason);
    }
  }

  void open(std::span<const std::int64_t>, std::span<std::int64_t>) override {
    watched([&] {
      if (parts_ != nullptr) {
        parts_->open(message_, merged_);
      }
    });
  }
  void publish(std::size_t words) override {
    watched([&] {
      if (parts_ != nullptr) {
        parts_->publish(words);
      }
    });
  }
  /// To the end.
  bool wait(std::size_t words, std::chrono::milliseconds slice) override {
    watched([&] {
      if (parts_ != nullptr) {
        while (!parts_->wait(words, slice)) {
        }
      } else if (!over_) {
        std::copy(message_.begin(), message_.end(), merged_.begin());
        communicator_.all_reduce_sum(merged_);
      }
    });
    over_ = over_ || words == message_.size();
    return true;
  }

 private:
  template <class Body>
  void watched(const Body& body) {
    try {
      body();
    } catch (...) {
      over_ = true;  // the others know
      throw;
    }
  }
  Communicator& communicator_;
  SumInParts* parts_;
  cpu::ScratchArray<std::int64_t> words_;
  std::span<std::int64_t> message_;
  std::span<std::int64_t> merged_;
  GroupSum group_;
  bool over_ = false;
};

/// The records of all ranks, one after another, and the sum of their headers.
class GatheredRecords {
 public:
  GatheredRecords(const ForwardStep& step, int ranks, const Execution& execution)
      : message_(static_cast<std::size_t>(
            forward_words(step.statistics, step.pass.x.dtype, step.pass.x.sizes[1]))),
        all_(message_.size() * static_cast<std::size_t>(ranks)) {
    forward_begin(step, message_.data(), execution);
  }
  Merged gather(const AgreedCall& call, Communicator& communicator) {
    const int ranks = communicator.size();
    try {
      communicator.all_gather(std::as_bytes(std::span(message_)),
                              std::as_writable_bytes(std::span(all_)));
    } catch (const DivergenceError& error) {
      explain_divergence(error, call, communicator);
    }
    std::int64_t* to = all_.data();
    for (std::size_t i = 0; i < all_.size(); i += message_.size()) {
      for (std::size_t w = 0; w < kHeaderWords; ++w) {
        header_[w] += all_[i + w];
      }
      to = std::copy_n(all_.data() + i + kHeaderWords, message_.size() - kHeaderWords, to);
    }
    check_agreement(read_header(header_.data(), ranks), call, communicator);
    return {header_.data(), all_.data(), call.dtype, ranks};
  }

 private:
  cpu::ScratchArray<std::int64_t> message_;
  cpu::ScratchArray<std::int64_t> all_;
  std::array<std::int64_t, kHeaderWords> header_{};
};

AgreedCall agreed(const LayerCall& call, Direction direction) {
  AgreedCall agreed;
  agreed.options = &call.layer.options;
  agreed.direction = direction;
  agreed.name = call.layer.name;
  agreed.layer = call.layer.number;
  agreed.call = call.number.value_or(0);
  agreed.channels = call.x.sizes[1];
  agreed.dtype = call.x.dtype;
  agreed.elements = has_elements(call.x);
  return agreed;
}

}  // namespace

void forward_on_cpu(const LayerCall& call, const BatchNorm::Forward& f, SavedState& saved,
                    const Execution& execution) {
  const BatchNorm::Options& options = call.layer.options;
  Communicator& communicator = *call.layer.on_cpu;
  const auto number = static_cast<std::int64_t>(call.number.value_or(0));
  const Running running{f.running_mean, f.running_var, f.num_batches_tracked,
                        nullptr,        nullptr,       options.momentum};
  AgreedCall forward;
  ForwardStep step;
  std::optional<GatheredRecords> gathered;
  std::optional<LayerSum> sum;
  before_exchange(communicator, call, [&] {
    check_layer_forward(options, f);
    check_on_cpu(f.x);
    forward = agreed(call, Direction::kForward);
    forward.residual = !f.residual.absent();
    forward.weight = !f.weight.absent();
    forward.bias = !f.bias.absent();
    saved.reserve(f.x, forward.residual && options.activation.kind != ActivationKind::kNone,
                  nullptr);
    step = {{f.x, f.mask, f.weight, f.bias, f.residual, f.y, saved.activation_mask, saved.mean,
             saved.var, saved.rstd, options.eps, options.activation},
            options.statistics,
            layer_identity(forward.layer, options.activation, options.statistics, forward.residual,
                           forward.weight, forward.bias),
            &number,
            0,
            {},
            saved.info};
    running.check();
    saved.fingerprint = forward.fingerprint();
    if (options.statistics == Statistics::kWelford) {
      gathered.emplace(step, communicator.size(), execution);
    } else if (communicator.size() > 1) {
      sum.emplace(f.x, forward, communicator);
    }
  });
  if (gathered.has_value()) {
    forward_finish(step, gathered->gather(forward, communicator), execution);
    saved.count = step.info[0];
  } else {
    saved.count = sum.has_value() ? sum->run(call, forward,
                                             [&](GroupSum& group) {
                                               return forward_in_group(step.pass, group, execution);
                                             })
                                  : forward_of_one_rank(step.pass, execution).count;
  }
  // Last: a step that fails has updated nothing, and can be made again.
  running.update(saved.mean, saved.var, saved.channels, saved.count);
}

void backward_on_cpu(const LayerCall& call, const BatchNorm::Backward& b, const SavedState& saved,
                     const Execution& execution) {
  Communicator& communicator = *call.layer.on_cpu;
  const ActivationGradient through{call.layer.options.activation, b.weight, b.bias,
                                   saved.activation_mask};
  AgreedCall backward;
  std::optional<LayerSum> sum;
  before_exchange(communicator, call, [&] {
    check_backward(b);
    check_on_cpu(b.x);
    check_saved(saved, call.layer, b);
    backward = agreed(call, Direction::kBackward);
    backward.forward = saved.fingerprint;
    backward.weight = !b.weight.absent();
    backward.bias = !b.bias.absent();
    if (communicator.size() > 1) {
      sum.emplace(b.x, backward, communicator);
    }
  });
  if (sum.has_value()) {
    check_count(
        sum->run(call, backward,
                 [&](GroupSum& group) {
                   return backward_in_group(
                       {b.dy, b.x, b.mask, saved.mean, saved.rstd, through, b.weight, b.dresidual,
                        b.dx, b.dweight, b.dbias, b.affine == AffineGradients::kShare, saved.count},
                       group, execution);
                 }),
        saved.count);
  } else {
    check_count(SampleView(b.x, b.mask).count(), saved.count);
    backward_of_one_rank({.dy = b.dy,
                          .x = b.x,
                          .mask = b.mask,
                          .mean = saved.mean,
                          .rstd = saved.rstd,
                          .through = through,
                          .weight = b.weight,
                          .u = b.dresidual,
                          .dx = b.dx,
                          .dweight = b.dweight,
                          .dbias = b.dbias,
                          .count = saved.count},
                         execution);
  }
}

void evaluate_on_cpu(const BatchNorm::Options& options, const BatchNorm::Evaluate& e,
                     const Execution& execution) {
  check_evaluate(options, e);
  check_available(e.x.device);
  const std::int64_t channels = e.x.sizes[1];
  if (e.running_mean.absent()) {
    const cpu::ScratchArray<double> statistics(3 * static_cast<std::size_t>(channels));
    double* const mean = statistics.data();
    forward_of_one_rank({e.x, e.mask, e.weight, e.bias, e.residual, e.y, nullptr, mean,
                         mean + channels, mean + 2 * channels, options.eps, options.activation},
                        execution);
    return;
  }
  const EvaluationStatistics statistics(e.running_mean, e.running_var, channels, options.eps);
  normalize({e.x, e.mask, statistics.mean.data(), statistics.rstd.data(), e.weight, e.bias,
             e.residual, e.y, nullptr, options.activation},
            execution);
}

void evaluate_backward_on_cpu(const BatchNorm::Options& options,
                              const BatchNorm::EvaluateBackward& e, const Execution& execution) {
  check_evaluate_backward(options, e);
  check_available(e.x.device);
  const std::int64_t channels = e.x.sizes[1];
  const EvaluationStatistics statistics(e.running_mean, e.running_var, channels, options.eps);
  const double* mean = statistics.mean.data();
  const double* rstd = statistics.rstd.data();
  ActivationGradient through{options.activation, e.weight, e.bias};
  const bool activated = options.activation.kind != ActivationKind::kNone;
  const bool masked = activated && !e.residual.absent();
  const cpu::ScratchArray<std::uint8_t> activation_mask(
      masked ? static_cast<std::size_t>(activation_mask_bytes(e.x)) : 0);
  if (masked) {
    normalize({e.x, e.mask, mean, rstd, e.weight, e.bias, e.residual, e.dx, activation_mask.data(),
               options.activation},
              execution);  // for the bits; dx is written again below
    through.activation_mask = activation_mask.data();
  }
  const cpu::ScratchArray<std::int64_t> message(
      static_cast<std::size_t>(message_words(e.x.dtype, channels)));
  const MutableTensorView& u = e.dresidual.absent() ? e.dx : e.dresidual;
  const bool keep = activated || !e.dresidual.absent();
  local_gradients({e.dy, e.x, e.mask, mean, rstd, through, keep ? u : MutableTensorView()},
                  message.data(), 0, execution);
  evaluation_input_gradient(keep ? TensorView(u) : e.dy, e.mask, rstd, e.weight, e.dx, execution);
  affine_gradient_shares(
      message.data() + kHeaderWords, e.x.dtype,
      {.mean = mean, .rstd = rstd, .dweight = e.dweight, .dbias = e.dbias, .channels = channels},
      execution);
}

}  // namespace syncbn
