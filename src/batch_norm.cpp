#include "syncbn/batch_norm.hpp"

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
#include "layer_call.hpp"
#include "sample_view.hpp"
#include "statistics/finalize.hpp"
#include "statistics/scalar.hpp"
#include "syncbn/group_passes.hpp"
#include "syncbn/welford.hpp"

// Checks, passes and exchange in their order; the arithmetic is elsewhere.
namespace syncbn {
namespace {

void update_running(const RunningStatistics& running, const BatchNormOptions& options,
                    const BatchStatistics& statistics) {
  if (statistics.count == 0) {
    return;
  }
  const cpu::FloatEnvironment environment;  // the quotient is rounded by the contract too
  double factor = options.momentum.value_or(0.0);
  if (running.num_batches_tracked != nullptr && !options.momentum.has_value()) {
    factor = 1.0 / static_cast<double>(*running.num_batches_tracked + 1);
  }
  update_running_statistics(
      running.mean, running.var, statistics.mean.data(), statistics.var.data(),
      static_cast<std::int64_t>(statistics.mean.size()), statistics.count, factor);
  if (running.num_batches_tracked != nullptr) {  // last: the call before may lack memory
    ++*running.num_batches_tracked;
  }
}

/// cumulative: one is divided by it.
void check_counter(const std::int64_t* num_batches_tracked, bool cumulative) {
  constexpr std::int64_t kMost = std::int64_t{1} << 53;
  if (num_batches_tracked == nullptr) {
    return;
  }
  if (cumulative && (*num_batches_tracked < 0 || *num_batches_tracked > kMost)) {
    throw InvalidArgument("running.num_batches_tracked: got " +
                          std::to_string(*num_batches_tracked) + ", expected 0 to 2^53");
  }
  if (*num_batches_tracked == std::numeric_limits<std::int64_t>::max()) {
    throw InvalidArgument(
        "running.num_batches_tracked: got 9223372036854775807, expected room for one more");
  }
}

/// Running statistics as evaluation uses them.
struct EvaluationStatistics {
  EvaluationStatistics(const TensorView& x, const TensorView& running_mean,
                       const TensorView& running_var, double eps)
      : mean(static_cast<std::size_t>(x.sizes[1])), rstd(mean.size()) {
    const std::int64_t channels = x.sizes[1];
    check_per_channel("running_mean", running_mean, channels, x.device);
    check_per_channel("running_var", running_var, channels, x.device);
    check_running(running_mean, running_var, false);
    check_available(x.device);
    const cpu::FloatEnvironment environment;
    load_channel_values(running_mean, 0, channels, 0.0, mean.data());
    load_channel_values(running_var, 0, channels, 1.0, rstd.data());
    for (double& value : rstd) {
      value = rstd_of(value, eps);
    }
  }
  cpu::ScratchArray<double> mean;
  cpu::ScratchArray<double> rstd;
};

bool has_elements(const TensorView& x) {
  return std::find(x.sizes.begin(), x.sizes.end(), 0) == x.sizes.end();
}

void check_statistics(const BatchStatistics& statistics, const TensorView& x) {
  for (const auto* values : {&statistics.mean, &statistics.rstd}) {
    if (static_cast<std::int64_t>(values->size()) != x.sizes[1]) {
      throw InvalidArgument("statistics: got " + std::to_string(values->size()) +
                            " channels, expected those of x, " + std::to_string(x.sizes[1]));
    }
  }
  const auto bytes = static_cast<std::int64_t>(statistics.activation_mask.size());
  if (bytes != 0 && bytes != activation_mask_bytes(x)) {
    throw InvalidArgument("statistics: got an activation mask of " + std::to_string(bytes) +
                          " bytes, expected that of x's shape and layout, " +
                          std::to_string(activation_mask_bytes(x)));
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
  std::int64_t run(const AgreedCall& call, const Run& run) {
    Reached reached{};
    before_exchange(*this, [&] { reached = run(group_); });
    if (reached != Reached::kOutput) {
      check_agreement(group_.info, call, communicator_);
    }
    return group_.info.count;
  }

  /// After an error that the others do not see.
  void abandon(const std::string& reason) {
    if (!over_) {
      communicator_.abandon(reason);
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

/// Mean and M2 of every rank, gathered; headers are summed here.
class GatheredMoments {
 public:
  GatheredMoments(const TensorView& x, const MaskView& mask, std::uint32_t fingerprint, int ranks,
                  const Execution& execution)
      : message_(static_cast<std::size_t>(kHeaderWords + welford_words(x.dtype, x.sizes[1]))),
        all_(message_.size() * static_cast<std::size_t>(ranks)) {
    local_welford(x, mask, message_.data(), fingerprint, execution);
  }
  void merge(BatchStatistics& out, const AgreedCall& call, Communicator& communicator) {
    const int ranks = communicator.size();
    const std::size_t size = message_.size();
    communicator.all_gather(std::as_bytes(std::span(message_)),
                            std::as_writable_bytes(std::span(all_)));
    std::array<std::int64_t, kHeaderWords> header{};
    for (std::size_t i = 0; i < all_.size(); i += size) {
      for (std::size_t w = 0; w < kHeaderWords; ++w) {
        header[w] += all_[i + w];
      }
    }
    const MessageInfo info = read_header(header.data(), ranks);
    check_agreement(info, call, communicator);
    out.count = info.count;
    merge_welford(info, all_.data() + kHeaderWords, out.mean.data(), out.var.data(),
                  out.rstd.data(), call.channels, ranks, static_cast<std::int64_t>(size),
                  call.options->eps);
  }

 private:
  cpu::ScratchArray<std::int64_t> message_;
  cpu::ScratchArray<std::int64_t> all_;
};

}  // namespace

void batch_norm_forward(const TensorView& x, const MaskView& mask, const TensorView& weight,
                        const TensorView& bias, const TensorView& residual,
                        const MutableTensorView& y, const RunningStatistics& running,
                        const BatchNormOptions& options, Communicator& communicator,
                        const Execution& execution, BatchStatistics& statistics) {
  const bool welford = options.statistics == Statistics::kWelford;
  AgreedCall call;
  std::optional<GatheredMoments> gathered;
  std::optional<LayerSum> sum;
  before_exchange(communicator, [&] {
    check_forward(x, mask, weight, bias, residual, y, running.mean, running.var,
                  running.num_batches_tracked, options, communicator.size());
    check_available(x.device);
    check_counter(running.num_batches_tracked, !options.momentum.has_value());
    statistics.activation = options.activation;
    call.options = &options;
    call.layer = statistics.layer = options.layer;
    call.call = statistics.call = options.call;
    call.channels = x.sizes[1];
    call.dtype = x.dtype;
    call.elements = has_elements(x);
    call.residual = !residual.absent();
    statistics.fingerprint = call.fingerprint();
    const bool masked = options.activation.kind != ActivationKind::kNone && !residual.absent();
    statistics.activation_mask.resize(masked ? static_cast<std::size_t>(activation_mask_bytes(x))
                                             : 0);
    for (auto* values : {&statistics.mean, &statistics.var, &statistics.rstd}) {
      values->resize(static_cast<std::size_t>(x.sizes[1]));
    }
    if (welford) {
      gathered.emplace(x, mask, statistics.fingerprint, communicator.size(), execution);
    } else if (communicator.size() > 1) {
      sum.emplace(x, call, communicator);
    }
  });
  double* const mean = statistics.mean.data();
  double* const var = statistics.var.data();
  double* const rstd = statistics.rstd.data();
  std::uint8_t* const bits =
      statistics.activation_mask.empty() ? nullptr : statistics.activation_mask.data();
  if (gathered.has_value()) {
    gathered->merge(statistics, call, communicator);
    normalize(x, mask, mean, rstd, weight, bias, residual, y, bits, options.activation, execution);
  } else if (sum.has_value()) {
    statistics.count = sum->run(call, [&](GroupSum& group) {
      return forward_in_group(x, mask, weight, bias, residual, y, bits, mean, var, rstd,
                              options.eps, options.activation, group, execution);
    });
  } else {
    statistics.count = forward_of_one_rank(x, mask, weight, bias, residual, y, bits, mean, var,
                                           rstd, options.eps, options.activation, execution)
                           .count;
  }
  update_running(running, options, statistics);
}

BatchStatistics batch_norm_forward(const TensorView& x, const MaskView& mask,
                                   const TensorView& weight, const TensorView& bias,
                                   const TensorView& residual, const MutableTensorView& y,
                                   const RunningStatistics& running,
                                   const BatchNormOptions& options, Communicator& communicator,
                                   const Execution& execution) {
  BatchStatistics statistics;
  batch_norm_forward(x, mask, weight, bias, residual, y, running, options, communicator, execution,
                     statistics);
  return statistics;
}

void batch_norm_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                         const TensorView& weight, const TensorView& bias,
                         const BatchStatistics& statistics, const MutableTensorView& dx,
                         const MutableTensorView& dweight, const MutableTensorView& dbias,
                         const MutableTensorView& dresidual, AffineGradients which,
                         Communicator& communicator, const Execution& execution) {
  const double* mean = statistics.mean.data();
  const double* rstd = statistics.rstd.data();
  ActivationGradient through;
  AgreedCall call;
  std::optional<LayerSum> sum;
  const auto check_count = [&](std::int64_t count) {
    if (count != statistics.count) {
      throw DivergenceError("backward: the ranks bring " + std::to_string(count) +
                            " elements per channel, forward had " +
                            std::to_string(statistics.count));
    }
  };
  before_exchange(communicator, [&] {
    check_backward(dy, x, mask, weight, dx, dweight, dbias, dresidual, which, communicator.size());
    check_available(x.device);
    check_statistics(statistics, x);
    check_per_channel("bias", bias, x.sizes[1], x.device);
    through = {statistics.activation, weight, bias,
               statistics.activation_mask.empty() ? nullptr : statistics.activation_mask.data()};
    call.direction = Direction::kBackward;
    call.layer = statistics.layer;
    call.call = statistics.call;
    call.channels = x.sizes[1];
    call.dtype = x.dtype;
    call.elements = has_elements(x);
    call.forward = statistics.fingerprint;
    if (communicator.size() > 1) {
      sum.emplace(x, call, communicator);
    }
  });
  if (sum.has_value()) {
    check_count(sum->run(call, [&](GroupSum& group) {
      return backward_in_group(dy, x, mask, mean, rstd, through, weight, dresidual, dx, dweight,
                               dbias, which == AffineGradients::kShare, statistics.count, group,
                               execution);
    }));
  } else {
    check_count(SampleView(x, mask).count());
    backward_of_one_rank(dy, x, mask, mean, rstd, through, weight, dresidual, dx, dweight, dbias,
                         statistics.count, execution);
  }
}

void batch_norm_evaluate(const TensorView& x, const MaskView& mask, const TensorView& weight,
                         const TensorView& bias, const TensorView& residual,
                         const TensorView& running_mean, const TensorView& running_var,
                         const MutableTensorView& y, const BatchNormOptions& options,
                         const Execution& execution) {
  BatchNormOptions local = options;
  local.momentum = 0.0;                          // nothing is updated
  local.statistics = Statistics::kReproducible;  // nothing is exchanged
  if (!check_running(running_mean, running_var, true)) {
    const auto alone = self_communicator();
    batch_norm_forward(x, mask, weight, bias, residual, y, {}, local, *alone, execution);
    return;
  }
  check_forward(x, mask, weight, bias, residual, y, {}, {}, nullptr, local, 1);
  const EvaluationStatistics statistics(x, running_mean, running_var, options.eps);
  normalize(x, mask, statistics.mean.data(), statistics.rstd.data(), weight, bias, residual, y,
            nullptr, options.activation, execution);
}

void batch_norm_evaluate_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                                  const TensorView& weight, const TensorView& bias,
                                  const TensorView& residual, const TensorView& running_mean,
                                  const TensorView& running_var, const MutableTensorView& dx,
                                  const MutableTensorView& dweight, const MutableTensorView& dbias,
                                  const MutableTensorView& dresidual,
                                  const BatchNormOptions& options, const Execution& execution) {
  check_evaluate_backward(dy, x, mask, residual, dx, dweight, dbias, dresidual, options);
  const std::int64_t channels = x.sizes[1];
  const EvaluationStatistics statistics(x, running_mean, running_var, options.eps);
  const double* mean = statistics.mean.data();
  const double* rstd = statistics.rstd.data();
  ActivationGradient through{options.activation, weight, bias};
  const bool activated = options.activation.kind != ActivationKind::kNone;
  const bool masked = activated && !residual.absent();
  const cpu::ScratchArray<std::uint8_t> activation_mask(
      masked ? static_cast<std::size_t>(activation_mask_bytes(x)) : 0);
  if (masked) {
    normalize(x, mask, mean, rstd, weight, bias, residual, dx, activation_mask.data(),
              options.activation, execution);  // for the bits; dx is written again below
    through.activation_mask = activation_mask.data();
  }
  const cpu::ScratchArray<std::int64_t> message(
      static_cast<std::size_t>(message_words(x.dtype, channels)));
  const MutableTensorView& u = dresidual.absent() ? dx : dresidual;
  const bool keep = activated || !dresidual.absent();
  local_gradients(dy, x, mask, mean, rstd, through, keep ? u : MutableTensorView(), message.data(),
                  0, execution);
  evaluation_input_gradient(keep ? TensorView(u) : dy, mask, rstd, weight, dx, execution);
  affine_gradient_shares(message.data() + kHeaderWords, x.dtype, mean, rstd, dweight, dbias,
                         channels, execution);
}

}  // namespace syncbn
