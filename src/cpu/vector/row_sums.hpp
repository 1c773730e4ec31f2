// SPDX-License-Identifier: Apache-2.0
// The sums of rows (channels-last) over the vector type of one level. Included inside a level
// file's unnamed namespace, after single_rows.hpp and sums.hpp, whose rules hold here
// too.
//
// A segment is summed in blocks of 64 rows, a block lane by lane: four rows of a lane for each load
// of its accumulators. Long segments have wide blocks: hardware prefetchers follow the four rows,
// and of one tensor, which gives them too little time, the next block is asked for as well. Short
// ones, and sums with a mask or an activation, have blocks of 64 channels, whose accumulators stay
// in the first cache. There rows end too soon for prefetchers, so the next block is asked for row
// after row. All is asked for into the second cache: rows often lie at multiples of 4 KiB, which
// meet in few sets of the first.

constexpr std::int64_t kLaneRows = 4;
constexpr std::int64_t kBlockRows = kLaneRows * kLanes;
constexpr std::int64_t kColumn = 16;         ///< channels at a time
constexpr std::int64_t kWideChannels = 512;  ///< of a wide block; its accumulators take 128 KiB

/// Whether blocks are wide: measured. In rows of less than 512 bytes prefetchers do not pay, and of
/// more than two blocks narrow ones are better.
template <class T>
inline bool are_wide(const SumsTask& task) {
  return task.plane >= 2 * kBlockRows && task.mask == nullptr &&
         task.channels * static_cast<std::int64_t>(sizeof(T)) >= 512 &&
         task.channels <= 2 * kWideChannels;
}

/// Rows of one segment, for at most kWidth neighbouring channels.
template <std::int64_t kWidth>
struct RowBlock {
  RowBlock(const SumsTask& task, std::int64_t of_unit, std::int64_t from_row,
           std::int64_t from_channel)
      : unit(of_unit), row(from_row), channel(from_channel) {
    const std::int64_t segments = (task.plane + kSegment - 1) / kSegment;
    sample = unit / segments;
    segment = unit % segments * kSegment;
    left = minimum(kSegment, task.plane - segment) - row;
    rows = minimum(kBlockRows, left);
    channels = minimum(kWidth, task.channels - channel);
  }
  /// The one that is summed after this.
  RowBlock next(const SumsTask& task) const {
    return left > rows                          ? RowBlock(task, unit, row + rows, channel)
           : channel + channels < task.channels ? RowBlock(task, unit, 0, channel + channels)
                                                : RowBlock(task, unit + 1, 0, 0);
  }
  template <class T>
  const T* of(const Operand& operand) const {
    return plane_of<T>(operand, sample, 0) + (segment + row) * operand.element_stride + channel;
  }

  std::int64_t unit;
  std::int64_t row;  ///< in the segment
  std::int64_t channel;
  std::int64_t sample;
  std::int64_t segment;  ///< its first element
  std::int64_t left;     ///< rows of the segment from `row` on
  std::int64_t rows;
  std::int64_t channels;
};

/// Asks for the rows of the next wide block where this one's are read.
template <class T, bool kProduct>
struct Below {
  std::int64_t distance;  ///< in elements
};

template <int kRows, class T, bool kProduct>
SYNCBN_INLINE void ask(Ahead<T, kProduct>& ahead, const T*, std::int64_t) {
  ahead.ask();
}
template <int kRows, class T, bool kProduct>
SYNCBN_INLINE void ask(Below<T, kProduct>& below, const T* u, std::int64_t step) {
#pragma GCC unroll 4
  for (int k = 0; k < (kProduct ? 0 : kRows); ++k) {
    prefetch_second(u + k * step + below.distance);
  }
}

