// SPDX-License-Identifier: Apache-2.0
#include "cpu/blocks.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "tensors/scratch.hpp"

// Sums and the element-wise pass of one direction in turns, block of channels by block.
namespace syncbn::cpu {
namespace {

/// Channels that kernels merge at once.
constexpr std::int64_t kBlockStep = 8;
/// Elements of a turn. Fewer cost more calls, more leave stores waiting.
constexpr std::int64_t kTurn = 2048;

/// The map of one block, a few elements at a time.
class Turns {
 public:
  Turns(const VectorMap& map, std::int64_t samples, std::int64_t element_size)
      : map_(map), samples_(samples), size_(element_size) {}

  void begin(const ElementsTask& task) {
    task_ = task;
    task_.piecemeal = true;
    task_.sample = 0;
    task_.channel = 0;
    task_.end = 0;
    owed_ = 0;
  }
  void step(std::int64_t elements, NextRead next) {
    task_.next = next;
    owed_ += elements;
    if (owed_ >= kTurn) {
      map(owed_);
      owed_ = 0;
    }
  }
  void finish() {
    task_.next = {};
    while (task_.sample < samples_) {
      map(task_.channels * task_.plane);
    }
  }

 private:
  /// The next elements, about so many; pieces end where cache lines do, or runs.
  void map(std::int64_t elements) {
    if (task_.sample == samples_) {
      return;
    }
    task_.begin = task_.end;
    task_.end += elements;
    const std::int64_t run = task_.plane * (task_.run == 1 ? 1 : task_.channels - task_.channel);
    if (task_.end < run) {
      const std::int64_t first =
          task_.sample * task_.out.sample_stride + task_.channel * task_.out.channel_stride;
      const auto stop = reinterpret_cast<std::uintptr_t>(task_.out.data) +
                        static_cast<std::uintptr_t>((first + task_.end) * size_);
      task_.end -= static_cast<std::int64_t>(stop % kCacheLine) / size_;
    } else {
      task_.end = run;
    }
    if (task_.end > task_.begin) {
      map_.run(task_);
    }
    while (task_.end >= task_.plane) {
      task_.end -= task_.plane;
      if (++task_.channel == task_.channels) {
        task_.channel = 0;
        ++task_.sample;
      }
    }
  }

  const VectorMap& map_;
  std::int64_t samples_;
  std::int64_t size_;
  std::int64_t owed_ = 0;
  ElementsTask task_;  ///< its end is where the next piece begins, in its plane
};

/// Addresses from the first byte to behind the last.
std::pair<std::uintptr_t, std::uintptr_t> extent(const SampleView& view) {
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  const auto take = [&](std::int64_t size, std::int64_t stride) {
    (stride < 0 ? lowest : highest) += (size - 1) * stride;
  };
  take(view.samples, view.sample_stride);
  take(view.channels, view.channel_stride);
  if (view.spatial_dims <= 1) {
    take(view.plane, view.element_stride);
  } else {
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.spatial_dims); ++d) {
      take(view.sizes[d], view.strides[d]);
    }
  }
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  const auto data = reinterpret_cast<std::uintptr_t>(view.data);
  return {data + static_cast<std::uintptr_t>(lowest * size),
          data + static_cast<std::uintptr_t>((highest + 1) * size)};
}

}  // namespace

bool may_overlap(const SampleView& a, const SampleView& b) {
  const auto [a_begin, a_end] = extent(a);
  const auto [b_begin, b_end] = extent(b);
  return a_begin < b_end && b_begin < a_end;
}

std::int64_t block_channels(const SampleView& x, const VectorSums& sums, const VectorMap& map,
                            Direction direction, int threads) {
  constexpr std::int64_t kBlocks = 4;  // of a thread, at least
  // Of one tensor; measured, L2 of 1 MiB. Two blocks are there, in backward of two tensors.
  const std::int64_t bytes = std::int64_t{direction == Direction::kForward ? 400 : 130} << 10;
  constexpr std::int64_t kRun = std::int64_t{16} << 10;          // that follow each other, at least
  constexpr std::int64_t kMost = std::int64_t{1200} << 10;       // of one tensor in backward
  constexpr std::int64_t kBeyondCaches = std::int64_t{8} << 20;  // bytes of one tensor
  const auto size = static_cast<std::int64_t>(size_of(x.dtype));
  const std::int64_t plane = x.plane * size;
  const bool planes = sums.possible() && map.possible() && !sums.in_rows() && !map.in_rows();
  if (!planes || !map.streams() || x.plane < kSegment) {
    return 0;
  }
  std::int64_t block = std::max(bytes / (plane * x.samples), (kRun + plane - 1) / plane);
  if (block >= kBlockStep || x.plane % 8 != 0) {  // masks are read by whole bytes
    block = (block + kBlockStep - 1) / kBlockStep * kBlockStep;
  }
  // Sums of forward fill the time of stores, but converting 16-bit types keeps the core busy as it
  // is. Those of backward take longer than the stores: blocks spare reading beyond the caches.
  const bool pays =
      direction == Direction::kForward
          ? x.dtype == DType::kFloat32
          : x.channels * x.samples * plane >= kBeyondCaches && block * x.samples * plane <= kMost;
  return pays && block * kBlocks * threads <= x.channels ? block : 0;
}

