// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <limits>

#include "cuda/launch.cuh"
#include "cuda/loading.hpp"
#include "cuda/warp_finalize.cuh"
#include "statistics/dtype.hpp"
#include "statistics/finalize.hpp"
#include "statistics/header.hpp"

// From merged messages to statistics and coefficients. What the header says about the ranks is
// decided here, on the device.
namespace syncbn::cuda {
namespace {

constexpr unsigned kThreads = 64;  // channels are few: spread them over the multiprocessors

SYNCBN_DEVICE std::int64_t thread_number() {
  return std::int64_t{device::block_index()} * kThreads + device::thread_index();
}
SYNCBN_DEVICE std::int64_t thread_count() { return std::int64_t{device::grid_size()} * kThreads; }

/// Calls body(channel, whether it writes) with whole warps: threads beyond the last channel are
/// given that one.
template <class T, class Body>
SYNCBN_DEVICE void for_each_channel(std::int64_t channels, const Body& body) {
  constexpr std::int64_t kOfBlock = kThreads / kChannelThreads<T>;
  const unsigned member = device::thread_index() % kChannelThreads<T>;
  for (std::int64_t first = device::block_index() * kOfBlock; first < channels;
       first += device::grid_size() * kOfBlock) {
    const std::int64_t c = first + device::thread_index() / kChannelThreads<T>;
    body(c < channels ? c : channels - 1, c < channels && member == 0);
  }
}

/// What info and Running::count hold where ranks disagreed.
constexpr std::int64_t kDisagreed = -1;
/// The number of batches stays there.
constexpr std::int64_t kLastBatch = std::numeric_limits<std::int64_t>::max();

struct RunningArrays {
  ChannelArray mean;
  ChannelArray var;
  std::int64_t* num_batches_tracked = nullptr;
  std::int64_t* call = nullptr;
  std::int64_t* count = nullptr;

