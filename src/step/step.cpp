// SPDX-License-Identifier: Apache-2.0
#include "syncbn/step.hpp"

#include <string>

#include "step/device.hpp"
#include "tensors/checks.hpp"

// The order of a direction, for both devices; the arithmetic is in the passes.
namespace syncbn {
namespace {

/// Of a checked tensor.
const DevicePasses& passes_for(const TensorView& x) { return passes_of(x.device); }

/// All numbers of a step, before any of them is used or tells the device.
void check_step(const ForwardStep& step) {
  const TensorView& x = step.pass.x;
  const Running& running = step.running;
  check_samples("x", x);
  check_statistics(step.statistics);
  check_eps(step.pass.eps);
  check_activation(step.pass.activation);
  check_entries("running_mean", running.mean, x);
  check_entries("running_var", running.var, x);
  if (running.momentum.has_value()) {
    check_momentum(*running.momentum);
  }
  check_counter(running, x.device);
}

void check_step(const BackwardStep& step) {
  check_samples("x", step.pass.x);
  check_activation(step.pass.through.activation);
  if (step.info != nullptr && step.pass.x.device == Device::kCpu) {
    check_elements_over_ranks("info", step.info[0]);
  }
}

void check_merged(const Merged& merged) {
  check_ranks(merged.ranks);
  check_dtype("merged.dtype", merged.dtype);
}

void check_sum(const GroupSum& group) {
  check_ranks(group.ranks);
  if (group.ranks > 1) {
    check_array("sum", group.sum, 1);
  }
  check_timeout(group.slice, "slice", 0);
}

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

std::int64_t forward_words(Statistics statistics, DType dtype, std::int64_t channels, int ranks) {
  check_statistics(statistics);
  check_ranks(ranks);
  return statistics == Statistics::kWelford ? kHeaderWords + ranks * welford_words(dtype, channels)
                                            : message_words(dtype, channels);
}

void forward_begin(const ForwardStep& step, std::int64_t* message, const Execution& execution) {
  check_step(step);
  check_ranks(step.ranks);
  check_rank(step.rank, step.ranks);
  passes_for(step.pass.x).forward_sums(step, message, execution);
}

void forward_finish(const ForwardStep& step, const Merged& merged, const Execution& execution) {
  check_step(step);
  check_merged(merged);
  const ForwardPass& p = step.pass;
  const DevicePasses& passes = passes_for(p.x);
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
  check_step(step);
  check_array("info", step.info, kInfoWords);
  passes_for(step.pass.x).update(step, execution);
}

void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                           double* mean, double* var, double* rstd, double eps,
                           const Execution& execution) {
  if (running_mean.sizes.size() != 1) {
    refuse("running_mean", std::to_string(running_mean.sizes.size()) + " axes", "1");
  }
  const std::int64_t channels = running_mean.sizes[0];
  check_channels(channels);
  check_per_channel("running_mean", running_mean, channels, running_mean.device);
  check_per_channel("running_var", running_var, channels, running_mean.device);
  check_array("running_var", running_var.data, channels);
  check_array("mean", mean, channels);
  check_array("rstd", rstd, channels);
  check_eps(eps);
  passes_for(running_mean)
      .evaluation_statistics(running_mean, running_var, mean, var, rstd, eps, execution);
}

void recover_input(const InputRecovery& pass, const Execution& execution) {
  check_samples("y", pass.y);
  passes_for(pass.y).recover_input(pass, execution);
}

void backward_begin(const BackwardStep& step, std::int64_t* message, std::int64_t* copy,
                    const Execution& execution) {
  check_step(step);
  const BackwardPass& p = step.pass;
  passes_for(p.x).gradient_sums(step, {p.dy, p.x, p.mask, p.mean, p.rstd, p.through, p.u}, message,
                                copy, execution);
}

void backward_finish(const BackwardStep& step, const std::int64_t* own, const Merged& merged,
                     const Execution& execution) {
  check_step(step);
  check_merged(merged);
  const BackwardPass& p = step.pass;
  const DevicePasses& passes = passes_for(p.x);
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
  check_step(step);
  check_sum(group);
  check_array("info", step.info, kInfoWords);
  return passes_for(step.pass.x).forward_at_once(step, group, execution);
}

Reached backward_at_once(const BackwardStep& step, GroupSum& group, const Execution& execution) {
  check_step(step);
  check_sum(group);
  return passes_for(step.pass.x).backward_at_once(step, group, execution);
}

std::int64_t workspace_words(DType dtype, std::int64_t channels) {
  check_dtype("dtype", dtype);
  check_channels(channels);
  return cuda_passes().workspace_words(dtype, channels);
}

}  // namespace syncbn
