// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <vector>

#include "cpu/cpu_passes.hpp"
#include "statistics/dtype.hpp"
#include "statistics/elements.hpp"
#include "statistics/welford.hpp"

// Welford's recurrence, in binary32 for inputs of at most 32 bits: along a channel in 16 lanes, or
// over neighbouring channels at once. How the work is dealt to threads does not matter.
namespace syncbn::cpu {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kBuffer = 1024;
constexpr std::int64_t kBlockChannels = 64;

/// mean and M2 of `kSize` streams side by side, which have taken `count` numbers each.
template <class R, std::int64_t kSize>
struct Streams {
  alignas(64) std::array<R, kSize> mean{};
  alignas(64) std::array<R, kSize> m2{};

  void add(const R* values, std::int64_t size, std::int64_t count) {
    const R share = R(1) / static_cast<R>(count + 1);
    for (std::int64_t i = 0; i < size; ++i) {
      const auto s = static_cast<std::size_t>(i);
      const R delta = values[i] - mean[s];
      mean[s] += delta * share;
      m2[s] += delta * (values[i] - mean[s]);
    }
  }
};

/// One channel: its elements go through a buffer into the lanes.
template <class T>
void channel_record(const SampleView& x, std::int64_t c, std::int64_t* record) {
  using R = Wide<T>;
  const T* data = static_cast<const T*>(x.data);
  Streams<R, kLanes> lanes;
  std::array<std::int64_t, kLanes> counts{};
  std::int64_t rounds = 0;
  std::array<R, kBuffer> buffer;
  std::int64_t filled = 0;
  const auto drain = [&] {
    for (std::int64_t i = 0; i < filled; i += kLanes, ++rounds) {
      lanes.add(buffer.data() + i, std::min(kLanes, filled - i), rounds);
      for (std::int64_t l = 0; l < std::min(kLanes, filled - i); ++l) {
        ++counts[static_cast<std::size_t>(l)];
      }
    }
    filled = 0;
  };
  for (std::int64_t n = 0; n < x.samples; ++n) {
    PlaneCursor at(x, n, c, 0);
    for (std::int64_t e = 0; e < x.plane; ++e, at.advance()) {
      if (!x.counts(n, e)) {
        continue;
      }
      buffer[static_cast<std::size_t>(filled++)] = widened(data[at.offset()]);
      if (filled == kBuffer) {
        drain();
      }
    }
  }
  drain();
  WelfordMoments<R> all;
  for (std::size_t l = 0; l < kLanes; ++l) {
    all.merge({counts[l], lanes.mean[l], lanes.m2[l]});
  }
  write_record(all, record);
}

/// Channels [begin, end) of a tensor whose channels are neighbours in memory.
template <class T>
void rows_records(const SampleView& x, std::int64_t begin, std::int64_t end,
                  std::int64_t* records) {
  using R = Wide<T>;
  constexpr std::int64_t kWords = record_words<R>();
  const T* data = static_cast<const T*>(x.data);
  for (std::int64_t c = begin; c < end; c += kBlockChannels) {
    const std::int64_t channels = std::min(kBlockChannels, end - c);
    Streams<R, kBlockChannels> streams;
    std::array<R, kBlockChannels> row;
    std::int64_t count = 0;
    for (std::int64_t n = 0; n < x.samples; ++n) {
      for (std::int64_t e = 0; e < x.plane; ++e) {
        if (!x.counts(n, e)) {
          continue;
        }
        const T* from = data + n * x.sample_stride + e * x.element_stride + c;
        for (std::int64_t i = 0; i < channels; ++i) {
          row[static_cast<std::size_t>(i)] = widened(from[i]);
        }
        streams.add(row.data(), channels, count++);
      }
    }
    for (std::int64_t i = 0; i < channels; ++i) {
      const auto s = static_cast<std::size_t>(i);
      write_record(WelfordMoments<R>{count, streams.mean[s], streams.m2[s]},
                   records + (c + i) * kWords);
    }
  }
}

template <class T>
void records_of(const SampleView& x, std::int64_t* records, Executor& executor) {
  const bool rows = common_layout(x, x) == Layout::kRows;
  // Rows are dealt in whole blocks, so that the executor does not decide where a block begins.
  const std::int64_t step = rows ? kBlockChannels : 1;
  executor.parallel_for(0, (x.channels + step - 1) / step, 1,
                        [&](std::int64_t begin, std::int64_t end) {
                          const std::int64_t last = std::min(x.channels, end * step);
                          if (rows) {
                            rows_records<T>(x, begin * step, last, records);
                            return;
                          }
                          for (std::int64_t c = begin; c < last; ++c) {
                            channel_record<T>(x, c, records + c * record_words<Wide<T>>());
                          }
                        });
}

}  // namespace

void welford_records(const SampleView& x, std::int64_t* records, Executor& executor) {
  dispatch_dtype(x.dtype, [&](auto type) { records_of<decltype(type)>(x, records, executor); });
}

}  // namespace syncbn::cpu
