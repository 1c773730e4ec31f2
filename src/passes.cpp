#include "syncbn/passes.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "activation_mask.hpp"
#include "channel_values.hpp"
#include "checks.hpp"
#include "cpu/cpu_passes.hpp"
#include "cpu/finalize.hpp"
#include "cpu/float_environment.hpp"
#include "sample_view.hpp"
#include "statistics/header.hpp"
#include "syncbn/error.hpp"

// Argument checks and choice of the backend; the arithmetic is elsewhere.
namespace syncbn {
namespace {

/// Channels per thread at which finalizing in parallel pays.
constexpr std::int64_t kFinalizeGrain = 256;
/// Channels whose gradients are held between two steps.
constexpr std::int64_t kFinalizeBlock = 64;

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

/// The pass's arguments in the backend's form; keeps the parameters that it points to.
class PullbackArguments {
 public:
  PullbackArguments(const ActivationGradient& through, const double* mean, const double* rstd,
                    std::int64_t channels)
      : activation_(through.activation),
        mean_(mean),
        rstd_(rstd),
        activation_mask_(through.activation_mask) {
    if (activation_.kind != ActivationKind::kNone && activation_mask_ == nullptr) {
      scale_ = channel_values(through.weight, channels, 1.0);
      shift_ = channel_values(through.bias, channels, 0.0);
    }
  }
  cpu::Pullback view() const {
    return {activation_, {mean_, rstd_, scale_.data(), shift_.data()}, activation_mask_};
  }

