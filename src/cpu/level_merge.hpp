// Merging partials into the windows of their channels, over the vector type of one level. Included
// inside a level file's unnamed namespace, before level_sums.hpp; the rules of level_elements.hpp
// hold here too.

// Where a call per four partials costs as much as the work: the compiler's own limits depend on how
// much else there is in the file.
#define SYNCBN_INLINE __attribute__((always_inline)) inline

/// A partial split into the two limbs of a window, and whether it fits.
struct Split {
  __m256d high;
  __m256d low;
  int fits;
};

inline Split split(__m256d p, __m256d magic_high, __m256d magic_low, __m256d bound) {
  const __m256d magnitude =
      _mm256_and_pd(p, _mm256_castsi256_pd(_mm256_set1_epi64x(0x7fffffffffffffffLL)));
  Split s;
  s.high = _mm256_add_pd(p, magic_high);
  const __m256d rest = _mm256_sub_pd(p, _mm256_sub_pd(s.high, magic_high));
  s.low = _mm256_add_pd(rest, magic_low);
  const __m256d exact = _mm256_cmp_pd(_mm256_sub_pd(s.low, magic_low), rest, _CMP_EQ_OQ);
  s.fits = _mm256_movemask_pd(_mm256_and_pd(exact, _mm256_cmp_pd(magnitude, bound, _CMP_LT_OQ)));
  return s;
}

inline __m256i limb(__m256d sum, __m256d magic) {
  return _mm256_sub_epi64(_mm256_castpd_si256(sum), _mm256_castpd_si256(magic));
}

/// Hands over the partials that do not fit and takes them out of p.
__attribute__((noinline)) __m256d push_outside(Windows& windows, std::int64_t channel, int step,
                                               int sum, __m256d p, int fits) {
  alignas(32) double values[4];
  _mm256_store_pd(values, p);
  for (int i = 0; i < 4; ++i) {
    if ((fits >> i & 1) == 0) {
      add_outside_window(windows, channel + i * step, sum, values[i]);
      values[i] = 0.0;
    }
  }
  return _mm256_load_pd(values);
}

/// Merges one partial of each of four neighbouring channels.
SYNCBN_INLINE void merge_channels(Windows& windows, const WindowArrays& w, std::int64_t channel,
                                  int sum, QuadV partials) {
  __m256d p = partials.v;
  while (true) {
    const __m256d magic_high = _mm256_load_pd(w.magic_high[sum] + channel);
    const __m256d magic_low = _mm256_load_pd(w.magic_low[sum] + channel);
    const Split s = split(p, magic_high, magic_low, _mm256_load_pd(w.bound[sum] + channel));
    if (__builtin_expect(s.fits == 15, 1)) {
      auto* high = reinterpret_cast<__m256i*>(w.high[sum] + channel);
      auto* low = reinterpret_cast<__m256i*>(w.low[sum] + channel);
      _mm256_store_si256(high, _mm256_add_epi64(_mm256_load_si256(high), limb(s.high, magic_high)));
      _mm256_store_si256(low, _mm256_add_epi64(_mm256_load_si256(low), limb(s.low, magic_low)));
      return;
    }
    p = push_outside(windows, channel, 1, sum, p, s.fits);
  }
}

inline std::int64_t horizontal_sum(__m256i v) {
  const __m128i s = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  return _mm_extract_epi64(s, 0) + _mm_extract_epi64(s, 1);
}

/// Merges four partials of one channel.
SYNCBN_INLINE void merge_segments(Windows& windows, const WindowArrays& w, std::int64_t channel,
                                  int sum, QuadV partials) {
  __m256d p = partials.v;
  while (true) {
    const __m256d magic_high = _mm256_set1_pd(w.magic_high[sum][channel]);
    const __m256d magic_low = _mm256_set1_pd(w.magic_low[sum][channel]);
    const Split s = split(p, magic_high, magic_low, _mm256_set1_pd(w.bound[sum][channel]));
    if (__builtin_expect(s.fits == 15, 1)) {
      w.high[sum][channel] += horizontal_sum(limb(s.high, magic_high));
      w.low[sum][channel] += horizontal_sum(limb(s.low, magic_low));
      return;
    }
    p = push_outside(windows, channel, 0, sum, p, s.fits);
  }
}
