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
    cpu::moments_of_one_rank(samples, {info.count, eps, mean, var, rstd}, *execution.executor);
  }
  return info;
}

MessageInfo gradients_of_one_rank(const TensorView& dy, const TensorView& x, const MaskView& mask,
                                  const double* mean, const double* rstd,
                                  const ActivationGradient& through, const TensorView& weight,
                                  const MutableTensorView& u, double* coefficients,
                                  const MutableTensorView& dweight, const MutableTensorView& dbias,
                                  std::int64_t count, const Execution& execution) {
  check_gradient_inputs(dy, x, mask, through, u);
  check_finalize_gradients(x, mean, rstd, weight, dweight, dbias);
  const std::int64_t channels = x.sizes[1];
  check_array("coefficients", coefficients, 3 * channels);
  const SampleView samples(x, mask);
  const MessageInfo info = info_of(samples);
  const bool valid = info.count == count;
  const cpu::Gradients to{valid ? count : 1, mean,    rstd,  weight,
                          coefficients,      dweight, dbias, channels};
  if (!samples.empty() && channels > 0) {  // u is written, whatever counts
    const PullbackArguments pullback(through, mean, rstd, channels);
    const std::optional<SampleView> kept = optional_view(u);
    cpu::gradients_of_one_rank(SampleView(dy), samples, kept ? &*kept : nullptr, pullback.view(),
                               to, *execution.executor);
  }
  if (!valid || count == 0) {
    fill_gradients(valid, to, 0, channels);
  }
  return info;
}

MessageInfo forward_of_one_rank(const TensorView& x, const MaskView& mask, const TensorView& weight,
                                const TensorView& bias, const TensorView& residual,
                                const MutableTensorView& y, std::uint8_t* activation_mask,
                                double* mean, double* var, double* rstd, double eps,
                                const Activation& activation, const Execution& execution) {
  check_normalize(x, mask, weight, bias, residual, y, activation);
  check_moments(mean, var, rstd, eps, x.sizes[1]);
  const SampleView samples(x, mask);
  const std::int64_t channels = samples.channels;
  const MessageInfo info = info_of(samples);
  if (info.count == 0) {  // what y becomes then, the pass alone knows
    fill_moments(true, mean, var, rstd, channels);
    normalize(x, mask, mean, rstd, weight, bias, residual, y, activation_mask, activation,
              execution);
  } else if (channels > 0) {
    const cpu::FloatEnvironment environment;
    const AffineValues affine(weight, bias, channels);
    const std::optional<SampleView> added = optional_view(residual);
    cpu::forward_of_one_rank(samples, added ? &*added : nullptr, SampleView(y), activation_mask,
                             affine.scale(), affine.shift(), activation,
                             {info.count, eps, mean, var, rstd}, *execution.executor);
  }
  return info;
}

MessageInfo backward_of_one_rank(const TensorView& dy, const TensorView& x, const MaskView& mask,
                                 const double* mean, const double* rstd,
                                 const ActivationGradient& through, const TensorView& weight,
                                 const MutableTensorView& u, const MutableTensorView& dx,
                                 const MutableTensorView& dweight, const MutableTensorView& dbias,
                                 std::int64_t count, const Execution& execution) {
  check_gradient_inputs(dy, x, mask, through, u);
  check_like("dx", dx, x);
  check_output("dx", dx);
  const cpu::ScratchArray<double> coefficients(static_cast<std::size_t>(3 * x.sizes[1]));
  const SampleView samples(x, mask);
  const MessageInfo info = info_of(samples);
  if (info.count != count || count == 0 || samples.channels == 0) {
    gradients_of_one_rank(dy, x, mask, mean, rstd, through, weight, u, coefficients.data(), dweight,
                          dbias, count, execution);
    input_gradient(u.absent() ? dy : TensorView(u), x, mask, mean, rstd, coefficients.data(),
                   u.absent() ? through : ActivationGradient(), dx, execution);
    return info;
  }
  check_finalize_gradients(x, mean, rstd, weight, dweight, dbias);
  const PullbackArguments pullback(through, mean, rstd, samples.channels);
  const std::optional<SampleView> kept = optional_view(u);
  cpu::backward_of_one_rank(
      SampleView(dy), samples, kept ? &*kept : nullptr, SampleView(dx), pullback.view(),
      {count, mean, rstd, weight, coefficients.data(), dweight, dbias, samples.channels},
      *execution.executor);
  return info;
}

}  // namespace syncbn
