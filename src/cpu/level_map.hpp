// Walks over planes and rows with the passes of level_elements.hpp, whose rules hold here too.

constexpr std::int64_t kElementsAhead = 1024;  // bytes, as kSumsAhead

/// Whole vectors (n == kFloatLanes) or the first n lanes at index i.
template <class T, class Pass, bool kStream, bool kWhole>
inline void map_vector(const T* x, const T* other, T* out, std::uint8_t* activation_mask,
                       std::int64_t i, std::int64_t n, const typename Pass::Constants& k,
                       const ActivationV& activation) {
  const FloatV a = kWhole ? load(x + i) : load_partial(x + i, n);
  const FloatV b = !Pass::kOther ? a : kWhole ? load(other + i) : load_partial(other + i, n);
  unsigned bits =
      Pass::kActivationMask == ActivationMaskUse::kRead ? load_bits(activation_mask + i / 8, n) : 0;
  const FloatV result = Pass::apply(a, b, k, activation, bits, T{});
  if (Pass::kActivationMask == ActivationMaskUse::kWrite && activation_mask != nullptr) {
    store_bits(activation_mask + i / 8, bits, n);
  }
  if (!kWhole) {
    store_partial(out + i, result, n);
  } else if (kStream) {
    stream(out + i, result);
  } else {
    store(out + i, result);
  }
}

/// `count` contiguous elements with the same constants.
template <class T, class Pass, bool kStream>
inline void map_contiguous(const T* x, const T* other, T* out, std::uint8_t* activation_mask,
                           std::int64_t count, const typename Pass::Constants& k,
                           const ActivationV& activation) {
  std::int64_t i = 0;
  if (kStream) {  // up to an aligned address first
    constexpr std::uintptr_t kAlignment = kFloatLanes * sizeof(T);
    const auto past = reinterpret_cast<std::uintptr_t>(out) % kAlignment / sizeof(T);
    if (past != 0 &&
        activation_mask != nullptr) {  // vectors have to begin at a byte of the activation mask
      map_contiguous<T, Pass, false>(x, other, out, activation_mask, count, k, activation);
      return;
    }
    if (past != 0) {
      i = minimum(count, kFloatLanes - static_cast<std::int64_t>(past));
      map_vector<T, Pass, kStream, false>(x, other, out, activation_mask, 0, i, k, activation);
    }
  }
#pragma GCC unroll 2
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    prefetch(reinterpret_cast<const char*>(x + i) + kElementsAhead);
    if (Pass::kOther) {
      prefetch(reinterpret_cast<const char*>(other + i) + kElementsAhead);
    }
    map_vector<T, Pass, kStream, true>(x, other, out, activation_mask, i, kFloatLanes, k,
                                       activation);
  }
  if (i < count) {
    map_vector<T, Pass, kStream, false>(x, other, out, activation_mask, i, count - i, k,
                                        activation);
  }
}

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
};

/// kRows rows at a time take the channels' constants from memory once.
template <class T, class Pass, bool kStream, int kRows>
inline void map_some_rows(const Rows<T>& rows, std::int64_t channels,
                          const ElementConstants& constants, const ActivationV& activation) {
  for (std::int64_t c = 0; c < channels; c += kFloatLanes) {
    const std::int64_t n = minimum(kFloatLanes, channels - c);
    const bool whole = n == kFloatLanes;
    const auto k = Pass::constants(constants, [&](const float* array) { return load(array + c); });
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const T* x = rows.x + r * rows.x_step;
      const T* other = rows.other + r * rows.other_step;
      T* out = rows.out + r * rows.out_step;
      std::uint8_t* activation_mask = rows.activation_mask == nullptr
                                          ? nullptr
                                          : rows.activation_mask + r * rows.activation_mask_step;
      if (kRows > 1) {  // the rows that come next
        prefetch(x - kRows * rows.x_step + c);
        if (Pass::kOther) {
          prefetch(other - kRows * rows.other_step + c);
        }
      }
      if (whole) {
        map_vector<T, Pass, kStream, true>(x, other, out, activation_mask, c, n, k, activation);
      } else {
        map_vector<T, Pass, kStream, false>(x, other, out, activation_mask, c, n, k, activation);
      }
    }
  }
}

inline std::uint8_t* mask_run(const ActivationMaskOperand& activation_mask, std::int64_t sample,
                              std::int64_t run) {
  return activation_mask.data == nullptr
             ? nullptr
             : activation_mask.data + sample * activation_mask.sample_bytes +
                   run * activation_mask.run_bytes;
}

// Both walk backwards in runs: what the sums read last is still in a cache.

/// Item `item` of map_planes into `out`.
template <class T, class Pass, bool kStream>
inline void map_plane(const ElementsTask& task, std::int64_t item, std::int64_t blocks,
                      const ActivationV& activation, T* out) {
  const std::int64_t channel = item / blocks % task.channels;
  const std::int64_t sample = item / blocks / task.channels;
  const std::int64_t offset = item % blocks * kElementBlock;
  const std::int64_t count = minimum(kElementBlock, task.plane - offset);
  const T* x = plane_of<T>(task.x, sample, channel) + offset;
  const T* other = Pass::kOther ? plane_of<T>(task.other, sample, channel) + offset : x;
  std::uint8_t* activation_mask = mask_run(task.activation_mask, sample, channel);
  const auto k = Pass::constants(task.constants,
                                 [&](const float* array) { return broadcast(array[channel]); });
  map_contiguous<T, Pass, kStream>(
      x, other, out, activation_mask == nullptr ? activation_mask : activation_mask + offset / 8,
      count, k, activation);
  if (task.mask != nullptr) {  // while the block is in a cache
    keep_counting(out, out, task.mask + sample * task.plane + offset, count);
  }
}

