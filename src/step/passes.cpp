// SPDX-License-Identifier: Apache-2.0
#include "step/passes.hpp"

#include <algorithm>
#include <optional>

#include "cpu/finalize.hpp"
#include "statistics/header.hpp"
#include "step/pass_arguments.hpp"
#include "tensors/channel_values.hpp"

// The backend's form of arguments, and what is written where nothing counts; the arithmetic is
// elsewhere.
namespace syncbn {
namespace {

/// This rank's header, and words that sums(samples, words) writes unless there are no elements.
template <class Sums>
void write_message(const TensorView& x, const MaskView& mask, std::int64_t* message,
                   std::uint32_t fingerprint, const Sums& sums) {
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
  cpu::ContractExecutor executor(*execution.executor);
  write_message(x, mask, message, fingerprint, [&](const SampleView& samples, std::int64_t* words) {
    cpu::moment_sums(samples, words, executor);
  });
}

void finalize_moments(const MessageInfo& info, const std::int64_t* words, double* mean, double* var,
                      double* rstd, std::int64_t channels, double eps, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  if (!usable(info) || info.count == 0) {
    fill_moments(usable(info), mean, var, rstd, channels);
    return;
  }
  cpu::for_each_channel(channels, executor, [&](std::int64_t begin, std::int64_t end) {
    cpu::finalize(info.dtype, words, begin, end, {info.count, eps, mean, var, rstd});
  });
}

void normalize(const Normalization& p, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView from(p.x, p.mask);
  if (from.empty() || from.channels == 0) {
    return;
  }
  const AffineValues affine(p.weight, p.bias, from.channels);
  const std::optional<SampleView> added = optional_view(p.residual);
  cpu::normalize(from, added ? &*added : nullptr, SampleView(p.y), p.activation_mask,
                 {p.mean, p.rstd, affine.scale(), affine.shift()}, p.activation, executor);
}

void update_running_statistics(const MutableTensorView& running_mean,
                               const MutableTensorView& running_var, const double* mean,
                               const double* var, std::int64_t channels, std::int64_t count,
                               double factor) {
  const cpu::FloatEnvironment environment;
  if (count == 0) {
    return;
  }
  if (!running_mean.absent()) {
    cpu::update_running(running_mean, mean, channels, factor, 1.0);
  }
  if (!running_var.absent()) {
    cpu::update_running(running_var, var, channels, factor, unbiased_factor(count));
  }
}

void local_gradients(const GradientSums& p, std::int64_t* message, std::uint32_t fingerprint,
                     const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  write_message(p.x, p.mask, message, fingerprint,
                [&](const SampleView& samples, std::int64_t* words) {
                  const PullbackArguments pullback(p.through, p.mean, p.rstd, samples.channels);
                  const std::optional<SampleView> kept = optional_view(p.u);
                  cpu::gradient_sums(SampleView(p.dy), samples, kept ? &*kept : nullptr, words,
                                     pullback.view(), executor);
                });
}

void finalize_gradients(const MessageInfo& info, const std::int64_t* words,
                        const ParameterGradients& p, std::int64_t count,
                        const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const bool valid = usable(info) && info.count == count;
  const cpu::Gradients to{valid ? count : 1, p.mean,    p.rstd,  p.weight,
                          p.coefficients,    p.dweight, p.dbias, p.channels};
  if (!valid || count == 0) {
    fill_gradients(valid, to, 0, p.channels);
    return;
  }
  cpu::for_each_channel(p.channels, executor, [&](std::int64_t begin, std::int64_t end) {
    cpu::finalize(info.dtype, words, begin, end, to);
  });
}

void affine_gradient_shares(const std::int64_t* words, DType dtype, const ParameterGradients& p,
                            const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const cpu::Gradients to{1, p.mean, p.rstd, {}, nullptr, p.dweight, p.dbias, p.channels};
  cpu::for_each_channel(p.channels, executor, [&](std::int64_t begin, std::int64_t end) {
    cpu::finalize(dtype, words, begin, end, to);
  });
}

void input_gradient(const InputGradient& p, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView samples(p.x, p.mask);
  if (samples.empty() || samples.channels == 0) {
    return;
  }
  const std::int64_t channels = samples.channels;
  const PullbackArguments pullback(p.through, p.mean, p.rstd, channels);
  cpu::input_gradient(
      SampleView(p.dy), samples, SampleView(p.dx),
      {p.mean, p.rstd, p.coefficients, p.coefficients + channels, p.coefficients + 2 * channels},
      pullback.view(), executor);
}

void recover_input_on_cpu(const InputRecovery& p, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView from(p.y);
  if (from.empty() || from.channels == 0) {
    return;
  }
  const AffineValues affine(p.weight, p.bias, from.channels);
  cpu::recover_input(from, SampleView(p.x), p.activation_mask,
                     {p.mean, p.rstd, affine.scale(), affine.shift()}, p.negative_slope, executor);
}

void evaluation_input_gradient_on_cpu(const TensorView& u, const MaskView& mask, const double* rstd,
                                      const TensorView& weight, const MutableTensorView& dx,
                                      const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView samples(u, mask);
  if (samples.empty() || samples.channels == 0) {
    return;
  }
  const cpu::ScratchArray<double> c1(static_cast<std::size_t>(samples.channels));
  load_channel_values(weight, 0, samples.channels, 1.0, c1.data());
  for (std::size_t c = 0; c < c1.size(); ++c) {
    c1[c] *= rstd[c];
  }
  cpu::evaluation_input_gradient(samples, SampleView(dx), c1.data(), executor);
}

}  // namespace syncbn
