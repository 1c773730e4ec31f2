// SPDX-License-Identifier: Apache-2.0
#include "syncbn/step.hpp"

#include <limits>
#include <string>

#include "channel_values.hpp"
#include "checks.hpp"
#include "cpu/float_environment.hpp"
#include "statistics/finalize.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/welford.hpp"

// The order of a direction, for both devices; the arithmetic is in the passes.
namespace syncbn {
namespace {

cuda::Stream stream_of(const Execution& execution) { return {execution.stream}; }

std::int64_t channels_of(const TensorView& x) {
  check_samples("x", x);
  return x.sizes[1];
}

bool on_cuda(const TensorView& x) { return x.device == Device::kCuda; }

cuda::RunningStatistics on_device(const Running& running) {
  return {running.mean, running.var, running.batches, running.call, running.count};
}

Normalization normalization(const ForwardPass& p) {
  return {p.x,         p.mask, p.mean, p.rstd, p.weight, p.bias, p.residual, p.y, p.activation_mask,
          p.activation};
}

GradientSums sums_of(const BackwardPass& p) {
  return {p.dy, p.x, p.mask, p.mean, p.rstd, p.through, p.u};
}

/// What comes back through the activation is in u, if that is there.
InputGradient gradient(const BackwardStep& step) {
  const BackwardPass& p = step.pass;
  const bool kept = !p.u.absent();
  return {kept ? TensorView(p.u) : p.dy,           p.x, p.mask, p.mean, p.rstd, step.coefficients,
          kept ? ActivationGradient() : p.through, p.dx};
}

ParameterGradients parameters(const BackwardStep& step, bool wanted) {
  const BackwardPass& p = step.pass;
  return {p.mean,
          p.rstd,
          p.weight,
          step.coefficients,
          wanted ? p.dweight : MutableTensorView(),
          wanted ? p.dbias : MutableTensorView(),
          p.x.sizes[1]};
}

/// The merged words as statistics. Gives back the count of elements.
std::int64_t statistics_on_cpu(const ForwardStep& step, const Merged& merged,
                               const Execution& execution) {
  const ForwardPass& p = step.pass;
  const std::int64_t channels = channels_of(p.x);
  const MessageInfo info = read_header(merged.header, merged.ranks);
  check_header(info);
  if (step.statistics == Statistics::kWelford) {
    const DType dtype = info.any_data ? info.dtype : p.x.dtype;
    merge_welford(info, merged.words, p.mean, p.var, p.rstd, channels, merged.ranks,
                  welford_words(dtype, channels), p.eps);
  } else {
    finalize_moments(info, merged.words, p.mean, p.var, p.rstd, channels, p.eps, execution);
  }
  return info.count;
}

void statistics_on_cuda(const ForwardStep& step, const Merged& merged, const cuda::Stream& stream) {
  const ForwardPass& p = step.pass;
  const std::int64_t channels = channels_of(p.x);
  const cuda::RunningStatistics running = on_device(step.running);
  if (step.statistics == Statistics::kWelford) {
    cuda::merge_welford(merged.words, merged.dtype, merged.ranks, p.mean, p.var, p.rstd, step.info,
                        channels, p.eps, stream);
    cuda::update_running_statistics(running, p.mean, p.var, step.info, channels,
                                    step.running.momentum, stream);
  } else {
    cuda::finalize_moments(merged.header, merged.dtype, merged.ranks, p.mean, p.var, p.rstd,
                           step.info, channels, p.eps, running, step.running.momentum, stream);
  }
}

}  // namespace

void Running::check() const {
  constexpr std::int64_t kMost = std::int64_t{1} << 53;  // what a quotient is made of
  if (batches == nullptr) {
    if (!momentum.has_value() && !(mean.absent() && var.absent())) {
      throw InvalidArgument(
          "num_batches_tracked: got null, expected a counter (momentum is empty, which asks for "
          "cumulative averaging)");
    }
    return;
  }
  if (!momentum.has_value() && (*batches < 0 || *batches > kMost)) {
    throw InvalidArgument("num_batches_tracked: got " + std::to_string(*batches) +
                          ", expected 0 to 2^53");
  }
  if (*batches == std::numeric_limits<std::int64_t>::max()) {
    throw InvalidArgument(
        "num_batches_tracked: got 9223372036854775807, expected room for one more");
  }
}

void Running::update(const double* batch_mean, const double* batch_var, std::int64_t channels,
                     std::int64_t elements) const {
  const std::int64_t before = batches == nullptr ? 0 : *batches;
  const double factor =
      momentum.has_value() ? *momentum : cumulative_factor(static_cast<double>(before));
  update_running_statistics(mean, var, batch_mean, batch_var, channels, elements, factor);
  if (batches != nullptr && elements > 0) {  // last: the call before may lack memory
    *batches = before + 1;
  }
  if (call != nullptr) {
    *call = static_cast<std::int64_t>(static_cast<std::uint64_t>(*call) + 1);
  }
  if (count != nullptr) {
    *count = elements;
  }
}

void check_count(std::int64_t backward, std::int64_t forward) {
  if (backward != forward) {
    throw DivergenceError("backward: the ranks bring " + std::to_string(backward) +
                          " elements per channel, forward had " + std::to_string(forward));
  }
}

std::int64_t forward_words(Statistics statistics, DType dtype, std::int64_t channels) {
  return statistics == Statistics::kWelford ? kHeaderWords + welford_words(dtype, channels)
                                            : message_words(dtype, channels);
}

void forward_begin(const ForwardStep& step, std::int64_t* message, const Execution& execution) {
  const ForwardPass& p = step.pass;
  const std::int64_t channels = channels_of(p.x);
  const bool welford = step.statistics == Statistics::kWelford;
  if (on_cuda(p.x)) {
    const cuda::ForwardCall call{step.layer, step.call, p.eps, step.backward};
    if (welford) {
      cuda::local_welford(p.x, p.mask, call, message, stream_of(execution));
    } else {
      cuda::local_moments(p.x, p.mask, call, message, step.workspace, stream_of(execution));
    }
    return;
  }
  check_array("info", step.info, 2);
  const std::uint64_t number = step.call == nullptr ? 0 : static_cast<std::uint64_t>(*step.call);
  const std::uint32_t tag = fingerprint(step.layer, number, Direction::kForward, channels, p.eps);
  if (welford) {
    local_welford(p.x, p.mask, message, tag, execution);
  } else {
    local_moments(p.x, p.mask, message, tag, execution);
  }
  message[kHeaderBackward] = step.backward;
  step.info[1] = tag;
}

void forward_finish(const ForwardStep& step, const Merged& merged, const Execution& execution) {
  const ForwardPass& p = step.pass;
  if (on_cuda(p.x)) {
    statistics_on_cuda(step, merged, stream_of(execution));
  } else {
    step.info[0] = statistics_on_cpu(step, merged, execution);
    // First: the other ranks make these updates, whatever becomes of y here.
    step.running.update(p.mean, p.var, p.x.sizes[1], step.info[0]);
  }
  if (!p.y.absent()) {
    forward_map(p, execution);
  }
}

void forward_map(const ForwardPass& pass, const Execution& execution) {
  if (on_cuda(pass.x)) {
    cuda::normalize(normalization(pass), stream_of(execution));
  } else {
    normalize(normalization(pass), execution);
  }
}

void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                           double* mean, double* var, double* rstd, double eps,
                           const Execution& execution) {
  if (on_cuda(running_mean)) {
    cuda::evaluation_statistics(running_var, running_var, var, rstd, eps, stream_of(execution));
    cuda::evaluation_statistics(running_mean, running_var, mean, rstd, eps, stream_of(execution));
    return;
  }
  const cpu::FloatEnvironment environment;
  const std::int64_t channels = running_mean.sizes[0];
  load_channel_values(running_mean, 0, channels, 0.0, mean);
  load_channel_values(running_var, 0, channels, 1.0, var);
  for (std::int64_t c = 0; c < channels; ++c) {
    rstd[c] = rstd_of(var[c], eps);
  }
}

