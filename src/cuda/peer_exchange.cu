// SPDX-License-Identifier: Apache-2.0
#include "cuda/peer_exchange.cuh"

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/launch.cuh"
#include "statistics/dtype.hpp"

// Finalize, of messages that meet in the same kernel.
namespace syncbn::cuda {
namespace {

/// By the last block, over what some blocks may have written.
SYNCBN_DEVICE void write_nan(double* to, std::int64_t count) {
  for (std::int64_t i = device::thread_index(); i < count; i += kExchangeThreads) {
    to[i] = std::numeric_limits<double>::quiet_NaN();
  }
}

template <class T>
SYNCBN_KERNEL(kExchangeThreads)
exchange_moments_kernel(const PeerGroup group, const std::int64_t* message, double* mean,
                        double* var, double* rstd, std::int64_t* info, std::int64_t channels,
                        double eps, const RunningArrays running, bool cumulative, double momentum) {
  Exchanged exchanged =
      exchange_channels<T, false>(group, message, channels,
                                  [&](std::int64_t c, const std::int64_t* words,
                                      const std::int64_t*, std::int64_t count, bool writes) {
                                    ChannelMoments moments{0.0, 0.0, 0.0};
                                    if (count > 0) {
                                      moments = finalize_moments_of<T>(words, count, eps);
                                    }
                                    if (writes) {
                                      mean[c] = moments.mean;
                                      var[c] = moments.var;
                                      rstd[c] = moments.rstd;
                                    }
                                  });
  if (!last_to_finish(group, exchanged)) {
    return;
  }
  const std::int64_t count = exchanged.usable ? exchanged.count : kDisagreed;
  if (device::thread_index() == 0) {
    info[0] = count;
    info[1] = exchanged.usable ? exchanged.fingerprint : 0;
  }
  if (!exchanged.usable) {
    write_nan(mean, channels);
    write_nan(var, channels);
    write_nan(rstd, channels);
  }
  update_running(running, mean, var, count, channels, cumulative, momentum);
}

template <class T>
SYNCBN_KERNEL(kExchangeThreads)
exchange_gradients_kernel(const PeerGroup group, const std::int64_t* message, bool share,
                          const std::int64_t* info, const double* mean, const double* rstd,
                          const ChannelArray weight, double* coefficients,
                          const ChannelArray dweight, const ChannelArray dbias,
                          std::int64_t channels) {
  const std::int64_t of_forward = info == nullptr ? 0 : info[0];
  Exchanged exchanged = exchange_channels<T, true>(
      group, message, channels,
      [&](std::int64_t c, const std::int64_t* words, const std::int64_t* own, std::int64_t count,
          bool writes) {
        ChannelGradients gradients{0.0, 0.0, 0.0, 0.0, false};
        SYNCBN_NO_UNROLL  // the integers' code once, not twice
            for (int pass = 0; pass < (share ? 2 : 1); ++pass) {
          if (count > 0) {
            gradients = finalize_gradients_of<T>(pass == 0 ? words : own, mean[c], rstd[c]);
          }
          if (pass == 0 && writes) {
            store_coefficients(coefficients_of(gradients, weight.get(c), rstd[c], count),
                               coefficients, c, channels);
          }
        }
        if (writes) {
          dweight.set(c, gradients.dweight);
          dbias.set(c, gradients.dbias);
        }
      });
  if (info != nullptr && exchanged.count != of_forward) {
    exchanged.usable = false;  // on this rank alone: the next exchange is as good as any
  }
  if (last_to_finish(group, exchanged) && !exchanged.usable) {
    write_nan(coefficients, 3 * channels);
    for (std::int64_t c = device::thread_index(); c < channels; c += kExchangeThreads) {
      dweight.set(c, std::numeric_limits<double>::quiet_NaN());
      dbias.set(c, std::numeric_limits<double>::quiet_NaN());
    }
  }
}

/// In place: what a block writes it has read before, and its header all blocks, before the last one
/// is done.
template <class T>
SYNCBN_KERNEL(kExchangeThreads)
exchange_sums_kernel(const PeerGroup group, std::int64_t* message, std::int64_t channels) {
  constexpr int kWords = FormatTraits<T>::kWords;
  Exchanged exchanged =
      exchange_channels<T, false>(group, message, channels,
                                  [&](std::int64_t c, const std::int64_t* words,
                                      const std::int64_t*, std::int64_t, bool writes) {
                                    for (int i = 0; writes && i < kWords; ++i) {
                                      message[kHeaderWords + c * kWords + i] = words[i];
                                    }
                                  });
  if (!last_to_finish(group, exchanged) || device::thread_index() != 0) {
    return;
  }
  message[kHeaderCount] = exchanged.count;
  message[kHeaderFingerprint] = exchanged.fingerprint * group.ranks;
  message[kHeaderSquare] = exchanged.fingerprint * exchanged.fingerprint * group.ranks;
  if (!exchanged.usable) {
    message[kHeaderFlags] = kRejected;
  }
}

[[noreturn]] void refuse(const char* name, std::int64_t given, const std::string& expected) {
  throw InvalidArgument(std::string(name) + ": got " + std::to_string(given) + ", expected " +
                        expected);
}

void check_group(const PeerGroup& group) {
  if (group.ranks < 1 || group.ranks > kMostPeers) {
    refuse("group.ranks", group.ranks, "1 to " + std::to_string(kMostPeers));
  }
  if (group.rank < 0 || group.rank >= group.ranks) {
    refuse("group.rank", group.rank, "0 to " + std::to_string(group.ranks - 1));
  }
  if (group.blocks < 1 || group.blocks > kMostExchangeBlocks) {
    refuse("group.blocks", group.blocks, "1 to " + std::to_string(kMostExchangeBlocks));
  }
  if (group.slot_words < kLeastSlotWords) {
    refuse("group.slot_words", group.slot_words, std::to_string(kLeastSlotWords) + " or more");
  }
  if (group.timeout <= 0) {
    refuse("group.timeout", group.timeout, "nanoseconds, more than 0");
  }
  const auto given = [&](const void* pointer) { return pointer != nullptr; };
  if (!std::all_of(group.memory, group.memory + group.ranks, given) || group.state == nullptr ||
      group.mark == nullptr) {
    throw InvalidArgument("group: got null, expected memory of each rank, a state and a mark");
  }
}

}  // namespace

void load_peer_exchange(DType dtype, int blocks) {
  int count = 0;
  require("finding the device", device::multiprocessors(&count));
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename ElementTraits<decltype(type)>::SameFormat;
    const auto load_one = [&](auto kernel) {
      load(kernel);
      const int fit = count * device::blocks_at_once(kernel, kExchangeThreads, kExchangeBytes<T>);
      if (fit < blocks) {
        throw Unavailable("an exchange of " + std::to_string(blocks) +
                          " blocks does not fit the device, which runs " + std::to_string(fit) +
                          " of them at once");
      }
    };
    load_one(&exchange_moments_kernel<T>);
    load_one(&exchange_gradients_kernel<T>);
    load_one(&exchange_sums_kernel<T>);
  });
}

