// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "cuda/launch.cuh"
#include "statistics/finalize.hpp"

// Running statistics and counters, as kernels have them.
namespace syncbn::cuda {

/// What info and RunningStatistics::count hold where ranks disagreed.
inline constexpr std::int64_t kDisagreed = -1;
/// The number of batches stays there.
inline constexpr std::int64_t kLastBatch = std::numeric_limits<std::int64_t>::max();

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

/// By all threads of the only block that updates. mean, var: of the batch.
SYNCBN_DEVICE void update_running(const RunningArrays& running, const double* mean,
                                  const double* var, std::int64_t of_call, std::int64_t channels,
                                  bool cumulative, double momentum) {
  const double factor = cumulative ? 1.0 / static_cast<double>(running.batches()) : momentum;
  device::block_barrier();  // all have read the counter
  if (device::thread_index() == 0) {
    running.count_call(of_call);
  }
  for (std::int64_t c = device::thread_index(); c < channels; c += device::block_size()) {
    running.update(c, mean[c], var[c], of_call, factor);
  }
}

inline RunningArrays running_arrays(const RunningStatistics& running) {
  return {channel_array(running.mean, 0.0), channel_array(running.var, 0.0),
          running.num_batches_tracked, running.call, running.count};
}

inline void check_update(const RunningStatistics& running, std::int64_t channels,
                         std::optional<double> momentum) {
  check_per_channel("running_mean", running.mean, channels, Device::kCuda);
  check_per_channel("running_var", running.var, channels, Device::kCuda);
  if (momentum.has_value()) {
    check_momentum(*momentum);
  } else if (running.num_batches_tracked == nullptr &&
             !(running.mean.absent() && running.var.absent())) {
    throw InvalidArgument(
        "momentum: got none without num_batches_tracked, expected a number in [0, 1]");
  }
}

}  // namespace syncbn::cuda
