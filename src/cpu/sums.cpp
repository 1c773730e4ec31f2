#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/cpu_passes.hpp"
#include "cpu/float_environment.hpp"
#include "cpu/kernels.hpp"
#include "cpu/windows.hpp"
#include "statistics/format.hpp"
#include "statistics/scalar.hpp"

// Deals the sums of a tensor to threads and vector kernels, and merges their windows. How it is
// dealt never affects a bit: partials are defined by the contract and added exactly.
namespace syncbn::cpu {
namespace {

/// Below this many elements a second thread costs more than it brings.
constexpr std::int64_t kElementsPerThread = 16384;
constexpr std::int64_t kChannelStep = kChannelPadding;

/// The exponent e with largest < 2^e; 1 if there is nothing to go by.
int exponent_above(double largest) {
  if (largest == 0 || !is_finite(largest)) {
    return 1;
  }
  return static_cast<int>(bit_copy<std::uint64_t>(largest) >> 52) - 1022;
}

/// Guesses where partials will lie from the first few elements of each channel.
template <class T>
void place_windows(Windows& windows, const SampleView& u, const SampleView& v,
                   std::int64_t channel_begin, std::int64_t sample) {
  constexpr std::int64_t kProbes = 6;
  int log_length = 0;
  while ((std::int64_t{1} << log_length) < std::min<std::int64_t>(u.plane, kSegment)) {
    ++log_length;
  }
  const bool along_plane = u.plane > 1;
  const std::int64_t probes = std::min(kProbes, along_plane ? u.plane : u.samples - sample);
  const std::int64_t u_step = along_plane ? u.element_stride : u.sample_stride;
  const std::int64_t v_step = along_plane ? v.element_stride : v.sample_stride;
  const T* u_data = static_cast<const T*>(u.data) + sample * u.sample_stride;
  const T* v_data = static_cast<const T*>(v.data) + sample * v.sample_stride;
  for (std::int64_t i = 0; i < windows.channels(); ++i) {
    const T* a = u_data + (channel_begin + i) * u.channel_stride;
    const T* b = v_data + (channel_begin + i) * v.channel_stride;
    double largest = 0;
    double largest_product = 0;
    for (std::int64_t p = 0; p < probes; ++p) {
      const double magnitude = std::fabs(to_double(a[p * u_step]));
      largest = std::max(largest, magnitude);
      largest_product = std::max(largest_product, magnitude * std::fabs(to_double(b[p * v_step])));
    }
    windows.place(i, 0, exponent_above(largest) + log_length + 4);
    windows.place(i, 1, exponent_above(largest_product) + log_length + 6);
  }
}

void place_windows(Windows& windows, const SampleView& u, const SampleView& v,
                   std::int64_t channel_begin, std::int64_t sample) {
  switch (u.dtype) {
    case DType::kFloat16:
      return place_windows<Half>(windows, u, v, channel_begin, sample);
    case DType::kBFloat16:
      return place_windows<BFloat16>(windows, u, v, channel_begin, sample);
    case DType::kFloat32:
    case DType::kFloat64:  // not summed here
      return place_windows<float>(windows, u, v, channel_begin, sample);
  }
}

Operand operand(const SampleView& view, std::int64_t channel) {
  const auto* data = static_cast<const std::byte*>(view.data);
  return {data + channel * view.channel_stride * static_cast<std::int64_t>(size_of(view.dtype)),
          view.sample_stride, view.channel_stride, view.element_stride};
}

/// One thread's share: channels [c0, c1) x units [u0, u1).
struct Share {
  std::int64_t channel_begin;
  std::int64_t channel_end;
  std::int64_t unit_begin;
  std::int64_t unit_end;
};

std::unique_ptr<Windows> sum_share(const Kernels& kernels, bool rows, const SampleView& u,
                                   const SampleView* v, const Share& share) {
  const std::int64_t segments = (u.plane + kSegment - 1) / kSegment;
  const std::int64_t channels = share.channel_end - share.channel_begin;
  auto windows = std::make_unique<Windows>(format_of(u.dtype), channels);
  place_windows(*windows, u, v == nullptr ? u : *v, share.channel_begin,
                share.unit_begin / segments);
  SumsTask task;
  task.u = operand(u, share.channel_begin);
  if (v != nullptr) {
    task.v = operand(*v, share.channel_begin);
  }
  task.channels = channels;
  task.plane = u.plane;
  for (std::int64_t unit = share.unit_begin; unit < share.unit_end; unit += kFlushInterval) {
    if (unit > share.unit_begin) {
      windows->flush(0, channels);
    }
    task.unit_begin = unit;
    task.unit_end = std::min(unit + kFlushInterval, share.unit_end);
    (rows ? kernels.sum_rows : kernels.sum_planes)(u.dtype, task, *windows, windows->arrays());
  }
  return windows;
}

std::vector<Share> deal(const SampleView& u, bool rows, int threads) {
  const std::int64_t units = u.samples * ((u.plane + kSegment - 1) / kSegment);
  const std::int64_t most = std::max<std::int64_t>(
      1, std::min<std::int64_t>(threads, u.samples * u.channels * u.plane / kElementsPerThread));
  const std::int64_t blocks = (u.channels + kChannelStep - 1) / kChannelStep;
  // Rows are read whole; planes of different channels need no merge afterwards.
  const bool by_channel = rows ? units < most && blocks > units : blocks >= most;
  const std::int64_t pieces = std::min(most, by_channel ? blocks : units);
  std::vector<Share> shares;
  for (std::int64_t i = 0; i < pieces; ++i) {
    if (by_channel) {
      shares.push_back({blocks * i / pieces * kChannelStep,
                        std::min(u.channels, blocks * (i + 1) / pieces * kChannelStep), 0, units});
    } else {
      shares.push_back({0, u.channels, units * i / pieces, units * (i + 1) / pieces});
    }
  }
  return shares;
}

}  // namespace

void local_sums(const SampleView& u, const SampleView* v, std::int64_t* words, Executor& executor) {
  const Kernels* kernels = active_kernels();
  const Layout layout = common_layout(u, v == nullptr ? u : *v);
  if (kernels == nullptr || u.dtype == DType::kFloat64 || layout == Layout::kStrided) {
    reference::local_sums(u, v, words, executor);
    return;
  }
  const bool rows = layout == Layout::kRows;
  const int word_count = format_of(u.dtype).words();
  const std::vector<Share> shares = deal(u, rows, executor.concurrency());
  const bool by_channel = shares.size() == 1 || shares.front().channel_end < u.channels;
  std::vector<std::unique_ptr<Windows>> windows(shares.size());
  executor.parallel_for(
      0, static_cast<std::int64_t>(shares.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        const FloatEnvironment environment;
        for (std::int64_t i = begin; i < end; ++i) {
          const auto s = static_cast<std::size_t>(i);
          windows[s] = sum_share(*kernels, rows, u, v, shares[s]);
          for (std::int64_t c = 0; by_channel && c < windows[s]->channels(); ++c) {
            windows[s]->write_words(c, words + (shares[s].channel_begin + c) * word_count);
          }
        }
      });
  if (by_channel) {
    return;
  }
  for (std::size_t i = 1; i < windows.size(); ++i) {
    windows[0]->absorb(*windows[i], 0, u.channels);
  }
  for (std::int64_t c = 0; c < u.channels; ++c) {
    windows[0]->write_words(c, words + c * word_count);
  }
}

}  // namespace syncbn::cpu
