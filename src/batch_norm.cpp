#include "syncbn/batch_norm.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <type_traits>

#include "agreement.hpp"
#include "channel_values.hpp"
#include "checks.hpp"
#include "cpu/float_environment.hpp"
#include "layer_call.hpp"
#include "sample_view.hpp"
#include "statistics/finalize.hpp"
#include "statistics/scalar.hpp"
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
                       const TensorView& running_var, double eps) {
    const std::int64_t channels = x.sizes[1];
    check_per_channel("running_mean", running_mean, channels, x.device);
    check_per_channel("running_var", running_var, channels, x.device);
    check_running(running_mean, running_var, false);
    check_available(x.device);
    const cpu::FloatEnvironment environment;
    mean = channel_values(running_mean, channels, 0.0);
    rstd = channel_values(running_var, channels, 1.0);
    for (double& value : rstd) {
      value = rstd_of(value, eps);
    }
  }
  std::vector<double> mean;
  std::vector<double> rstd;
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

/// The one message of a direction: sums it over the ranks and checks that they made the same call.
MessageInfo exchange(std::vector<std::int64_t>& message, const AgreedCall& call,
                     Communicator& communicator) {
  communicator.all_reduce_sum(message);
  const MessageInfo info = read_header(message.data(), communicator.size());
  check_agreement(info, call, communicator);
  return info;
}

/// Exact sums, summed over the ranks.
class ReproducibleMoments {
 public:
  void local(const TensorView& x, const MaskView& mask, std::uint32_t fingerprint, int,
             const Execution& execution) {
    message_.resize(static_cast<std::size_t>(message_words(x.dtype, x.sizes[1])));
    local_moments(x, mask, message_.data(), fingerprint, execution);
  }
  void merge(BatchStatistics& out, const AgreedCall& call, Communicator& communicator,
             const Execution& execution) {
    const MessageInfo info = exchange(message_, call, communicator);
    out.count = info.count;
    finalize_moments(info, message_.data() + kHeaderWords, out.mean.data(), out.var.data(),
                     out.rstd.data(), call.channels, call.options->eps, execution);
  }

 private:
  std::vector<std::int64_t> message_;
};

/// Mean and M2 of every rank, gathered; headers are summed here.
class GatheredMoments {
 public:
  void local(const TensorView& x, const MaskView& mask, std::uint32_t fingerprint, int ranks,
             const Execution& execution) {
    message_.resize(static_cast<std::size_t>(kHeaderWords + welford_words(x.dtype, x.sizes[1])));
    all_.resize(message_.size() * static_cast<std::size_t>(ranks));
    local_welford(x, mask, message_.data(), fingerprint, execution);
  }
  void merge(BatchStatistics& out, const AgreedCall& call, Communicator& communicator,
             const Execution&) {
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
  std::vector<std::int64_t> message_;
  std::vector<std::int64_t> all_;
};

/// A group of one sends nothing.
struct OwnMoments {
  void local(const TensorView&, const MaskView&, std::uint32_t, int, const Execution&) {}
};

template <class Moments>
BatchStatistics forward_with(const TensorView& x, const MaskView& mask, const TensorView& weight,
                             const TensorView& bias, const TensorView& residual,
                             const MutableTensorView& y, const RunningStatistics& running,
                             const BatchNormOptions& options, Communicator& communicator,
                             const Execution& execution) {
  BatchStatistics statistics;
  AgreedCall call;
  Moments moments;
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
    if (options.activation.kind != ActivationKind::kNone && !residual.absent()) {
      statistics.activation_mask.resize(static_cast<std::size_t>(activation_mask_bytes(x)));
    }
    for (auto* values : {&statistics.mean, &statistics.var, &statistics.rstd}) {
      values->resize(static_cast<std::size_t>(x.sizes[1]));
    }
    moments.local(x, mask, statistics.fingerprint, communicator.size(), execution);
  });
  double* const mean = statistics.mean.data();
  double* const rstd = statistics.rstd.data();
  std::uint8_t* const bits =
      statistics.activation_mask.empty() ? nullptr : statistics.activation_mask.data();
  if constexpr (std::is_same_v<Moments, OwnMoments>) {
    statistics.count =
        forward_of_one_rank(x, mask, weight, bias, residual, y, bits, mean, statistics.var.data(),
                            rstd, options.eps, options.activation, execution)
            .count;
  } else {
    moments.merge(statistics, call, communicator, execution);
    normalize(x, mask, mean, rstd, weight, bias, residual, y, bits, options.activation, execution);
  }
  update_running(running, options, statistics);
  return statistics;
}

}  // namespace