 private:
  Activation activation_;
  const double* mean_;
  const double* rstd_;
  const std::uint8_t* activation_mask_;
  std::vector<double> scale_;
  std::vector<double> shift_;
};

/// The statistics that a pass reads.
void check_normalizer(const double* mean, const double* rstd, std::int64_t channels) {
  check_array("mean", mean, channels);
  check_array("rstd", rstd, channels);
}

void check_through(const ActivationGradient& through, const TensorView& x) {
  check_activation(through.activation);
  check_per_channel("weight", through.weight, x.sizes[1], x.device);
  check_per_channel("bias", through.bias, x.sizes[1], x.device);
}

/// Runs body(begin, end) for blocks of channels with the contract's floating-point environment.
template <class Body>
void for_each_block(std::int64_t channels, const Execution& execution, const Body& body) {
  execution.executor->parallel_for(0, channels, kFinalizeGrain,
                                   [&](std::int64_t begin, std::int64_t end) {
                                     const cpu::FloatEnvironment environment;
                                     for (std::int64_t c = begin; c < end; c += kFinalizeBlock) {
                                       body(c, std::min(end, c + kFinalizeBlock));
                                     }
                                   });
}

void check_affine(const MutableTensorView& dweight, const MutableTensorView& dbias,
                  std::int64_t channels) {
  check_per_channel("dweight", dweight, channels, Device::kCpu);
  check_per_channel("dbias", dbias, channels, Device::kCpu);
  check_output("dweight", dweight);
  check_output("dbias", dbias);
}

void store_affine(const ChannelGradients& gradients, const MutableTensorView& dweight,
                  const MutableTensorView& dbias, std::int64_t c) {
  if (!dweight.absent()) {
    set_channel_value(dweight, c, gradients.dweight);
  }
  if (!dbias.absent()) {
    set_channel_value(dbias, c, gradients.dbias);
  }
}

std::optional<SampleView> optional_view(const TensorView& tensor) {
  return tensor.absent() ? std::nullopt : std::optional<SampleView>(tensor);
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
  check_eps(eps);
  check_channels(channels);
  check_array("mean", mean, channels);
  check_array("var", var, channels);
  check_array("rstd", rstd, channels);
  if (usable(info) && info.count > 0) {
    check_array("words", words, channels * words_per_channel(info.dtype));
  }
  if (!usable(info) || info.count == 0) {
    const double value = usable(info) ? 0.0 : std::numeric_limits<double>::quiet_NaN();
    for (double* array : {mean, var, rstd}) {
      std::fill_n(array, channels, value);
    }
    return;
  }
  const int per_channel = words_per_channel(info.dtype);
  for_each_block(channels, execution, [&](std::int64_t begin, std::int64_t end) {
    cpu::finalize_moments(info.dtype, words + begin * per_channel, end - begin, info.count, eps,
                          mean + begin, var + begin, rstd + begin);
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
  check_samples("x", x);
  check_mask(mask, x);
  check_like("y", y, x);
  check_output("y", y);
  check_normalizer(mean, rstd, x.sizes[1]);
  check_per_channel("weight", weight, x.sizes[1], x.device);
  check_per_channel("bias", bias, x.sizes[1], x.device);
  if (!residual.absent()) {
    check_like("residual", residual, x);
  }
  check_activation(activation);
  check_available(x.device);
  const SampleView from(x, mask);
  if (from.empty() || from.channels == 0) {
    return;
  }
  const cpu::FloatEnvironment environment;
  const std::vector<double> scale = channel_values(weight, from.channels, 1.0);
  const std::vector<double> shift = channel_values(bias, from.channels, 0.0);
  const std::optional<SampleView> added = optional_view(residual);
  cpu::normalize(from, added ? &*added : nullptr, SampleView(y), activation_mask,
                 {mean, rstd, scale.data(), shift.data()}, activation, *execution.executor);
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
  // Views to read through are made once: each holds vectors of its own.
  const TensorView old_mean = running_mean;
  const TensorView old_var = running_var;
  for (std::int64_t c = 0; c < channels; ++c) {
    if (!running_mean.absent()) {
      set_channel_value(running_mean, c,
                        running_update(channel_value(old_mean, c), mean[c], factor));
    }
    if (!running_var.absent()) {
      set_channel_value(running_var, c,
                        running_update(channel_value(old_var, c), unbiased(var[c], count), factor));
    }
  }
}

void local_gradients(const TensorView& dy, const TensorView& x, const MaskView& mask,
                     const double* mean, const double* rstd, const ActivationGradient& through,
                     const MutableTensorView& u, std::int64_t* message, std::uint32_t fingerprint,
                     const Execution& execution) {
  check_samples("x", x);
  check_mask(mask, x);
  check_like("dy", dy, x);
  check_through(through, x);
  if (through.activation.kind != ActivationKind::kNone && through.activation_mask == nullptr) {
    check_normalizer(mean, rstd, x.sizes[1]);
  }
  if (!u.absent()) {
    check_like("u", u, x);
    check_output("u", u);
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
  const int per_channel = words_per_channel(info.dtype);
  if (valid && count > 0) {
    check_array("words", words, channels * per_channel);
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for_each_block(channels, execution, [&](std::int64_t begin, std::int64_t end) {
    ChannelGradients gradients[kFinalizeBlock];
    if (!valid) {
      std::fill_n(gradients, end - begin, ChannelGradients{nan, nan, nan, nan, true});
    } else if (count > 0) {
      cpu::finalize_gradients(info.dtype, words + begin * per_channel, end - begin, mean + begin,
                              rstd + begin, gradients);
    } else {
      std::fill_n(gradients, end - begin, ChannelGradients{0.0, 0.0, 0.0, 0.0, false});
    }
    for (std::int64_t c = begin; c < end; ++c) {
      const ChannelGradients& g = gradients[c - begin];
      const Coefficients k = coefficients_of(g, weight.absent() ? 1.0 : channel_value(weight, c),
                                             rstd[c], valid ? count : 1);
      coefficients[c] = k.c1;
      coefficients[channels + c] = k.c2;
      coefficients[2 * channels + c] = k.c3;
      store_affine(g, dweight, dbias, c);
    }
  });
}

void affine_gradient_shares(const std::int64_t* words, DType dtype, const double* mean,
                            const double* rstd, const MutableTensorView& dweight,
                            const MutableTensorView& dbias, std::int64_t channels,
                            const Execution& execution) {
  check_channels(channels);
  check_affine(dweight, dbias, channels);
  check_normalizer(mean, rstd, channels);
  const int per_channel = words_per_channel(dtype);
  check_array("words", words, channels * per_channel);
  for_each_block(channels, execution, [&](std::int64_t begin, std::int64_t end) {
    ChannelGradients gradients[kFinalizeBlock];
    cpu::finalize_gradients(dtype, words + begin * per_channel, end - begin, mean + begin,
                            rstd + begin, gradients);
    for (std::int64_t c = begin; c < end; ++c) {
      store_affine(gradients[c - begin], dweight, dbias, c);
    }
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
  const std::vector<double> scale = channel_values(weight, from.channels, 1.0);
  const std::vector<double> shift = channel_values(bias, from.channels, 0.0);
  cpu::recover_input(from, SampleView(x), activation_mask, {mean, rstd, scale.data(), shift.data()},
                     negative_slope, *execution.executor);
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
  std::vector<double> c1 = channel_values(weight, samples.channels, 1.0);
  for (std::size_t c = 0; c < c1.size(); ++c) {
    c1[c] *= rstd[c];
  }
  cpu::evaluation_input_gradient(samples, SampleView(dx), c1.data(), *execution.executor);
}

}  // namespace syncbn
