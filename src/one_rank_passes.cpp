// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "pass_arguments.hpp"
#include "syncbn/passes.hpp"

// The passes of a group of one rank: checks and order; the arithmetic is elsewhere.
namespace syncbn {
namespace {

/// What a message of these samples alone would say. Throws if they are too many.
MessageInfo info_of(const SampleView& samples) {
  MessageInfo info;
  info.count = samples.count();
  info.agree = true;
  info.any_data = info.count > 0;
  info.dtype = info.any_data ? samples.dtype : info.dtype;
  check_header(info);
  return info;
}

}  // namespace

MessageInfo moments_of_one_rank(const TensorView& x, const MaskView& mask, double* mean,
                                double* var, double* rstd, double eps, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  check_samples("x", x);
  check_mask(mask, x);
  check_available(x.device);
  const std::int64_t channels = x.sizes[1];
  check_moments(mean, var, rstd, eps, channels);
  const SampleView samples(x, mask);
  const MessageInfo info = info_of(samples);
  if (info.count == 0) {
    fill_moments(true, mean, var, rstd, channels);
  } else if (channels > 0) {
    cpu::moments_of_one_rank(samples, {info.count, eps, mean, var, rstd}, executor);
  }
  return info;
}

MessageInfo gradients_of_one_rank(const GradientSums& p, const ParameterGradients& g,
                                  std::int64_t count, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  check_gradient_inputs(p);
  check_finalize_gradients(g, p.x);
  const std::int64_t channels = p.x.sizes[1];
  check_array("coefficients", g.coefficients, 3 * channels);
  const SampleView samples(p.x, p.mask);
  const MessageInfo info = info_of(samples);
  const bool valid = info.count == count;
  const cpu::Gradients to{valid ? count : 1, g.mean,    g.rstd,  g.weight,
                          g.coefficients,    g.dweight, g.dbias, channels};
  if (!samples.empty() && channels > 0) {  // u is written, whatever counts
    const PullbackArguments pullback(p.through, p.mean, p.rstd, channels);
    const std::optional<SampleView> kept = optional_view(p.u);
    cpu::gradients_of_one_rank(SampleView(p.dy), samples, kept ? &*kept : nullptr, pullback.view(),
                               to, executor);
  }
  if (!valid || count == 0) {
    fill_gradients(valid, to, 0, channels);
  }
  return info;
}

MessageInfo forward_of_one_rank(const ForwardPass& p, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  check_normalize(p);
  check_moments(p.mean, p.var, p.rstd, p.eps, p.x.sizes[1]);
  const SampleView samples(p.x, p.mask);
  const std::int64_t channels = samples.channels;
  const MessageInfo info = info_of(samples);
  if (info.count == 0) {  // what y becomes then, the pass alone knows
    fill_moments(true, p.mean, p.var, p.rstd, channels);
    normalize({p.x, p.mask, p.mean, p.rstd, p.weight, p.bias, p.residual, p.y, p.activation_mask,
               p.activation},
              execution);
  } else if (channels > 0) {
    const AffineValues affine(p.weight, p.bias, channels);
    const std::optional<SampleView> added = optional_view(p.residual);
    cpu::forward_of_one_rank(samples, added ? &*added : nullptr, SampleView(p.y), p.activation_mask,
                             affine.scale(), affine.shift(), p.activation,
                             {info.count, p.eps, p.mean, p.var, p.rstd}, executor);
  }
  return info;
}

MessageInfo backward_of_one_rank(const BackwardPass& p, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  check_gradient_inputs(p);
  check_like("dx", p.dx, p.x);
  check_output("dx", p.dx);
  const cpu::ScratchArray<double> coefficients(static_cast<std::size_t>(3 * p.x.sizes[1]));
  const SampleView samples(p.x, p.mask);
  const MessageInfo info = info_of(samples);
  if (info.count != p.count || p.count == 0 || samples.channels == 0) {
    gradients_of_one_rank(
        {p.dy, p.x, p.mask, p.mean, p.rstd, p.through, p.u},
        {p.mean, p.rstd, p.weight, coefficients.data(), p.dweight, p.dbias, samples.channels},
        p.count, execution);
    input_gradient({p.u.absent() ? p.dy : TensorView(p.u), p.x, p.mask, p.mean, p.rstd,
                    coefficients.data(), p.u.absent() ? p.through : ActivationGradient(), p.dx},
                   execution);
    return info;
  }
  check_finalize_gradients(p, p.x);
  const PullbackArguments pullback(p.through, p.mean, p.rstd, samples.channels);
  const std::optional<SampleView> kept = optional_view(p.u);
  cpu::backward_of_one_rank(SampleView(p.dy), samples, kept ? &*kept : nullptr, SampleView(p.dx),
                            pullback.view(),
                            {p.count, p.mean, p.rstd, p.weight, coefficients.data(), p.dweight,
                             p.dbias, samples.channels},
                            executor);
  return info;
}

}  // namespace syncbn
