#include "syncbn/passes.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "channel_values.hpp"
#include "checks.hpp"
#include "cpu/cpu_passes.hpp"
#include "cpu/finalize.hpp"
#include "cpu/float_environment.hpp"
#include "sample_view.hpp"
#include "statistics/header.hpp"

// Argument checks and choice of the backend; the arithmetic is elsewhere.
namespace syncbn {
namespace {

/// Channels per thread at which finalizing in parallel pays.
constexpr std::int64_t kFinalizeGrain = 256;

/// Header and words of this rank's sums of u and u * v.
void write_message(const TensorView& u, const TensorView* v, std::int64_t* message,
                   std::uint32_t fingerprint, const Execution& execution) {
  check_available(u.device);
  const SampleView samples(u);
  const std::int64_t channels = u.sizes[1];
  if (samples.empty()) {
    write_header(message, 0, fingerprint, 0);
    std::fill_n(message + kHeaderWords, channels * words_per_channel(u.dtype), 0);
    return;
  }
  write_header(message, samples.samples * samples.plane, fingerprint, dtype_flag(u.dtype));
  if (channels == 0) {
    return;
  }
  if (v == nullptr) {
    cpu::local_sums(samples, nullptr, message + kHeaderWords, *execution.executor);
  } else {
    const SampleView other(*v);
    cpu::local_sums(samples, &other, message + kHeaderWords, *execution.executor);
  }
}

/// Runs body(c) for every channel with the contract's floating-point environment.
template <class Body>
void for_each_channel(std::int64_t channels, const Execution& execution, const Body& body) {
  execution.executor->parallel_for(0, channels, kFinalizeGrain,
                                   [&](std::int64_t begin, std::int64_t end) {
                                     const cpu::FloatEnvironment environment;
                                     for (std::int64_t c = begin; c < end; ++c) {
                                       body(c);
                                     }
                                   });
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

bool usable(const MessageInfo& info) {
  return info.agree && !info.any_rejected && info.count <= kMaxCount;
}

}  // namespace

void local_moments(const TensorView& x, std::int64_t* message, std::uint32_t fingerprint,
                   const Execution& execution) {
  check_samples("x", x);
  write_message(x, nullptr, message, fingerprint, execution);
}

void finalize_moments(const MessageInfo& info, const std::int64_t* words, double* mean, double* var,
                      double* rstd, std::int64_t channels, double eps, const Execution& execution) {
  check_eps(eps);
  if (!usable(info) || info.count == 0) {
    const double value = usable(info) ? 0.0 : std::numeric_limits<double>::quiet_NaN();
    for (double* array : {mean, var, rstd}) {
      std::fill_n(array, channels, value);
    }
    return;
  }
  const int per_channel = words_per_channel(info.dtype);
  for_each_channel(channels, execution, [&](std::int64_t c) {
    const ChannelMoments moments =
        cpu::finalize_moments(info.dtype, words + c * per_channel, info.count, eps);
    mean[c] = moments.mean;
    var[c] = moments.var;
    rstd[c] = moments.rstd;
  });
}

void normalize(const TensorView& x, const double* mean, const double* rstd,
               const TensorView& weight, const TensorView& bias, const MutableTensorView& y,
               const Execution& execution) {
  check_samples("x", x);
  check_like("y", y, x);
  check_per_channel("weight", weight, x.sizes[1], x.device);
  check_per_channel("bias", bias, x.sizes[1], x.device);
  check_available(x.device);
  const SampleView from(x);
  if (from.empty() || from.channels == 0) {
    return;
  }
  const cpu::FloatEnvironment environment;
  const std::vector<double> scale = channel_values(weight, from.channels, 1.0);
  const std::vector<double> shift = channel_values(bias, from.channels, 0.0);
  cpu::normalize(from, SampleView(y), {mean, rstd, scale.data(), shift.data()},
                 *execution.executor);
}

void update_running_statistics(const MutableTensorView& running_mean,
                               const MutableTensorView& running_var, const double* mean,
                               const double* var, std::int64_t channels, std::int64_t count,
                               double factor) {
  check_per_channel("running_mean", running_mean, channels, Device::kCpu);
  check_per_channel("running_var", running_var, channels, Device::kCpu);
  check_momentum(factor);
  if (count == 0) {
    return;
  }
  const cpu::FloatEnvironment environment;
  for (std::int64_t c = 0; c < channels; ++c) {
    if (!running_mean.absent()) {
      set_channel_value(running_mean, c,
                        running_update(channel_value(running_mean, c), mean[c], factor));
    }
    if (!running_var.absent()) {
      set_channel_value(
          running_var, c,
          running_update(channel_value(running_var, c), unbiased(var[c], count), factor));
    }
  }
}

void local_gradients(const TensorView& dy, const TensorView& x, std::int64_t* message,
                     std::uint32_t fingerprint, const Execution& execution) {
  check_samples("x", x);
  check_like("dy", dy, x);
  write_message(dy, &x, message, fingerprint, execution);
}

void finalize_gradients(const MessageInfo& info, const std::int64_t* words, const double* mean,
                        const double* rstd, const TensorView& weight, double* coefficients,
                        const MutableTensorView& dweight, const MutableTensorView& dbias,
                        std::int64_t channels, std::int64_t count, const Execution& execution) {
  check_per_channel("weight", weight, channels, Device::kCpu);
  check_per_channel("dweight", dweight, channels, Device::kCpu);
  check_per_channel("dbias", dbias, channels, Device::kCpu);
  const bool valid = usable(info) && info.count == count;
  const int per_channel = words_per_channel(info.dtype);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for_each_channel(channels, execution, [&](std::int64_t c) {
    ChannelGradients gradients{0.0, 0.0, 0.0, 0.0, false};
    if (!valid) {
      gradients = {nan, nan, nan, nan, true};
    } else if (count > 0) {
      gradients = cpu::finalize_gradients(info.dtype, words + c * per_channel, mean[c], rstd[c]);
    }
    const Coefficients k = coefficients_of(
        gradients, weight.absent() ? 1.0 : channel_value(weight, c), rstd[c], valid ? count : 1);
    coefficients[c] = k.c1;
    coefficients[channels + c] = k.c2;
    coefficients[2 * channels + c] = k.c3;
    store_affine(gradients, dweight, dbias, c);
  });
}

void affine_gradient_shares(const std::int64_t* words, DType dtype, const double* mean,
                            const double* rstd, const MutableTensorView& dweight,
                            const MutableTensorView& dbias, std::int64_t channels,
                            const Execution& execution) {
  check_per_channel("dweight", dweight, channels, Device::kCpu);
  check_per_channel("dbias", dbias, channels, Device::kCpu);
  const int per_channel = words_per_channel(dtype);
  for_each_channel(channels, execution, [&](std::int64_t c) {
    store_affine(cpu::finalize_gradients(dtype, words + c * per_channel, mean[c], rstd[c]), dweight,
                 dbias, c);
  });
}

void input_gradient(const TensorView& dy, const TensorView& x, const double* mean,
                    const double* rstd, const double* coefficients, const MutableTensorView& dx,
                    const Execution& execution) {
  check_samples("x", x);
  check_like("dy", dy, x);
  check_like("dx", dx, x);
  check_available(x.device);
  const SampleView samples(x);
  if (samples.empty() || samples.channels == 0) {
    return;
  }
  const std::int64_t channels = samples.channels;
  cpu::input_gradient(
      SampleView(dy), samples, SampleView(dx),
      {mean, rstd, coefficients, coefficients + channels, coefficients + 2 * channels},
      *execution.executor);
}

void evaluation_input_gradient(const TensorView& dy, const double* rstd, const TensorView& weight,
                               const MutableTensorView& dx, const Execution& execution) {
  check_samples("dy", dy);
  check_like("dx", dx, dy);
  check_per_channel("weight", weight, dy.sizes[1], dy.device);
  check_available(dy.device);
  const SampleView samples(dy);
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
