// SPDX-License-Identifier: Apache-2.0
#include "syncbn/step.hpp"

#include <string>

#include "statistics/float_environment.hpp"
#include "step/device.hpp"
#include "step/door_checks.hpp"

// The order of a direction, for both devices: the checks of its arguments come first, once. The
// arithmetic is in the passes.
namespace syncbn {
namespace {

/// Of a checked tensor.
const DevicePasses& passes_for(const TensorView& x) { return passes_of(x.device); }

/// What comes back through the activation is in u, if that is there.
InputGradient gradient(const BackwardStep& step) {
  const BackwardPass& p = step.pass;
  const bool kept = !p.u.absent();
  return {kept ? TensorView(p.u) : p.dy,           p.x, p.mask, p.mean, p.rstd, step.coefficients,
          kept ? ActivationGradient() : p.through, p.dx};
}

ParameterGradients parameters(const BackwardStep& step) {
  const BackwardPass& p = step.pass;
  return {p.mean, p.rstd, p.weight, step.coefficients, p.dweight, p.dbias, p.x.sizes[1]};
}

/// The message of the only rank.
Merged alone(const GroupSum& group, const TensorView& x) {
  const std::int64_t* const message = group.message.data();
  return {message, message + kHeaderWords, x.dtype, 1};
}

void begin(const BackwardStep& step, std::int64_t* message, std::int64_t* copy,
           const Execution& execution) {
  const BackwardPass& p = step.pass;
  passes_for(p.x).gradient_sums(step, {p.dy, p.x, p.mask, p.mean, p.rstd, p.through, p.u}, message,
                                copy, execution);
}

void finish(const ForwardStep& step, const Merged& merged, const Execution& execution) {
  const ForwardPass& p = step.pass;
  const DevicePasses& passes = passes_for(p.x);
  // What is updated comes first: the other ranks do the same, whatever becomes of y here.
  if (merged.header != nullptr) {
    passes.forward_statistics(step, merged, execution);
  }
  if (!p.y.absent()) {
    passes.normalize({p.x, p.mask, p.mean, p.rstd, p.weight, p.bias, p.residual, p.y,
                      p.activation_mask, p.activation},
                     execution);
  }
}

void finish(const BackwardStep& step, const std::int64_t* own, const Merged& merged,
            const Execution& execution) {
  const BackwardPass& p = step.pass;
  const DevicePasses& passes = passes_for(p.x);
  if (merged.header != nullptr) {
    passes.gradients(step, parameters(step), p.share ? own : nullptr, merged, execution);
    passes.input_gradient(gradient(step), execution);
    return;
  }
  if (!p.dx.absent()) {
    passes.evaluation_input_gradient(gradient(step).dy, p.mask, p.rstd, p.weight, p.dx, execution);
  }
  if (own != nullptr) {
    passes.shares(parameters(step), own, p.x.dtype, execution);
  }
}

}  // namespace

std::int64_t activation_mask_bytes(const TensorView& x) {
  check_samples("x", x);
  return ActivationMaskLayout(SampleView(x)).bytes;
}

double cumulative_factor(double batches) {
  const cpu::FloatEnvironment environment;
  if (!(batches >= 0)) {
    refuse("batches", std::to_string(batches), "a number of at least 0");
  }
  // A compiler may move arithmetic alone past the change of the mode.
  const volatile double before = batches;
  const volatile double factor = 1.0 / (before + 1.0);
  return factor;
}

std::int64_t forward_words(Statistics statistics, DType dtype, std::int64_t channels, int ranks) {
  check_statistics(statistics);
  check_ranks(ranks);
  const std::int64_t words = message_words(dtype, channels);  // checks both
  return statistics == Statistics::kWelford ? kHeaderWords + ranks * welford_words(dtype, channels)
                                            : words;
}

void forward_begin(const ForwardStep& step, std::int64_t* message, const Execution& execution) {
  check_forward_begin(step, message);
  passes_for(step.pass.x).forward_sums(step, message, execution);
}

void forward_finish(const ForwardStep& step, const Merged& merged, const Execution& execution) {
  check_forward_finish(step, merged);
  finish(step, merged, execution);
}

void forward_update(const ForwardStep& step, const Execution& execution) {
  check_forward_update(step);
  passes_for(step.pass.x).update(step, execution);
}

void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                           double* mean, double* var, double* rstd, double eps,
                           const Execution& execution) {
  check_evaluation(running_mean, running_var, mean, rstd, eps);
  passes_for(running_mean)
      .evaluation_statistics(running_mean, running_var, mean, var, rstd, eps, execution);
}

void recover_input(const InputRecovery& pass, const Execution& execution) {
  check_recovery(pass);
  passes_for(pass.y).recover_input(pass, execution);
}

void backward_begin(const BackwardStep& step, std::int64_t* message, std::int64_t* copy,
                    const Execution& execution) {
  check_backward_begin(step, message);
  begin(step, message, copy, execution);
}

void backward_finish(const BackwardStep& step, const std::int64_t* own, const Merged& merged,
                     const Execution& execution) {
  check_backward_finish(step, own, merged);
  finish(step, own, merged, execution);
}

Reached forward_at_once(const ForwardStep& step, GroupSum& group, const Execution& execution) {
  const TensorView& x = step.pass.x;
  check_forward_at_once(step, group);
  if (const auto at_once = passes_for(x).forward_at_once) {
    return at_once(step, group, execution);
  }
  passes_for(x).forward_sums(step, group.message.data(), execution);
  finish(step, alone(group, x), execution);
  return Reached::kOutput;
}

Reached backward_at_once(const BackwardStep& step, GroupSum& group, const Execution& execution) {
  const TensorView& x = step.pass.x;
  check_backward_at_once(step, group);
  if (const auto at_once = passes_for(x).backward_at_once) {
    return at_once(step, group, execution);
  }
  begin(step, group.message.data(), nullptr, execution);
  finish(step, group.message.data(), alone(group, x), execution);
  return Reached::kOutput;
}

std::int64_t workspace_words(DType dtype, std::int64_t channels) {
  check_dtype("dtype", dtype);
  check_channels(channels);
  return cuda_passes().workspace_words(dtype, channels);
}

}  // namespace syncbn
