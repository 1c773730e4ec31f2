// SPDX-License-Identifier: Apache-2.0
#include "syncbn/step.hpp"

#include "checks.hpp"
#include "step/device.hpp"

// The order of a direction, for both devices; the arithmetic is in the passes.
namespace syncbn {
namespace {

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

}  // namespace

std::int64_t forward_words(Statistics statistics, DType dtype, std::int64_t channels) {
  return statistics == Statistics::kWelford ? kHeaderWords + welford_words(dtype, channels)
                                            : message_words(dtype, channels);
}

void forward_begin(const ForwardStep& step, std::int64_t* message, const Execution& execution) {
  check_samples("x", step.pass.x);
  passes_for(step.pass.x).forward_sums(step, message, execution);
}

void forward_finish(const ForwardStep& step, const Merged& merged, const Execution& execution) {
  const ForwardPass& p = step.pass;
  const DevicePasses& passes = passes_for(p.x);
  check_samples("x", p.x);
  // What is updated comes first: the other ranks do the same, whatever becomes of y here.
  if (merged.header != nullptr) {
    check_array("info", step.info, kInfoWords);
    passes.forward_statistics(step, merged, execution);
  }
  if (merged.header == nullptr || !p.y.absent()) {
    passes.normalize({p.x, p.mask, p.mean, p.rstd, p.weight, p.bias, p.residual, p.y,
                      p.activation_mask, p.activation},
                     execution);
  }
}

void forward_update(const ForwardStep& step, const Execution& execution) {
  check_samples("x", step.pass.x);
  check_array("info", step.info, kInfoWords);
  passes_for(step.pass.x).update(step, execution);
}

void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                           double* mean, double* var, double* rstd, double eps,
                           const Execution& execution) {
  passes_for(running_mean)
      .evaluation_statistics(running_mean, running_var, mean, var, rstd, eps, execution);
}

void recover_input(const InputRecovery& pass, const Execution& execution) {
  passes_for(pass.y).recover_input(pass, execution);
}

void backward_begin(const BackwardStep& step, std::int64_t* message, std::int64_t* copy,
                    const Execution& execution) {
  const BackwardPass& p = step.pass;
  passes_for(p.x).gradient_sums(step, {p.dy, p.x, p.mask, p.mean, p.rstd, p.through, p.u}, message,
                                copy, execution);
}

void backward_finish(const BackwardStep& step, const std::int64_t* own, const Merged& merged,
                     const Execution& execution) {
  const BackwardPass& p = step.pass;
  const DevicePasses& passes = passes_for(p.x);
  check_samples("x", p.x);
  if (merged.header != nullptr) {
    if (p.share && own == nullptr && !(p.dweight.absent() && p.dbias.absent())) {
      throw InvalidArgument(
          "own: got null, expected the message that this rank sent, which has its share");
    }
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

Reached forward_at_once(const ForwardStep& step, GroupSum& group, const Execution& execution) {
  check_samples("x", step.pass.x);
  check_array("info", step.info, kInfoWords);
  return passes_for(step.pass.x).forward_at_once(step, group, execution);
}

Reached backward_at_once(const BackwardStep& step, GroupSum& group, const Execution& execution) {
  return passes_for(step.pass.x).backward_at_once(step, group, execution);
}

std::int64_t workspace_words(DType dtype, std::int64_t channels) {
  return cuda_passes().workspace_words(dtype, channels);
}

}  // namespace syncbn
