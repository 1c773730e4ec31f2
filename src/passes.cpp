#include "syncbn/passes.hpp"

#include <algorithm>
#include <optional>
#include <string>

#include "activation_mask.hpp"
#include "channel_values.hpp"
#include "cpu/finalize.hpp"
#include "pass_arguments.hpp"
#include "statistics/header.hpp"
#include "syncbn/error.hpp"

// Argument checks and choice of the backend; the arithmetic is elsewhere.
namespace syncbn {
namespace {

/// This rank's header, and words that sums(samples, words) writes unless there are no elements.
template <class Sums>
void write_message(const TensorView& x, const MaskView& mask, std::int64_t* message,
                   std::uint32_t fingerprint, const Sums& sums) {
  check_available(x.device);
  check_array("message", message, message_words(x.dtype, x.sizes[1]));
  const SampleView samples(x, mask);
  const std::int64_t count = samples.count();
  write_header(message, count, fingerprint, count == 0 ? 0 : dtype_flag(x.dtype));
  if (samples.empty()) {
    std::fill_n(message + kHeaderWords, samples.channels * words_per_channel(x.dtype), 0);
  } else if (samples.channels > 0) {
    sums(samples, message + kHeaderWords);
  }
}

}  // namespace

void local_moments(const TensorView& x, const MaskView& mask, std::int64_t* message,
                   std::uint32_t fingerprint, const Execution& execution) {
  check_samples("x", x);
  check_mask(mask, x);
  write_message(x, mask, message, fingerprint, [&](const SampleView& samples, std::int64_t* words) {
    cpu::moment_sums(samples, words, *execution.executor);
  });
}

void finalize_moments(const MessageInfo& info, const std::int64_t* words, double* mean, double* var,
                      double* rstd, std::int64_t channels, double eps, const Execution& execution) {
  check_channels(channels);
  check_moments(mean, var, rstd, eps, channels);
  if (usable(info) && info.count > 0) {
    check_array("words", words, channels * words_per_channel(info.dtype));
  }
  if (!usable(info) || info.count == 0) {
    fill_moments(usable(info), mean, var, rstd, channels);
    return;
  }
  for_each_channel(channels, execution, [&](std::int64_t begin, std::int64_t end) {
    cpu::finalize(info.dtype, words, begin, end, {info.count, eps, mean, var, rstd});
  });
}

std::int64_t activation_mask_bytes(const TensorView& x) {
  check_samples("x", x);
  return ActivationMaskLayout(SampleView(x)).bytes;
}

void normalize(const TensorView& x, const MaskView& mask, const double* mean, const double* rstd,
               const TensorView& weight, const TensorView& bias, const TensorView& residual,
               const MutableTensorView& y, std::uint8_t* activation_mask,
               const Activation& activation, const Execution& execution) {
  check_normalize(x, mask, weight, bias, residual, y, activation);
  check_normalizer(mean, rstd, x.sizes[1]);
  const SampleView from(x, mask);
  if (from.empty() || from.channels == 0) {
    return;
  }
  const cpu::FloatEnvironment environment;
  const AffineValues affine(weight, bias, from.channels);
  const std::optional<SampleView> added = optional_view(residual);
  cpu::normalize(from, added ? &*added : nullptr, SampleView(y), activation_mask,
                 {mean, rstd, affine.scale(), affine.shift()}, activation, *execution.executor);
}

void update_running_statistics(const MutableTensorView& running_mean,
                               const MutableTensorView& running_var, const double* mean,
                               const double* var, std::int64_t channels, std::int64_t count,
                               double factor) {
  check_channels(channels);
  check_per_channel("running_mean", running_mean, channels, Device::kCpu);
  check_per_channel("running_var", running_var, channels, Device::kCpu);
  check_output("running_mean", running_mean);
  check_output("running_var", running_var);
  check_momentum(factor);
  if (count < 0 || count > kMaxCount) {
    throw InvalidArgument("count: got " + std::to_string(count) + ", expected 0 to 2^36");
  }
  if (count == 0) {
    return;
  }
  check_array("mean", mean, running_mean.absent() ? 0 : channels);
  check_array("var", var, running_var.absent() ? 0 : channels);
  const cpu::FloatEnvironment environment;
  if (!running_mean.absent()) {
    cpu::update_running(running_mean, mean, channels, factor, 1.0);
  }
  if (!running_var.absent()) {
    cpu::update_running(running_var, var, channels, factor, unbiased_factor(count));
  }
}

void local_gradients(const TensorView& dy, const TensorView& x, const MaskView& mask,
                     const double* mean, const double* rstd, const ActivationGradient& through,
                     const MutableTensorView& u, std::int64_t* message, std::uint32_t fingerprint,
                     const Execution& execution) {
  check_gradient_inputs(dy, x, mask, through, u);
  if (through.activation.kind != ActivationKind::kNone && through.activation_mask == nullptr) {
    check_normalizer(mean, rstd, x.sizes[1]);
  }
  write_message(x, mask, message, fingerprint, [&](const SampleView& samples, std::int64_t* words) {
    const PullbackArguments pullback(through, mean, rstd, samples.channels);
    const std::optional<SampleView> kept = optional_view(u);
    cpu::gradient_sums(SampleView(dy), samples, kept ? &*kept : nullptr, words, pullback.view(),
                       *execution.executor);
  });
}

void finalize_gradients(const MessageInfo& info, const std::int64_t* words, const double* mean,
                        const double* rstd, const TensorView& weight, double* coefficients,
                        const MutableTensorView& dweight, const MutableTensorView& dbias,
                        std::int64_t channels, std::int64_t count, const Execution& execution) {
  check_channels(channels);
  check_per_channel("weight", weight, channels, Device::kCpu);
  check_affine(dweight, dbias, channels);
  check_normalizer(mean, rstd, channels);
  check_array("coefficients", coefficients, 3 * channels);
  const bool valid = usable(info) && info.count == count;
  if (valid && count > 0) {
    check_array("words", words, channels * words_per_channel(info.dtype));
  }
  const cpu::Gradients to{valid ? count : 1, mean,    rstd,  weight,
                          coefficients,      dweight, dbias, channels};
  if (!valid || count == 0) {
    fill_gradients(valid, to, 0, channels);
    return;
  }
  for_each_channel(channels, execution, [&](std::int64_t begin, std::int64_t end) {
    cpu::finalize(info.dtype, words, begin, end, to);
  });
}

void affine_gradient_shares(const std::int64_t* words, DType dtype, const double* mean,
                            const double* rstd, const MutableTensorView& dweight,
                            const MutableTensorView& dbias, std::int64_t channels,
                            const Execution& execution) {
  check_channels(channels);
  check_affine(dweight, dbias, channels);
  check_normalizer(mean, rstd, channels);
  check_array("words", words, channels * words_per_channel(dtype));
  const cpu::Gradients to{1, mean, rstd, {}, nullptr, dweight, dbias, channels};
  for_each_channel(channels, execution, [&](std::int64_t begin, std::int64_t end) {
    cpu::finalize(dtype, words, begin, end, to);
  });
}

void input_gradient(const TensorView& dy, const TensorView& x, const MaskView& mask,
                    const double* mean, const double* rstd, const double* coefficients,
                    const ActivationGradient& through, const MutableTensorView& dx,
                    const Execution& execution) {
  check_samples("x", x);
  check_mask(mask, x);
  check_like("dy", dy, x);
  check_through(through, x);
  check_normalizer(mean, rstd, x.sizes[1]);
  check_array("coefficients", coefficients, 3 * x.sizes[1]);
  check_like("dx", dx, x);
  check_output("dx", dx);
  check_available(x.device);
  const SampleView samples(x, mask);
  if (samples.empty() || samples.channels == 0) {
    return;
  }
  const std::int64_t channels = samples.channels;
  const PullbackArguments pullback(through, mean, rstd, channels);
  cpu::input_gradient(
      SampleView(dy), samples, SampleView(dx),
      {mean, rstd, coefficients, coefficients + channels, coefficients + 2 * channels},
      pullback.view(), *execution.executor);
}

void recover_input(const TensorView& y, const double* mean, const double* rstd,
                   const TensorView& weight, const TensorView& bias, const MutableTensorView& x,
                   std::uint8_t* activation_mask, double negative_slope,
                   const Execution& execution) {
  check_samples("y", y);
  check_per_channel("weight", weight, y.sizes[1], y.device);
  check_per_channel("bias", bias, y.sizes[1], y.device);
  check_normalizer(mean, rstd, y.sizes[1]);
  check_like("x", x, y);
  check_output("x", x);
  check_available(y.device);
  if (negative_slope == 0 || negative_slope - negative_slope != 0) {
    throw InvalidArgument("negative_slope: got " + std::to_string(negative_slope) +
                          ", expected a finite number other than 0");
  }
  const ActivationMaskLayout layout{SampleView(y)};
  check_array("activation_mask", activation_mask, layout.bytes);
  if (ActivationMaskLayout(SampleView(x)).by_rows != layout.by_rows) {
    throw InvalidArgument("x: got strides of another order than y's, expected y's");
  }
  const SampleView from(y);
  if (from.empty() || from.channels == 0) {
    return;
  }
  const cpu::FloatEnvironment environment;
  const AffineValues affine(weight, bias, from.channels);
  cpu::recover_input(from, SampleView(x), activation_mask,
                     {mean, rstd, affine.scale(), affine.shift()}, negative_slope,
                     *execution.executor);
}

void evaluation_input_gradient(const TensorView& u, const MaskView& mask, const double* rstd,
                               const TensorView& weight, const MutableTensorView& dx,
                               const Execution& execution) {
  check_samples("u", u);
  check_mask(mask, u);
  check_like("dx", dx, u);
  check_output("dx", dx);
  check_array("rstd", rstd, u.sizes[1]);
  check_per_channel("weight", weight, u.sizes[1], u.device);
  check_available(u.device);
  const SampleView samples(u, mask);
  if (samples.empty() || samples.channels == 0) {
    return;
  }
  const cpu::FloatEnvironment environment;
  const cpu::ScratchArray<double> c1(static_cast<std::size_t>(samples.channels));
  load_channel_values(weight, 0, samples.channels, 1.0, c1.data());
  for (std::size_t c = 0; c < c1.size(); ++c) {
    c1[c] *= rstd[c];
  }
  cpu::evaluation_input_gradient(samples, SampleView(dx), c1.data(), *execution.executor);
}

}  // namespace syncbn