template <class T>
inline void copy_some(const T* from, T* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = from[i];
  }
}

/// Short planes that follow each other in memory, written to a buffer in the first cache and from
/// there past the caches: alone they would end in the middle of a cache line too often.
template <class T, class Pass>
void map_short_planes(const ElementsTask& task) {
  constexpr std::int64_t kLine = kCacheLine / static_cast<std::int64_t>(sizeof(T));
  constexpr std::int64_t kRoom = 2 * kStreamRun / static_cast<std::int64_t>(sizeof(T));
  alignas(kCacheLine) T buffer[kRoom + kLine];
  const ActivationV activation(task.activation);
  const std::int64_t at_once = kRoom / task.plane;
  for (std::int64_t end = task.end; end > task.begin;) {
    const std::int64_t begin = end - minimum(at_once, end - task.begin);
    T* out = output_of<T>(task.out, 0, 0) + begin * task.plane;
    const auto past = reinterpret_cast<std::uintptr_t>(out) % kCacheLine / sizeof(T);
    T* from = buffer + past;
    for (std::int64_t item = begin; item < end; ++item) {
      map_plane<T, Pass, false>(task, item, 1, activation, from + (item - begin) * task.plane);
    }
    const std::int64_t count = (end - begin) * task.plane;
    std::int64_t i = past == 0 ? 0 : minimum(count, kLine - static_cast<std::int64_t>(past));
    copy_some(from, out, i);
    for (; i + kLine <= count; i += kLine) {
      stream_line(from + i, out + i);
    }
    copy_some(from + i, out + i, count - i);
    end = begin;
  }
}

template <class T, class Pass, bool kStream>
void map_planes(const ElementsTask& task) {
  const ActivationV activation(task.activation);
  const std::int64_t bytes = task.plane * static_cast<std::int64_t>(sizeof(T));
  const bool whole_lines =
      bytes % kCacheLine == 0 && reinterpret_cast<std::uintptr_t>(task.out.data) % kCacheLine == 0;
  if (kStream && bytes < kStreamRun && (!whole_lines || task.mask != nullptr)) {
    map_short_planes<T, Pass>(task);
  } else {
    const std::int64_t blocks = (task.plane + kElementBlock - 1) / kElementBlock;
    const std::int64_t at_once = 1 + kStreamRun / bytes;
    for (std::int64_t end = task.end; end > task.begin;) {
      const std::int64_t begin = end - minimum(at_once, end - task.begin);
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t plane = item / blocks;
        T* out = output_of<T>(task.out, plane / task.channels, plane % task.channels);
        map_plane<T, Pass, kStream>(task, item, blocks, activation,
                                    out + item % blocks * kElementBlock);
      }
      end = begin;
    }
  }
  if (kStream) {
    _mm_sfence();
  }
}

template <class T, class Pass, bool kStream>
void map_rows(const ElementsTask& task) {
  constexpr int kRows = 4;
  const ActivationV activation(task.activation);
  // Streaming needs every vector of every row aligned.
  constexpr std::int64_t kAlignment = kFloatLanes * static_cast<std::int64_t>(sizeof(T));
  const bool aligned =
      kStream && reinterpret_cast<std::uintptr_t>(task.out.data) % kAlignment == 0 &&
      task.out.element_stride % kFloatLanes == 0 && task.out.sample_stride % kFloatLanes == 0;
  // Rows of one element a sample follow each other like those of one sample.
  const bool single = task.plane == 1;
  const std::int64_t plane = single ? task.end : task.plane;
  const auto step_of = [&](const Operand& operand) {
    return single ? operand.sample_stride : operand.element_stride;
  };
  Rows<T> rows;
  rows.x_step = step_of(task.x);
  rows.other_step = Pass::kOther ? step_of(task.other) : rows.x_step;
  rows.out_step = step_of(task.out);
  rows.activation_mask_step =
      single ? task.activation_mask.sample_bytes : task.activation_mask.run_bytes;
  for (std::int64_t end = task.end; end > task.begin;) {
    const std::int64_t sample = (end - 1) / plane;
    const std::int64_t origin = sample * plane;
    const std::int64_t begin = origin > task.begin ? origin : task.begin;
    while (end > begin) {
      const bool several = task.mask == nullptr && end - begin >= kRows;
      end -= several ? kRows : 1;
      const std::int64_t e = end - origin;
      rows.x = plane_of<T>(task.x, sample, 0) + e * rows.x_step;
      rows.other = Pass::kOther ? plane_of<T>(task.other, sample, 0) + e * rows.other_step : rows.x;
      rows.out = output_of<T>(task.out, sample, 0) + e * rows.out_step;
      rows.activation_mask = mask_run(task.activation_mask, sample, 0);
      if (rows.activation_mask != nullptr) {
        rows.activation_mask += e * rows.activation_mask_step;
      }
      if (task.mask != nullptr && task.mask[end] == 0) {
        clear(rows.out, task.channels);
      } else if (several && aligned) {
        map_some_rows<T, Pass, kStream, kRows>(rows, task.channels, task.constants, activation);
      } else if (several) {
        map_some_rows<T, Pass, false, kRows>(rows, task.channels, task.constants, activation);
      } else if (aligned) {
        map_some_rows<T, Pass, kStream, 1>(rows, task.channels, task.constants, activation);
      } else {
        map_some_rows<T, Pass, false, 1>(rows, task.channels, task.constants, activation);
      }
    }
  }
  if (kStream) {
    _mm_sfence();
  }
}