void exchange_moments(const std::int64_t* message, DType dtype, const PeerGroup& group,
                      double* mean, double* var, double* rstd, std::int64_t* info,
                      std::int64_t channels, double eps, const RunningStatistics& running,
                      std::optional<double> momentum, const Stream& stream) {
  check_group(group);
  check_eps(eps);
  check_update(running, channels, momentum);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename ElementTraits<decltype(type)>::SameFormat;
    start("exchange_moments", &exchange_moments_kernel<T>, static_cast<unsigned>(group.blocks),
          kExchangeThreads, kExchangeBytes<T>, stream, group, message, mean, var, rstd, info,
          channels, eps, running_arrays(running), !momentum.has_value(), momentum.value_or(0.0));
  });
}

void exchange_gradients(const std::int64_t* message, DType dtype, const PeerGroup& group,
                        bool share, const std::int64_t* info, const double* mean,
                        const double* rstd, const TensorView& weight, double* coefficients,
                        const MutableTensorView& dweight, const MutableTensorView& dbias,
                        std::int64_t channels, const Stream& stream) {
  check_group(group);
  check_per_channel("weight", weight, channels, Device::kCuda);
  check_per_channel("dweight", dweight, channels, Device::kCuda);
  check_per_channel("dbias", dbias, channels, Device::kCuda);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename ElementTraits<decltype(type)>::SameFormat;
    start("exchange_gradients", &exchange_gradients_kernel<T>, static_cast<unsigned>(group.blocks),
          kExchangeThreads, kExchangeBytes<T>, stream, group, message, share, info, mean, rstd,
          channel_array(weight, 1.0), coefficients, channel_array(dweight, 0.0),
          channel_array(dbias, 0.0), channels);
  });
}

void exchange_sums(std::int64_t* message, DType dtype, const PeerGroup& group,
                   std::int64_t channels, const Stream& stream) {
  check_group(group);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename ElementTraits<decltype(type)>::SameFormat;
    start("exchange_sums", &exchange_sums_kernel<T>, static_cast<unsigned>(group.blocks),
          kExchangeThreads, kExchangeBytes<T>, stream, group, message, channels);
  });
}

}  // namespace syncbn::cuda