/// Adds kRows rows of one lane, `u_step` and `v_step` elements apart, for `channels` channels.
template <class T, bool kProduct, int kRows, bool kFresh, class Asked>
inline void add_rows(const T* u, std::int64_t u_step, const T* v, std::int64_t v_step,
                     std::int64_t channels, double* first, double* second, Asked& ahead) {
  constexpr int kVectors = kColumn / kDoubleLanes;
  Asked asking = ahead;
  std::int64_t c = 0;
  for (; c + kColumn <= channels; c += kColumn) {
    ask<kRows>(asking, u + c, u_step);
    DoubleV a[kVectors];
    DoubleV b[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      a[i] = kFresh ? zero_double() : load_double(first + c + i * kDoubleLanes);
      b[i] = kFresh ? zero_double() : load_double(second + c + i * kDoubleLanes);
    }
#pragma GCC unroll 4
    for (int k = 0; k < kRows; ++k) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i += 2) {
        const std::int64_t at = c + i * kDoubleLanes;
        add_pair<T, kProduct, true>(u + k * u_step + at, v + k * v_step + at, 0, a + i, b + i);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      store_double(first + c + i * kDoubleLanes, a[i]);
      store_double(second + c + i * kDoubleLanes, b[i]);
    }
  }
  for (; c < channels; c += kDoubleLanes) {
    DoubleV a = kFresh ? zero_double() : load_double(first + c);
    DoubleV b = kFresh ? zero_double() : load_double(second + c);
    for (int k = 0; k < kRows; ++k) {
      const DoubleV x = load_double_partial(u + k * u_step + c, channels - c);
      const DoubleV y = kProduct ? load_double_partial(v + k * v_step + c, channels - c) : x;
      a = a + x;
      b = fused(x, y, b);
    }
    store_double(first + c, a);
    store_double(second + c, b);
  }
  ahead = asking;
}

template <class T, bool kProduct, bool kFresh, class Asked>
inline void add_some_rows(std::int64_t rows, const T* u, std::int64_t u_step, const T* v,
                          std::int64_t v_step, std::int64_t channels, double* first, double* second,
                          Asked& ahead) {
  switch (rows) {
#define SYNCBN_ROWS(K) \
  case K:              \
    return add_rows<T, kProduct, K, kFresh>(u, u_step, v, v_step, channels, first, second, ahead);
    SYNCBN_ROWS(1)
    SYNCBN_ROWS(2)
    SYNCBN_ROWS(3)
    SYNCBN_ROWS(4)
#undef SYNCBN_ROWS
    default:
      return add_rows<T, kProduct, 0, kFresh>(u, u_step, v, v_step, channels, first, second, ahead);
  }
}

/// Adds those of `rows` rows one by one that count, by every kLanes-th byte of mask, if it is
/// there.
template <class T, bool kProduct, class Asked>
__attribute__((noinline)) void add_counting_rows(const std::uint8_t* mask, std::int64_t rows,
                                                 bool fresh, const T* u, std::int64_t u_step,
                                                 const T* v, std::int64_t v_step,
                                                 std::int64_t channels, double* first,
                                                 double* second, Asked& ahead) {
  if (fresh) {
    add_rows<T, kProduct, 0, true>(u, u_step, v, v_step, channels, first, second, ahead);
  }
  for (std::int64_t k = 0; k < rows; ++k) {
    if (mask == nullptr || mask[k * kLanes] != 0) {
      add_rows<T, kProduct, 1, false>(u + k * u_step, u_step, v + k * v_step, v_step, channels,
                                      first, second, ahead);
    }
  }
}

/// Accumulators of a block; [lane][sum][channel], whole columns in load_pair's order.
template <std::int64_t kWidth>
struct LaneSums {
  /// Of a wide block the rows of accumulators lie apart, or they would meet in few sets of a cache.
  static constexpr bool kWide = kWidth > kBlockChannels;
  static constexpr std::int64_t kApart = kWide ? kColumn : 0;

  explicit LaneSums(std::int64_t channels)
      : used((minimum(kWidth, channels) + kColumn - 1) / kColumn * kColumn + kApart) {}
  std::int64_t at(std::int64_t lane, int sum) const {
    return (2 * lane + sum) * (kWide ? used : kWidth);
  }

  std::int64_t used;
  alignas(64) double sums[2 * kLanes * (kWidth + kApart)];
};

/// Folds the lanes of kDoubleLanes channels.
template <std::int64_t kWidth>
inline DoubleV fold_lanes(const LaneSums<kWidth>& of, std::int64_t c, int sum) {
  DoubleV lane[8];
  for (int l = 0; l < 8; ++l) {
    lane[l] =
        load_double(of.sums + of.at(l, sum) + c) + load_double(of.sums + of.at(l + 8, sum) + c);
  }
  for (int h = 4; h >= 1; h /= 2) {
    for (int l = 0; l < h; ++l) {
      lane[l] = lane[l] + lane[l + h];
    }
  }
  return lane[0];
}

