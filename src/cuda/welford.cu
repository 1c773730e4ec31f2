// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/launch.cuh"
#include "cuda/loading.hpp"
#include "cuda/window.cuh"
#include "statistics/finalize.hpp"
#include "statistics/header.hpp"
#include "statistics/welford.hpp"

// The welford mode (docs/options.md): each thread's recurrence, merges by warp shuffles, then
// across warps, one block for all elements of a channel. Who takes what depends on the shape and
// layout alone, so a run repeats the bits of the last, on any grid.
namespace syncbn::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kRowColumns = 8;  // channels of a block where they lie side by side

struct WelfordArguments {
  Operand x;
  const std::uint8_t* counts = nullptr;
  MessageHeader header;
  std::int64_t* message = nullptr;
  std::int64_t* record = nullptr;
  std::int64_t channels = 0;
  std::int64_t elements = 0;  ///< of a channel, whether they count or not
  Divisor plane;
  std::int64_t jobs = 0;
};

template <class R>
SYNCBN_DEVICE WelfordMoments<R> from_thread(const WelfordMoments<R>& mine, unsigned distance) {
  return {device::shuffle_xor(mine.count, distance), device::shuffle_xor(mine.mean, distance),
          device::shuffle_xor(mine.m2, distance)};
}

/// Shared memory: kColumns moments for each warp.
template <class T, unsigned kColumns>
SYNCBN_KERNEL(kThreads)
welford_kernel(const WelfordArguments a) {
  using R = Wide<T>;
  const unsigned column = device::thread_index() % kColumns;
  const unsigned lane = device::thread_index() % device::kWarp;
  const unsigned warp = device::thread_index() / device::kWarp;
  auto* const staged = device::shared<WelfordMoments<R>>();
  for (std::int64_t job = device::block_index(); job < a.jobs; job += device::grid_size()) {
    const std::int64_t c = job * kColumns + column;
    const bool inside = c < a.channels;
    WelfordMoments<R> mine;
    SYNCBN_UNROLL(4)
    for (std::int64_t i = device::thread_index() / kColumns; i < a.elements;
         i += kThreads / kColumns) {
      const std::int64_t n = a.plane.quotient(i);
      const std::int64_t e = i - n * a.plane.value();
      if (a.counts == nullptr || a.counts[i] != 0) {
        mine.add(inside ? widened(a.x.at<T>(n, c)[a.x.element(e)]) : R(0));
      }
    }
    SYNCBN_UNROLL(5)
    for (unsigned distance = kColumns; distance < device::kWarp; distance *= 2) {
      mine.merge(from_thread(mine, distance));
    }
    if (lane < kColumns) {
      staged[warp * kColumns + lane] = mine;
    }
    device::block_barrier();  // the warps' moments are staged
    if (device::thread_index() < kColumns) {
      for (unsigned w = 1; w < kThreads / device::kWarp; ++w) {
        mine.merge(staged[w * kColumns + column]);
      }
      if (c == 0) {
        a.header.write(a.message, mine.count);
        a.record[0] = mine.count;
      }
      if (inside) {
        write_record(mine, a.record + 1 + c * record_words<R>());
      }
    }
    device::block_barrier();  // and read
  }
}

/// merged: the sum of all headers, and the ranks' records of `stride` words each.
SYNCBN_KERNEL(kThreads)
merge_kernel(const std::int64_t* merged, std::int64_t stride, int ranks, bool wide, double* mean,
             double* var, double* rstd, std::int64_t* info, std::int64_t channels, double eps) {
  const MessageInfo sum = header_info(merged, ranks);
  const bool valid = usable(sum);
  const std::int64_t first =
      std::int64_t{device::block_index()} * kThreads + device::thread_index();
  if (first == 0) {
    info[0] = valid ? sum.count : -1;
    info[1] = valid ? merged[kHeaderFingerprint] / ranks : 0;
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (std::int64_t c = first; c < channels; c += std::int64_t{device::grid_size()} * kThreads) {
    WelfordMoments<double> all;
    SYNCBN_NO_UNROLL
    for (int r = 0; r < ranks; ++r) {
      const std::int64_t* const record = merged + kHeaderWords + r * stride;
      all.merge(read_record(record + 1 + c * (wide ? 2 : 1), record[0], wide));
    }
    const double variance = !valid           ? nan
                            : all.count == 0 ? 0.0
                                             : all.m2 / static_cast<double>(all.count);
    mean[c] = valid ? all.mean : nan;
    var[c] = variance;
    rstd[c] = !valid ? nan : all.count == 0 ? 0.0 : rstd_of(variance, eps);
  }
}

template <class T, unsigned kColumns>
void start_welford(WelfordArguments& a, const Stream& stream) {
  a.jobs = std::max<std::int64_t>(1, divide_up(a.channels, kColumns));
  start("local_welford", &welford_kernel<T, kColumns>, grid_for(a.jobs, 1), kThreads,
        kThreads / device::kWarp * kColumns * sizeof(WelfordMoments<Wide<T>>), stream, a);
}

}  // namespace

void load_welford(DType dtype) {
  dispatch_dtype(dtype, [](auto type) {
    using T = decltype(type);
    load(&welford_kernel<T, 1>, &welford_kernel<T, kRowColumns>, &merge_kernel);
  });
}

void local_welford(const TensorView& x, const MaskView& mask, const ForwardCall& call,
                   std::int64_t* message, const Stream& stream) {
  load_kernels(x.dtype);
  const SampleView samples(x, mask);
  WelfordArguments a;
  a.x = operand("x", samples);
  a.counts = samples.mask;
  a.header = header_of(call);
  a.header.dtype = x.dtype;
  a.header.channels = samples.channels;
  a.message = message;
  a.record = message + kHeaderWords + call.place;
  a.channels = samples.channels;
  a.elements = samples.samples * samples.plane;
  a.plane = Divisor(std::max<std::int64_t>(1, samples.plane));
  dispatch_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    if (common_layout(samples, samples) == Layout::kRows) {
      start_welford<T, kRowColumns>(a, stream);
    } else {
      start_welford<T, 1>(a, stream);
    }
  });
}

void merge_welford(const std::int64_t* merged, DType dtype, int ranks, double* mean, double* var,
                   double* rstd, std::int64_t* info, std::int64_t channels, double eps,
                   const Stream& stream) {
  start("merge_welford", &merge_kernel, grid_for(channels, kThreads), kThreads, 0, stream, merged,
        welford_words(dtype, channels), ranks, record_words(dtype) == 2, mean, var, rstd, info,
        channels, eps);
}

}  // namespace syncbn::cuda