namespace {

struct Channels {
  std::int64_t begin;
  std::int64_t end;
  bool empty() const { return begin >= end; }
};

/// One thread's part in turns.
class Lane {
 public:
  Lane(const SampleView& x, const VectorSums& sums, const VectorMap& map, SumsSink& sink,
       const SetConstants& set_constants)
      : sums_(sums),
        map_(map),
        sink_(sink),
        set_constants_(set_constants),
        turns_(map, x.samples, static_cast<std::int64_t>(size_of(x.dtype))) {}

  /// Sums of some channels, and the map of others; each may be empty.
  void step(const Channels& to_sum, const Channels& to_map) {
    const Meanwhile meanwhile{
        [](void* turns, std::int64_t elements, const char* next_u, const char* next_v) {
          static_cast<Turns*>(turns)->step(elements, {next_u, next_v});
        },
        &turns_};
    if (!to_map.empty()) {
      set_constants_(to_map.begin, to_map.end);
      turns_.begin(map_.task(to_map.begin, to_map.end));
    }
    if (!to_sum.empty()) {
      Windows windows = sums_.sum(to_sum.begin, to_sum.end, to_map.empty() ? nullptr : &meanwhile);
      sink_.publish(windows, to_sum.begin);
    }
    if (!to_map.empty()) {
      turns_.finish();
    }
  }
  /// After the last map on this thread.
  void fence_stores() const { map_.run(map_.task(0, 0)); }

 private:
  const VectorSums& sums_;
  const VectorMap& map_;
  SumsSink& sink_;
  const SetConstants& set_constants_;
  Turns turns_;
};

}  // namespace

void run_in_blocks(const SampleView& x, const VectorSums& sums, VectorMap& map, SumsSink& sink,
                   std::int64_t block, const SetConstants& set_constants, Executor& executor) {
  const std::int64_t blocks = (x.channels + block - 1) / block;
  const std::int64_t shares = std::min<std::int64_t>(executor.concurrency(), blocks);
  executor.parallel_for(0, shares, 1, [&](std::int64_t first, std::int64_t last) {
    Lane lane(x, sums, map, sink, set_constants);
    Channels before{0, 0};
    for (std::int64_t b = blocks * first / shares; b < blocks * last / shares; ++b) {
      const Channels here{b * block, std::min((b + 1) * block, x.channels)};
      lane.step(here, before);
      before = here;
    }
    lane.step({0, 0}, before);
    lane.fence_stores();
  });
}

bool run_in_waves(const SampleView& x, const VectorSums& sums, VectorMap& map, SumsSink& sink,
                  std::int64_t block, GroupSums& group, const SetConstants& set_constants,
                  Executor& executor) {
  const std::int64_t blocks = (x.channels + block - 1) / block;
  const std::int64_t threads = std::min<std::int64_t>(executor.concurrency(), blocks);
  const std::int64_t waves = (blocks + threads - 1) / threads;
  const auto channels_of = [&](std::int64_t wave, std::int64_t thread) {
    const std::int64_t begin = (wave * threads + thread) * block;
    return wave < 0 ? Channels{0, 0} : Channels{begin, std::min(begin + block, x.channels)};
  };
  const auto end_of = [&](std::int64_t wave) {
    return std::min((wave + 1) * threads * block, x.channels);
  };
  const ScratchArray<std::optional<Lane>> lanes(static_cast<std::size_t>(threads));
  for (std::optional<Lane>& lane : lanes) {
    lane.emplace(x, sums, map, sink, set_constants);
  }
  bool come = true;  // what was waited for
  for (std::int64_t wave = 0; wave < waves + 2 && (come || wave < waves); ++wave) {
    executor.parallel_for(0, threads, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t t = first; t < last; ++t) {
        Lane& lane = *lanes[static_cast<std::size_t>(t)];
        lane.step(channels_of(wave, t), channels_of(come ? wave - 2 : -1, t));
        if (threads > 1 || wave > waves) {  // the next step may be another thread's
          lane.fence_stores();
        }
      }
    });
    if (wave < waves) {
      group.publish(end_of(wave));
    }
    if (come && wave >= 1 && wave <= waves) {
      come = group.wait(end_of(wave - 1));
    }
  }
  return come;
}

}  // namespace syncbn::cpu
