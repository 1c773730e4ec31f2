#include <optional>

#include "pass_arguments.hpp"
#include "statistics/header.hpp"
#include "syncbn/passes.hpp"

// The passes of a group of one rank: checks and order; the arithmetic is elsewhere.
namespace syncbn {
namespace {

/// What a message of these samples alone would say.
MessageInfo info_of(const SampleView& samples) {
  MessageInfo info;
  info.count = samples.count();
  info.agree = true;
  info.any_data = info.count > 0;
  info.dtype = info.any_data ? samples.dtype : info.dtype;
  return info;
}

}  // namespace

MessageInfo moments_of_one_rank(const TensorView& x, const MaskView& mask, double* mean,
                                double* var, double* rstd, double eps, const Execution& execution) {
  check_samples("x", x);
  check_mask(mask, x);
  check_eps(eps);
  check_available(x.device);
  const std::int64_t channels = x.sizes[1];
  for (const auto& [name, array] : {std::pair("mean", mean), {"var", var}, {"rstd", rstd}}) {
    check_array(name, array, channels);
  }
  const SampleView samples(x, mask);
  const MessageInfo info = info_of(samples);
  if (!usable(info) || info.count == 0) {
    fill_moments(usable(info), mean, var, rstd, channels);
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
  check_available(x.device);
  const std::int64_t channels = x.sizes[1];
  check_normalizer(mean, rstd, channels);
  check_per_channel("weight", weight, channels, x.device);
  check_affine(dweight, dbias, channels);
  check_array("coefficients", coefficients, 3 * channels);
  const SampleView samples(x, mask);
  const MessageInfo info = info_of(samples);
  const bool valid = usable(info) && info.count == count;
  const cpu::Gradients to{valid ? count : 1, mean,    rstd,  weight,
                          coefficients,      dweight, dbias, channels};
  if (!samples.empty() && channels > 0) {  // u is written, whatever counts
    const PullbackArguments pullback(through, mean, rstd, channels);
    const std::optional<SampleView> kept = optional_view(u);
    cpu::gradients_of_one_rank(SampleView(dy), samples, kept ? &*kept : nullptr, pullback.view(),
                               to, *execution.executor);
  }
  if (!valid || count == 0) {
    fill_gradients(valid, to);
  }
  return info;
}

}  // namespace syncbn