void backward_begin(const BackwardStep& step, std::int64_t* message, std::int64_t* copy,
                    const Execution& execution) {
  const GradientSums sums = sums_of(step.pass);
  if (on_cuda(sums.x)) {
    cuda::local_gradients(sums, step.info, message, step.workspace, stream_of(execution), copy);
  } else {
    local_gradients(sums, message, backward_fingerprint(static_cast<std::uint32_t>(step.info[1])),
                    execution);
  }
}

void backward_finish(const BackwardStep& step, const std::int64_t* own, const Merged& merged,
                     const Execution& execution) {
  const BackwardPass& p = step.pass;
  if (on_cuda(p.x)) {
    cuda::finalize_gradients(merged.header, merged.dtype, merged.ranks, p.share ? own : nullptr,
                             step.info, parameters(step, true), stream_of(execution));
    cuda::input_gradient(gradient(step), stream_of(execution));
    return;
  }
  const MessageInfo info = read_header(merged.header, merged.ranks);
  check_header(info);
  check_count(info.count, step.info[0]);
  if (p.share) {
    backward_shares(step, own, execution);
  }
  finalize_gradients(info, merged.words, parameters(step, !p.share), info.count, execution);
  input_gradient(gradient(step), execution);
}

void backward_shares(const BackwardStep& step, const std::int64_t* own,
                     const Execution& execution) {
  const DType dtype = step.pass.x.dtype;
  if (on_cuda(step.pass.x)) {  // as if this rank were alone
    cuda::finalize_gradients(own, dtype, 1, nullptr, nullptr, parameters(step, true),
                             stream_of(execution));
  } else {
    affine_gradient_shares(own + kHeaderWords, dtype, parameters(step, true), execution);
  }
}

}  // namespace syncbn
