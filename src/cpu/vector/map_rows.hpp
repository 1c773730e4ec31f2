// SPDX-License-Identifier: Apache-2.0
// Walks over rows (channels-last) with the passes of elements.hpp, whose rules hold here too.
// Included inside a level file's unnamed namespace, after map.hpp.

constexpr std::int64_t kRowsPiece = std::int64_t{256} << 10;
constexpr int kMostRows = 4;  // at a time

/// Rows of neighbouring channels, `step` elements (of the activation mask: bytes) apart.
template <class T>
struct Rows {
  const T* x = nullptr;
  const T* other = nullptr;
  T* out = nullptr;
  std::uint8_t* activation_mask = nullptr;
  std::int64_t x_step = 0;
  std::int64_t other_step = 0;
  std::int64_t out_step = 0;
  std::int64_t activation_mask_step = 0;

  void advance(std::int64_t rows) {
    x += rows * x_step;
    other += rows * other_step;
    out += rows * out_step;
    if (activation_mask != nullptr) {
      activation_mask += rows * activation_mask_step;
    }
  }
};

/// kRows rows at a time take the channels' constants from memory once, and ask for what lies
/// `ahead` bytes further, if that is not 0.
template <class T, class Pass, bool kStream, int kRows>
inline void map_some_rows(const Rows<T>& rows, std::int64_t channels, std::int64_t ahead,
                          const ElementConstants& constants, const ActivationV<T>& activation) {
  for (std::int64_t c = 0; c < channels; c += kLanesOf<T>) {
    const std::int64_t n = minimum(kLanesOf<T>, channels - c);
    const auto k = Pass::template constants<T>(
        constants, [&](const float* array) { return lanes_from<T>(array + c); });
    Rows<T> row = rows;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r, row.advance(1)) {
      if (ahead > 0) {
        prefetch(reinterpret_cast<const char*>(row.x + c) + ahead);
        if (Pass::kOther) {
          prefetch(reinterpret_cast<const char*>(row.other + c) + ahead);
        }
      }
      const Companions with{row.activation_mask};
      if (n == kLanesOf<T>) {
        map_lanes<T, Pass, kStream, true>(row.x, row.other, row.out, with, c, n, k, activation);
      } else {
        map_lanes<T, Pass, kStream, false>(row.x, row.other, row.out, with, c, n, k, activation);
      }
    }
  }
}

/// How many rows go together, and how many bytes ahead they ask; as measured. Rows that are a page
/// apart share a set of the cache. Long rows from beyond the caches are read best in one stream.
struct RowsPace {
  std::int64_t together;
  std::int64_t ahead;
};
inline RowsPace pace_of(std::int64_t row_bytes, bool streams, bool beyond_caches) {
  constexpr std::int64_t kPage = 4096;
  constexpr std::int64_t kLong = 1024;
  return row_bytes == kPage                    ? RowsPace{2, 1024}
         : row_bytes > kPage || !streams       ? RowsPace{kMostRows, 2048}
         : beyond_caches && row_bytes >= kLong ? RowsPace{1, 1024}
         : kFloatLanes == 16                   ? RowsPace{2, 4096}
                                               : RowsPace{kMostRows, 2048};
}

/// Rows [begin, end) in the order of memory.
template <class T, class Pass, bool kStream>
void map_row_piece(const ElementsTask& task, Rows<T> rows, const std::uint8_t* mask,
                   std::int64_t begin, std::int64_t end, const RowsPace& pace,
                   const ActivationV<T>& activation) {
  rows.advance(begin);
  for (std::int64_t row = begin; row < end;) {
    const std::int64_t some = mask == nullptr && end - row >= pace.together ? pace.together : 1;
    if (mask != nullptr && mask[row] == 0) {
      clear(rows.out, task.channels);
    } else if (some == kMostRows) {
      map_some_rows<T, Pass, kStream, kMostRows>(rows, task.channels, pace.ahead, task.constants,
                                                 activation);
    } else if (some == 2) {
      map_some_rows<T, Pass, kStream, 2>(rows, task.channels, pace.ahead, task.constants,
                                         activation);
    } else {
      map_some_rows<T, Pass, kStream, 1>(rows, task.channels, pace.ahead, task.constants,
                                         activation);
    }
    rows.advance(some);
    row += some;
  }
}

/// Whether every vector of every row can be streamed, as halves at least.
template <class T>
bool rows_aligned(const Operand& out) {
  return elements_past<T, kFloatLanes * sizeof(T)>(static_cast<const T*>(out.data)) == 0 &&
         out.element_stride % kFloatLanes == 0 && out.sample_stride % kFloatLanes == 0;
}

template <class T, class Pass, bool kStream>
void map_rows(const ElementsTask& task) {
  const ActivationV<T> activation(task.activation);
  // Samples without gaps between them, and such of one row, are one.
  const auto joins = [&](const Operand& operand) {
    return task.plane == 1 || operand.sample_stride == task.plane * operand.element_stride;
  };
  const auto step_of = [&](const Operand& operand) {
    return task.plane == 1 ? operand.sample_stride : operand.element_stride;
  };
  const bool joined = joins(task.x) && joins(task.out) && (!Pass::kOther || joins(task.other));
  const std::int64_t plane = joined ? task.end : task.plane;
  const std::int64_t row_bytes = task.channels * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t piece = maximum(1, kRowsPiece / row_bytes / kMostRows) * kMostRows;
  const RowsPace pace = pace_of(row_bytes, kStream, task.beyond_caches);
  for (std::int64_t end = task.end; end > task.begin;) {
    const std::int64_t sample = (end - 1) / plane;
    const std::int64_t origin = sample * plane;
    const std::int64_t begin = maximum(end - piece, maximum(origin, task.begin));
    Rows<T> rows;
    rows.x = plane_of<T>(task.x, sample, 0);
    rows.other = Pass::kOther ? plane_of<T>(task.other, sample, 0) : rows.x;
    rows.out = output_of<T>(task.out, sample, 0);
    rows.activation_mask = mask_run(task.activation_mask, sample, 0);
    rows.x_step = step_of(task.x);
    rows.other_step = Pass::kOther ? step_of(task.other) : rows.x_step;
    rows.out_step = step_of(task.out);
    rows.activation_mask_step = task.activation_mask.run_bytes;
    map_row_piece<T, Pass, kStream>(task, rows, task.mask == nullptr ? nullptr : task.mask + origin,
                                    begin - origin, end - origin, pace, activation);
    end = begin;
  }
  if (kStream) {
    fence_streams();
  }
}