BatchStatistics batch_norm_forward(const TensorView& x, const MaskView& mask,
                                   const TensorView& weight, const TensorView& bias,
                                   const TensorView& residual, const MutableTensorView& y,
                                   const RunningStatistics& running,
                                   const BatchNormOptions& options, Communicator& communicator,
                                   const Execution& execution) {
  const auto forward = options.statistics == Statistics::kWelford ? forward_with<GatheredMoments>
                       : communicator.size() == 1 ? forward_with<OwnMoments>
                                                  : forward_with<ReproducibleMoments>;
  return forward(x, mask, weight, bias, residual, y, running, options, communicator, execution);
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
  const bool global = which == AffineGradients::kGlobal;
  const bool alone = communicator.size() == 1;
  const auto check_count = [&](std::int64_t count) {
    if (count != statistics.count) {
      throw DivergenceError("backward: the ranks bring " + std::to_string(count) +
                            " elements per channel, forward had " +
                            std::to_string(statistics.count));
    }
  };
  std::vector<std::int64_t> message;
  std::vector<std::int64_t> own;
  std::vector<double> coefficients;
  AgreedCall call;
  before_exchange(communicator, [&] {
    check_backward(dy, x, mask, weight, dx, dweight, dbias, dresidual, which, communicator.size());
    check_statistics(statistics, x);
    through = {statistics.activation, weight, bias,
               statistics.activation_mask.empty() ? nullptr : statistics.activation_mask.data()};
    if (alone) {
      return;
    }
    coefficients.resize(static_cast<std::size_t>(3 * x.sizes[1]));
    message.resize(static_cast<std::size_t>(message_words(x.dtype, x.sizes[1])));
    call.direction = Direction::kBackward;
    call.layer = statistics.layer;
    call.call = statistics.call;
    call.channels = x.sizes[1];
    call.dtype = x.dtype;
    call.elements = has_elements(x);
    call.forward = statistics.fingerprint;
    local_gradients(dy, x, mask, mean, rstd, through, dresidual, message.data(), call.fingerprint(),
                    execution);
    if (!global) {
      own = message;
    }
  });
  const std::int64_t channels = x.sizes[1];
  if (alone) {
    check_count(SampleView(x, mask).count());
    backward_of_one_rank(dy, x, mask, mean, rstd, through, weight, dresidual, dx, dweight, dbias,
                         statistics.count, execution);
    return;
  }
  const MessageInfo info = exchange(message, call, communicator);
  check_count(info.count);
  finalize_gradients(info, message.data() + kHeaderWords, mean, rstd, weight, coefficients.data(),
                     global ? dweight : MutableTensorView(), global ? dbias : MutableTensorView(),
                     channels, statistics.count, execution);
  if (!global) {
    affine_gradient_shares(own.data() + kHeaderWords, x.dtype, mean, rstd, dweight, dbias, channels,
                           execution);
  }
  if (dresidual.absent()) {
    input_gradient(dy, x, mask, mean, rstd, coefficients.data(), through, dx, execution);
  } else {  // what came back through the activation is there already
    input_gradient(dresidual, x, mask, mean, rstd, coefficients.data(), {}, dx, execution);
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
  std::vector<std::uint8_t> activation_mask;
  if (activated && !residual.absent()) {
    activation_mask.resize(static_cast<std::size_t>(activation_mask_bytes(x)));
    normalize(x, mask, mean, rstd, weight, bias, residual, dx, activation_mask.data(),
              options.activation, execution);  // for the bits; dx is written again below
    through.activation_mask = activation_mask.data();
  }
  std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(x.dtype, channels)));
  const MutableTensorView& u = dresidual.absent() ? dx : dresidual;
  const bool keep = activated || !dresidual.absent();
  local_gradients(dy, x, mask, mean, rstd, through, keep ? u : MutableTensorView(), message.data(),
                  0, execution);
  evaluation_input_gradient(keep ? TensorView(u) : dy, mask, rstd, weight, dx, execution);
  affine_gradient_shares(message.data() + kHeaderWords, x.dtype, mean, rstd, dweight, dbias,
                         channels, execution);
}

}  // namespace syncbn