  /// With the one that is counted; nobody hears of errors.
  SYNCBN_DEVICE std::int64_t batches() const {
    const std::int64_t before = num_batches_tracked == nullptr ? -1 : *num_batches_tracked;
    return before == kLastBatch ? before : before + 1;
  }
  /// By one thread. of_call: info[0].
  SYNCBN_DEVICE void count_call(std::int64_t of_call) const {
    if (num_batches_tracked != nullptr && of_call > 0) {
      *num_batches_tracked = batches();
    }
    if (call != nullptr) {
      ++*call;
    }
    if (count != nullptr) {
      *count = of_call;
    }
  }
  SYNCBN_DEVICE void update(std::int64_t c, double batch_mean, double batch_var,
                            std::int64_t of_call, double factor) const {
    if (of_call > 0 && mean.data != nullptr) {
      mean.set(c, running_update(mean.get(c), batch_mean, factor));
    }
    if (of_call > 0 && var.data != nullptr) {
      var.set(c, running_update(var.get(c), unbiased(batch_var, of_call), factor));
    }
  }
};

/// No thread but the first reads the counters.
template <class T>
SYNCBN_KERNEL(kThreads)
moments_kernel(const std::int64_t* merged, int ranks, double* mean, double* var, double* rstd,
               std::int64_t* info, std::int64_t channels, double eps, const RunningArrays running,
               double momentum) {
  constexpr int kWords = FormatTraits<T>::kWords;
  const MessageInfo header = header_info(merged, ranks);
  const bool valid = usable(header);
  const std::int64_t count = valid ? header.count : kDisagreed;
  if (thread_number() == 0) {
    info[0] = count;
    info[1] = valid ? merged[kHeaderFingerprint] / ranks : 0;
    running.count_call(count);
  }
  for_each_channel<T>(channels, [&](std::int64_t c, bool writes) {
    const double none = valid ? 0.0 : std::numeric_limits<double>::quiet_NaN();
    ChannelMoments moments{none, none, none};
    if (count > 0) {
      moments = finalize_moments_of<T>(merged + kHeaderWords + c * kWords, count, eps);
    }
    if (writes) {
      mean[c] = moments.mean;
      var[c] = moments.var;
      rstd[c] = moments.rstd;
      running.update(c, moments.mean, moments.var, count, momentum);
    }
  });
}

/// `own`: whose sums dweight and dbias come from, if it is not the merged message.
template <class T>
SYNCBN_KERNEL(kThreads)
gradients_kernel(const std::int64_t* merged, int ranks, const std::int64_t* own,
                 const std::int64_t* info, const double* mean, const double* rstd,
                 const ChannelArray weight, double* coefficients, const ChannelArray dweight,
                 const ChannelArray dbias, std::int64_t channels) {
  constexpr int kWords = FormatTraits<T>::kWords;
  const MessageInfo header = header_info(merged, ranks);
  const std::int64_t count = info == nullptr ? header.count : info[0];
  const bool valid = usable(header) && header.count == count;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for_each_channel<T>(channels, [&](std::int64_t c, bool writes) {
    const std::int64_t at = kHeaderWords + c * kWords;
    ChannelGradients gradients{0.0, 0.0, 0.0, 0.0, false};
    SYNCBN_NO_UNROLL  // the integers' code once, not twice
        for (int pass = 0; pass < (own == nullptr ? 1 : 2); ++pass) {
      if (pass == 0 && !valid) {
        gradients = {nan, nan, nan, nan, true};
      } else if (pass == 1 || count > 0) {
        gradients = finalize_gradients_of<T>((pass == 0 ? merged : own) + at, mean[c], rstd[c]);
      }
      if (pass == 0 && writes) {
        store_coefficients(coefficients_of(gradients, weight.get(c), rstd[c], valid ? count : 1),
                           coefficients, c, channels);
      }
    }
    if (writes) {
      dweight.set(c, gradients.dweight);
      dbias.set(c, gradients.dbias);
    }
  });
}

/// One block reads the counter before the first of its threads raises it.
constexpr unsigned kRunningThreads = 512;

SYNCBN_KERNEL(kRunningThreads)
running_kernel(const RunningArrays running, const double* mean, const double* var,
               const std::int64_t* info, std::int64_t channels, bool cumulative, double momentum) {
  const double factor = cumulative ? 1.0 / static_cast<double>(running.batches()) : momentum;
  device::block_barrier();  // all have read the counter
  if (device::thread_index() == 0) {
    running.count_call(info[0]);
  }
  for (std::int64_t c = device::thread_index(); c < channels; c += device::block_size()) {
    running.update(c, mean[c], var[c], info[0], factor);
  }
}

SYNCBN_KERNEL(kThreads)
evaluation_kernel(const ChannelArray running_mean, const ChannelArray running_var, double* mean,
                  double* rstd, std::int64_t channels, double eps) {
  for (std::int64_t c = thread_number(); c < channels; c += thread_count()) {
    mean[c] = running_mean.get(c);
    rstd[c] = rstd_of(running_var.get(c), eps);
  }
}

RunningArrays running_arrays(const Running& running) {
  return {channel_array(running.mean, 0.0), channel_array(running.var, 0.0), running.batches,
          running.call, running.count};
}

}  // namespace

void load_finalize(DType dtype) {
  dispatch_dtype(dtype, [](auto type) {
    using T = typename ElementTraits<decltype(type)>::SameFormat;
    load(&moments_kernel<T>, &gradients_kernel<T>, &running_kernel, &evaluation_kernel);
  });
}

void finalize_moments(const std::int64_t* merged, DType dtype, int ranks, double* mean, double* var,
                      double* rstd, std::int64_t* info, std::int64_t channels, double eps,
                      const Running& running, const Stream& stream) {
  // Blocks that share the number of batches would have to wait for each other to raise it.
  const bool at_once =
      running.momentum.has_value() || (running.mean.absent() && running.var.absent());
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename ElementTraits<decltype(type)>::SameFormat;
    start("finalize_moments", &moments_kernel<T>,
          grid_for(channels, kThreads / kChannelThreads<T>, 32), kThreads, 0, stream, merged, ranks,
          mean, var, rstd, info, channels, eps, at_once ? running_arrays(running) : RunningArrays{},
          running.momentum.value_or(0.0));
  });
  if (!at_once) {
    update_running_statistics(running, mean, var, info, channels, stream);
  }
}

void finalize_gradients(const std::int64_t* merged, DType dtype, int ranks, const std::int64_t* own,
                        const std::int64_t* info, const ParameterGradients& p,
                        const Stream& stream) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename ElementTraits<decltype(type)>::SameFormat;
    start("finalize_gradients", &gradients_kernel<T>,
          grid_for(p.channels, kThreads / kChannelThreads<T>, 32), kThreads, 0, stream, merged,
          ranks, own, info, p.mean, p.rstd, channel_array(p.weight, 1.0), p.coefficients,
          channel_array(p.dweight, 0.0), channel_array(p.dbias, 0.0), p.channels);
  });
}

void update_running_statistics(const Running& running, const double* mean, const double* var,
                               const std::int64_t* info, std::int64_t channels,
                               const Stream& stream) {
  start("update_running_statistics", &running_kernel, 1, kRunningThreads, 0, stream,
        running_arrays(running), mean, var, info, channels, !running.momentum.has_value(),
        running.momentum.value_or(0.0));
}

void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                           double* mean, double* rstd, double eps, const Stream& stream) {
  const std::int64_t channels = running_mean.sizes[0];
  start("evaluation_statistics", &evaluation_kernel, grid_for(channels, kThreads), kThreads, 0,
        stream, channel_array(running_mean, 0.0), channel_array(running_var, 0.0), mean, rstd,
        channels, eps);
}

}  // namespace syncbn::cuda