/// Merges the partials of a block's channels.
template <class T, std::int64_t kWidth>
inline void merge_lanes(Windows& windows, const WindowArrays& w, const LaneSums<kWidth>& of,
                        std::int64_t channel, std::int64_t channels) {
  for (int sum = 0; sum < 2; ++sum) {
    std::int64_t c = 0;
    for (; c + 2 * kDoubleLanes <= channels / kColumn * kColumn; c += 2 * kDoubleLanes) {
      DoubleV a = fold_lanes(of, c, sum);
      DoubleV b = fold_lanes(of, c + kDoubleLanes, sum);
      in_order(a, b, T{});
      merge_channels(windows, w, channel + c, sum, a);
      merge_channels(windows, w, channel + c + kDoubleLanes, sum, b);
    }
    for (; c < channels; c += kDoubleLanes) {
      merge_channels(windows, w, channel + c, sum, fold_lanes(of, c, sum));
    }
  }
}

template <class T, SumsOf kOf, std::int64_t kWidth>
void sum_blocks(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  constexpr bool kProduct = kOf != SumsOf::kSquare;
  constexpr bool kWide = kWidth > kBlockChannels;
  alignas(64) T buffer[kOf == SumsOf::kActivated ? kBlockRows * kBlockChannels : 1];
  LaneSums<kWidth> lanes(task.channels);
  RowBlock<kWidth> next(task, task.unit_begin, 0, 0);
  while (next.unit < task.unit_end) {
    const RowBlock block = next;
    next = block.next(task);
    std::conditional_t<kWide, Below<T, kProduct>, Ahead<T, kProduct>> ahead;
    if constexpr (kWide) {
      ahead = {kBlockRows * task.u.element_stride};
    } else if (next.unit < task.unit_end) {
      ahead = {next.template of<T>(task.u),
               task.u.element_stride,
               kProduct ? next.template of<T>(task.v) : nullptr,
               task.v.element_stride,
               next.rows,
               next.channels};
    }
    const std::uint8_t* mask =
        kWide || task.mask == nullptr
            ? nullptr
            : task.mask + block.sample * task.plane + block.segment + block.row;
    std::int64_t u_step = task.u.element_stride;
    const std::int64_t v_step = task.v.element_stride;
    const T* u = block.template of<T>(task.u);
    const T* v = kProduct ? block.template of<T>(task.v) : u;
    if (kOf == SumsOf::kActivated) {
      const bool keep = task.out.data != nullptr;
      u_step = keep ? task.out.element_stride : block.channels;
      T* target = keep ? const_cast<T*>(block.template of<T>(task.out)) : buffer;
      for (std::int64_t k = 0; k < block.rows; ++k) {
        if (mask != nullptr && mask[k] == 0) {
          clear(target + k * u_step, block.channels);
        } else {
          pull_row(task, block.sample, block.segment + block.row + k, block.channel, block.channels,
                   target + k * u_step);
        }
      }
      u = target;
    }
    const bool fresh = block.row == 0;
    for (std::int64_t lane = 0; lane < (fresh ? kLanes : minimum(kLanes, block.rows)); ++lane) {
      const std::int64_t rows = lane < block.rows ? (block.rows - lane + kLanes - 1) / kLanes : 0;
      const T* from = u + lane * u_step;
      const T* other = v + lane * v_step;
      double* first = lanes.sums + lanes.at(lane, 0);
      double* second = lanes.sums + lanes.at(lane, 1);
      const std::uint8_t* counting = mask == nullptr ? nullptr : mask + lane;
      if (mask != nullptr || (kWide && rows < kLaneRows)) {  // rare, so not worth more code
        add_counting_rows<T, kProduct>(counting, rows, fresh, from, kLanes * u_step, other,
                                       kLanes * v_step, block.channels, first, second, ahead);
      } else if (fresh) {
        add_some_rows<T, kProduct, true>(kWide ? kLaneRows : rows, from, kLanes * u_step, other,
                                         kLanes * v_step, block.channels, first, second, ahead);
      } else {
        add_some_rows<T, kProduct, false>(kWide ? kLaneRows : rows, from, kLanes * u_step, other,
                                          kLanes * v_step, block.channels, first, second, ahead);
      }
    }
    if (block.left > block.rows) {
      continue;
    }
    merge_lanes<T>(windows, w, lanes, block.channel, block.channels);
  }
}

template <class T, SumsOf kOf>
void sum_rows(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  if (task.plane == 1) {
    sum_single_rows<T, kOf>(task, windows, w);
  } else if (kOf == SumsOf::kActivated || !are_wide<T>(task)) {
    sum_blocks<T, kOf, kBlockChannels>(task, windows, w);
  } else if constexpr (kOf != SumsOf::kActivated) {
    sum_blocks<T, kOf, kWideChannels>(task, windows, w);
  }
}
