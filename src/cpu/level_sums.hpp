// The sums passes over the vector type of one level. Included inside a level file's unnamed
// namespace, after level_single_rows.hpp and level_elements.hpp, whose rules hold here too.

constexpr int kParts = kLanes / kDoubleLanes;

inline QuadV zero_quad() { return {_mm256_setzero_pd()}; }

// Four quads, one per partial, to the four partials: the folds h = 2 and h = 1.
inline QuadV fold_quads(QuadV a, QuadV b, QuadV c, QuadV d) {
  const __m256d ab_even = _mm256_unpacklo_pd(a.v, b.v);
  const __m256d ab_odd = _mm256_unpackhi_pd(a.v, b.v);
  const __m256d cd_even = _mm256_unpacklo_pd(c.v, d.v);
  const __m256d cd_odd = _mm256_unpackhi_pd(c.v, d.v);
  const __m256d even = _mm256_add_pd(_mm256_permute2f128_pd(ab_even, cd_even, 0x20),
                                     _mm256_permute2f128_pd(ab_even, cd_even, 0x31));
  const __m256d odd = _mm256_add_pd(_mm256_permute2f128_pd(ab_odd, cd_odd, 0x20),
                                    _mm256_permute2f128_pd(ab_odd, cd_odd, 0x31));
  return {_mm256_add_pd(even, odd)};
}

// How far ahead contiguous passes ask for memory, in bytes: one core's hardware prefetchers stop at
// every page.
constexpr std::int64_t kSumsAhead = 2048;

/// Lane sums of one contiguous segment, folded to four lanes. kProduct: second = u*v, else u*u.
template <class T, bool kProduct>
SYNCBN_INLINE void sum_segment(const T* u, const T* v, std::int64_t length, QuadV& first,
                               QuadV& second) {
  DoubleV a[kParts];
  DoubleV b[kParts];
  for (int p = 0; p < kParts; ++p) {
    a[p] = zero_double();
    b[p] = zero_double();
  }
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) {
    prefetch(reinterpret_cast<const char*>(u + i) + kSumsAhead);
    if (kProduct) {
      prefetch(reinterpret_cast<const char*>(v + i) + kSumsAhead);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const DoubleV x = load_double(u + i + p * kDoubleLanes);
      const DoubleV y = kProduct ? load_double(v + i + p * kDoubleLanes) : x;
      a[p] = a[p] + x;
      b[p] = fused(x, y, b[p]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    const std::int64_t left = length - i - p * kDoubleLanes;
    if (left > 0) {
      const DoubleV x = load_double_partial(u + i + p * kDoubleLanes, left);
      const DoubleV y = kProduct ? load_double_partial(v + i + p * kDoubleLanes, left) : x;
      a[p] = a[p] + x;
      b[p] = fused(x, y, b[p]);
    }
  }
  first = fold_to_quad(a);
  second = fold_to_quad(b);
}

/// Four partials of both sums, each in the four lanes that are left of it.
struct Partials {
  QuadV first[4];
  QuadV second[4];
  void clear_from(std::int64_t i) {
    for (; i < 4; ++i) {
      first[i] = zero_quad();
      second[i] = zero_quad();
    }
  }
  QuadV folded_first() const { return fold_quads(first[0], first[1], first[2], first[3]); }
  QuadV folded_second() const { return fold_quads(second[0], second[1], second[2], second[3]); }
};

template <int>
struct Count {};

template <class T, SumsOf kOf>
void sum_planes(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  const std::int64_t segments = (task.plane + kSegment - 1) / kSegment;
  std::int64_t unit = task.unit_begin;
  while (unit < task.unit_end) {
    const std::int64_t sample = unit / segments;
    const std::int64_t begin = unit % segments;
    const std::int64_t end = minimum(segments, begin + task.unit_end - unit);
    unit += end - begin;
    const auto sum_one = [&](std::int64_t channel, std::int64_t segment, Partials& to,
                             std::int64_t i) __attribute__((always_inline)) {
      const std::int64_t offset = segment * kSegment;
      const std::int64_t length = minimum(kSegment, task.plane - offset);
      const T* u = plane_of<T>(task.u, sample, channel) + offset;
      const T* v = kOf == SumsOf::kSquare || kOf == SumsOf::kMasked
                       ? u
                       : plane_of<T>(task.v, sample, channel) + offset;
      if (kOf == SumsOf::kActivated) {
        alignas(64) T buffer[kSegment];
        std::uint8_t* activation_mask = mask_run(task.activation_mask, sample, channel);
        T* target =
            task.out.data == nullptr ? buffer : output_of<T>(task.out, sample, channel) + offset;
        pull_segment(task, u, v, target,
                     activation_mask == nullptr ? activation_mask : activation_mask + offset / 8,
                     length, channel);
        sum_segment<T, true>(target, v, length, to.first[i], to.second[i]);
      } else if (kOf == SumsOf::kMasked) {
        alignas(64) T kept[2][kSegment];
        const bool square = task.v.data == nullptr;
        v = square ? u : plane_of<T>(task.v, sample, channel) + offset;
        if (task.constants != nullptr ||
            !all_count(task.mask + sample * task.plane + offset, length)) {
          keep_segment(task, sample, channel, offset, length, kept[0], kept[1]);
          u = kept[0];
          v = kept[square ? 0 : 1];
        }
        sum_segment<T, true>(u, v, length, to.first[i], to.second[i]);
      } else {
        sum_segment<T, kOf == SumsOf::kProduct>(u, v, length, to.first[i], to.second[i]);
      }
    };
    // The same segment of four channels at a time, read in the order of memory.
    const auto sum_channels = [&]<int kSegments>(Count<kSegments>) {
      for (std::int64_t c = 0; c < task.channels; c += 4) {
        Partials partials[kSegments];
        const std::int64_t some = minimum(4, task.channels - c);
        for (std::int64_t i = 0; i < some; ++i) {
          for (int s = 0; s < kSegments; ++s) {
            sum_one(c + i, begin + s, partials[s], i);
          }
        }
        for (Partials& four : partials) {
          four.clear_from(some);
          merge_channels(windows, w, c, 0, four.folded_first());
          merge_channels(windows, w, c, 1, four.folded_second());
        }
      }
    };
    if (segments <= 2) {
      end - begin == 1 ? sum_channels(Count<1>()) : sum_channels(Count<2>());
      continue;
    }
    for (std::int64_t c = 0; c < task.channels; ++c) {
      for (std::int64_t s = begin; s < end; s += 4) {
        Partials four;
        const std::int64_t some = minimum(4, end - s);
        four.clear_from(some);
        for (std::int64_t i = 0; i < some; ++i) {
          sum_one(c, s + i, four, i);
        }
        merge_segments(windows, w, c, 0, four.folded_first());
        merge_segments(windows, w, c, 1, four.folded_second());
      }
    }
  }
}

/// Lane accumulators of a block of channels; [lane][sum][channel].
constexpr std::int64_t kBlockChannels = 128;
struct LaneBlock {
  alignas(64) double sums[kLanes][2][kBlockChannels];
};

/// Adds kRows rows of one lane, `step` elements apart, for `channels` channels.
template <class T, bool kProduct, int kRows, bool kFresh>
inline void add_rows(const T* u, std::int64_t u_step, const T* v, std::int64_t v_step,
                     std::int64_t channels, double* first, double* second) {
  std::int64_t c = 0;
  for (; c + 2 * kDoubleLanes <= channels; c += 2 * kDoubleLanes) {
    DoubleV a[2];
    DoubleV b[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      a[i] = kFresh ? zero_double() : load_double(first + c + i * kDoubleLanes);
      b[i] = kFresh ? zero_double() : load_double(second + c + i * kDoubleLanes);
    }
#pragma GCC unroll 8
    for (int k = 0; k < kRows; ++k) {
      prefetch(u + k * u_step + c + kBlockChannels);  // the next block's part of the row
      if (kProduct) {
        prefetch(v + k * v_step + c + kBlockChannels);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const DoubleV x = load_double(u + k * u_step + c + i * kDoubleLanes);
        const DoubleV y = kProduct ? load_double(v + k * v_step + c + i * kDoubleLanes) : x;
        a[i] = a[i] + x;
        b[i] = fused(x, y, b[i]);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
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
}

template <class T, bool kProduct, bool kFresh>
inline void add_some_rows(std::int64_t rows, const T* u, std::int64_t u_step, const T* v,
                          std::int64_t v_step, std::int64_t channels, double* first,
                          double* second) {
  switch (rows) {
#define SYNCBN_ROWS(K) \
  case K:              \
    return add_rows<T, kProduct, K, kFresh>(u, u_step, v, v_step, channels, first, second);
    SYNCBN_ROWS(1)
    SYNCBN_ROWS(2)
    SYNCBN_ROWS(3)
    SYNCBN_ROWS(4)
    SYNCBN_ROWS(5)
    SYNCBN_ROWS(6)
    SYNCBN_ROWS(7)
    SYNCBN_ROWS(8)
#undef SYNCBN_ROWS
    default:
      return add_rows<T, kProduct, 0, kFresh>(u, u_step, v, v_step, channels, first, second);
  }
}

/// As add_some_rows for those of `rows` rows that count, by every kLanes-th byte of mask.
template <class T, bool kProduct>
__attribute__((noinline)) void add_counting_rows(const std::uint8_t* mask, std::int64_t rows,
                                                 bool fresh, const T* u, std::int64_t u_step,
                                                 const T* v, std::int64_t v_step,
                                                 std::int64_t channels, double* first,
                                                 double* second) {
  if (fresh) {
    add_rows<T, kProduct, 0, true>(u, u_step, v, v_step, channels, first, second);
  }
  for (std::int64_t k = 0; k < rows; ++k) {
    if (mask[k * kLanes] != 0) {
      add_rows<T, kProduct, 1, false>(u + k * u_step, u_step, v + k * v_step, v_step, channels,
                                      first, second);
    }
  }
}

/// Folds the lanes of four channels and merges the four partials.
inline void merge_lanes(Windows& windows, const WindowArrays& w, const LaneBlock& block,
                        std::int64_t channel, std::int64_t c, int sum) {
  __m256d lane[8];
  for (int l = 0; l < 8; ++l) {
    lane[l] = _mm256_add_pd(_mm256_load_pd(block.sums[l][sum] + c),
                            _mm256_load_pd(block.sums[l + 8][sum] + c));
  }
  for (int h = 4; h >= 1; h /= 2) {
    for (int l = 0; l < h; ++l) {
      lane[l] = _mm256_add_pd(lane[l], lane[l + h]);
    }
  }
  merge_channels(windows, w, channel + c, sum, {lane[0]});
}

template <class T, SumsOf kOf>
void sum_rows(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  if (task.plane == 1) {
    sum_single_rows<T, kOf>(task, windows, w);
    return;
  }
  constexpr bool kProduct = kOf != SumsOf::kSquare;
  constexpr std::int64_t kGroup = 8 * kLanes;
  alignas(64) T buffer[kOf == SumsOf::kActivated ? kGroup * kBlockChannels : 1];
  LaneBlock block;
  const std::int64_t segments = (task.plane + kSegment - 1) / kSegment;
  for (std::int64_t unit = task.unit_begin; unit < task.unit_end; ++unit) {
    const std::int64_t sample = unit / segments;
    const std::int64_t begin = unit % segments * kSegment;
    const std::int64_t length = minimum(kSegment, task.plane - begin);
    const std::uint8_t* mask =
        task.mask == nullptr ? nullptr : task.mask + sample * task.plane + begin;
    for (std::int64_t channel = 0; channel < task.channels; channel += kBlockChannels) {
      const std::int64_t channels = minimum(kBlockChannels, task.channels - channel);
      const auto row_of = [&](const Operand& operand, std::int64_t e) {
        return plane_of<T>(operand, sample, 0) + (begin + e) * operand.element_stride + channel;
      };
      for (std::int64_t group = 0; group < length; group += kGroup) {
        std::int64_t u_step = task.u.element_stride;
        const std::int64_t v_step = task.v.element_stride;
        const T* u = row_of(task.u, group);
        const T* v = kProduct ? row_of(task.v, group) : u;
        if (kOf == SumsOf::kActivated) {
          const bool keep = task.out.data != nullptr;
          u_step = keep ? task.out.element_stride : kBlockChannels;
          T* target = keep ? const_cast<T*>(row_of(task.out, group)) : buffer;
          for (std::int64_t e = 0; e < minimum(kGroup, length - group); ++e) {
            if (mask != nullptr && mask[group + e] == 0) {
              clear(target + e * u_step, channels);
              continue;
            }
            pull_row(task, sample, begin + group + e, channel, channels, target + e * u_step);
          }
          u = target;
        }
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
          const std::int64_t left = length - group - lane;
          const std::int64_t rows = left > 0 ? minimum(8, (left + kLanes - 1) / kLanes) : 0;
          if (group > 0 && rows == 0) {
            continue;
          }
          double* first = block.sums[lane][0];
          double* second = block.sums[lane][1];
          if (mask != nullptr) {
            add_counting_rows<T, kProduct>(mask + group + lane, rows, group == 0, u + lane * u_step,
                                           kLanes * u_step, v + lane * v_step, kLanes * v_step,
                                           channels, first, second);
          } else if (group == 0) {
            add_some_rows<T, kProduct, true>(rows, u + lane * u_step, kLanes * u_step,
                                             v + lane * v_step, kLanes * v_step, channels, first,
                                             second);
          } else {
            add_some_rows<T, kProduct, false>(rows, u + lane * u_step, kLanes * u_step,
                                              v + lane * v_step, kLanes * v_step, channels, first,
                                              second);
          }
        }
      }
      for (std::int64_t c = 0; c < channels; c += 4) {
        merge_lanes(windows, w, block, channel, c, 0);
        merge_lanes(windows, w, block, channel, c, 1);
      }
    }
  }
}
