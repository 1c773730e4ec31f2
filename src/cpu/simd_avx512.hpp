// SPDX-License-Identifier: Apache-2.0
// The vector type of level_passes.hpp on AVX-512 (F, DQ, VL, BW), with and without BF16. Included
// by the level files of either, inside their unnamed namespaces.

constexpr int kFloatLanes = 16;
constexpr int kDoubleLanes = 8;

struct FloatV {
  __m512 v;
};
struct DoubleV {
  __m512d v;
};
/// Vectors of level_finalize.hpp, and of what those leave.
using WidestV = __m512d;
using LeastV = __m256d;

inline __mmask16 lane_mask(std::int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u);
}

inline __m512 widen(__m256i bits, Half) { return _mm512_cvtph_ps(bits); }
inline __m512 widen(__m256i bits, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m256i narrow(__m512 v, Half) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Round to nearest even on the bits, the upper half of which is meant; NaN keeps its top bits and
// turns quiet.
inline __m512i rounded_bits(__m512 v) {
  const __m512i b = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, b, _mm512_set1_epi32(0x400000));
}
inline __m256i narrow_bits(__m512 v) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(v), 16));
}
#if defined(__AVX512BF16__)
constexpr bool kBFloat16Pairs = false;  // conversion is quick, and fewer constants are at hand
// Not inline, or its constants would take registers from the loops that hardly ever come here.
__attribute__((noinline)) inline __m256i narrow_bits_apart(__m512 v) { return narrow_bits(v); }
// The instruction takes subnormal numbers for zeros; all others it rounds as above, NaN included.
inline __m256i narrow(__m512 v, BFloat16) {
  constexpr int kSubnormal = 0x20;
  const __mmask16 subnormal = _mm512_fpclass_ps_mask(v, kSubnormal);
  if (__builtin_expect(static_cast<long>(subnormal), 0) != 0) {
    return narrow_bits_apart(v);
  }
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
}
#else
constexpr bool kBFloat16Pairs = true;
inline __m256i narrow(__m512 v, BFloat16) { return narrow_bits(v); }
#endif

inline FloatV load(const float* p) { return {_mm512_loadu_ps(p)}; }
template <class T>
inline FloatV load(const T* p) {
  return {widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{})};
}

inline FloatV load_partial(const float* p, std::int64_t n) {
  return {_mm512_maskz_loadu_ps(lane_mask(n), p)};
}
template <class T>
inline FloatV load_partial(const T* p, std::int64_t n) {
  return {widen(_mm256_maskz_loadu_epi16(lane_mask(n), p), T{})};
}

inline void store(float* p, FloatV a) { _mm512_storeu_ps(p, a.v); }
template <class T>
inline void store(T* p, FloatV a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a.v, T{}));
}
inline void stream(float* p, FloatV a) { _mm512_stream_ps(p, a.v); }
template <class T>
inline void stream(T* p, FloatV a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(a.v, T{}));
}
inline void store_partial(float* p, FloatV a, std::int64_t n) {
  _mm512_mask_storeu_ps(p, lane_mask(n), a.v);
}
template <class T>
inline void store_partial(T* p, FloatV a, std::int64_t n) {
  _mm256_mask_storeu_epi16(p, lane_mask(n), narrow(a.v, T{}));
}

inline void fence_streams() { _mm_sfence(); }

/// To the nearest number of type T.
inline FloatV rounded(FloatV a, float) { return a; }
template <class T>
inline FloatV rounded(FloatV a, T type) {
  return {widen(narrow(a.v, type), type)};
}

// Always inline: GCC drops calls of a function that does nothing else.
__attribute__((always_inline)) inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

__attribute__((always_inline)) inline void prefetch_second(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

inline FloatV broadcast(float v) { return {_mm512_set1_ps(v)}; }
inline FloatV operator+(FloatV a, FloatV b) { return {_mm512_add_ps(a.v, b.v)}; }
inline FloatV operator-(FloatV a, FloatV b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline FloatV operator*(FloatV a, FloatV b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline FloatV fused(FloatV a, FloatV b, FloatV c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

/// One truth value per float lane; as bits, lane 0 lowest.
struct MaskV {
  __mmask16 v;
};
inline MaskV mask_from_bits(unsigned bits) { return {static_cast<__mmask16>(bits)}; }
inline MaskV nonzero_bytes(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm_test_epi8_mask(bytes, bytes)};
}
inline unsigned bits_of(MaskV a) { return a.v; }
inline MaskV is_positive(FloatV a) {
  return {_mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_GT_OQ)};
}
inline MaskV is_nan(FloatV a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline MaskV mask_of(bool all) { return mask_from_bits(all ? 0xffffu : 0u); }
inline MaskV operator|(MaskV a, MaskV b) { return mask_from_bits(bits_of(a) | bits_of(b)); }
inline MaskV operator&(MaskV a, MaskV b) { return mask_from_bits(bits_of(a) & bits_of(b)); }
inline FloatV select(MaskV m, FloatV yes, FloatV no) {
  return {_mm512_mask_blend_ps(m.v, no.v, yes.v)};
}

inline __m256 widen_half(__m128i bits, Half) { return _mm256_cvtph_ps(bits); }
inline __m256 widen_half(__m128i bits, BFloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline DoubleV load_double(const float* p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
template <class T>
inline DoubleV load_double(const T* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtps_pd(widen_half(bits, T{}))};
}
inline __mmask8 half_mask(std::int64_t n) {
  return static_cast<__mmask8>(n >= 8 ? 0xffu : n <= 0 ? 0u : (1u << n) - 1u);
}
inline DoubleV load_double_partial(const float* p, std::int64_t n) {
  return {_mm512_cvtps_pd(_mm256_maskz_loadu_ps(half_mask(n), p))};
}
template <class T>
inline DoubleV load_double_partial(const T* p, std::int64_t n) {
  return {_mm512_cvtps_pd(widen_half(_mm_maskz_loadu_epi16(half_mask(n), p), T{}))};
}

inline DoubleV zero_double() { return {_mm512_setzero_pd()}; }
inline DoubleV load_double(const double* p) { return {_mm512_load_pd(p)}; }
inline void store_double(double* p, DoubleV a) { _mm512_store_pd(p, a.v); }
inline DoubleV operator+(DoubleV a, DoubleV b) { return {_mm512_add_pd(a.v, b.v)}; }
inline DoubleV fused(DoubleV a, DoubleV b, DoubleV c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }

inline DoubleV operator-(DoubleV a, DoubleV b) { return {_mm512_sub_pd(a.v, b.v)}; }
inline DoubleV operator*(DoubleV a, DoubleV b) { return {_mm512_mul_pd(a.v, b.v)}; }
/// a*b - c, rounded once.
inline __m512d fused_minus(__m512d a, __m512d b, __m512d c) { return _mm512_fmsub_pd(a, b, c); }
inline __m256d fused_minus(__m256d a, __m256d b, __m256d c) { return _mm256_fmsub_pd(a, b, c); }
inline DoubleV fused_minus(DoubleV a, DoubleV b, DoubleV c) { return {fused_minus(a.v, b.v, c.v)}; }
inline __m512d square_root(__m512d a) { return _mm512_sqrt_pd(a); }
inline __m256d square_root(__m256d a) { return _mm256_sqrt_pd(a); }
/// Whether no bit is set: -0 has one.
inline bool is_zero(__m512d a) {
  const __m512i bits = _mm512_castpd_si512(a);
  return _mm512_test_epi64_mask(bits, bits) == 0;
}
inline bool is_zero(__m256d a) {
  const __m256i bits = _mm256_castpd_si256(a);
  return _mm256_testz_si256(bits, bits) != 0;
}
inline DoubleV low_half(FloatV a) { return {_mm512_cvtps_pd(_mm512_castps512_ps256(a.v))}; }
inline DoubleV high_half(FloatV a) { return {_mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1))}; }

/// Bit patterns of floats.
struct BitsV {
  __m512i v;
};
inline BitsV broadcast_bits(std::uint32_t v) { return {_mm512_set1_epi32(static_cast<int>(v))}; }
inline BitsV load_bits_of(const std::uint32_t* p) { return {_mm512_load_si512(p)}; }
inline void store_bits_of(std::uint32_t* p, BitsV a) { _mm512_store_si512(p, a.v); }
inline BitsV magnitude_bits(FloatV a) {
  return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
inline BitsV minus_one(BitsV a) { return {_mm512_add_epi32(a.v, _mm512_set1_epi32(-1))}; }
inline BitsV plus_one(BitsV a) { return {_mm512_add_epi32(a.v, _mm512_set1_epi32(1))}; }
inline BitsV larger(BitsV a, BitsV b) { return {_mm512_max_epu32(a.v, b.v)}; }
inline BitsV smaller(BitsV a, BitsV b) { return {_mm512_min_epu32(a.v, b.v)}; }

/// Floats given by their bits.
inline DoubleV load_double_of_bits(const std::uint32_t* p) {
  return {
      _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p))))};
}

inline DoubleV broadcast(double v) { return {_mm512_set1_pd(v)}; }
inline DoubleV with_bits(DoubleV a, std::uint64_t mask) {
  return {_mm512_and_pd(a.v, _mm512_castsi512_pd(_mm512_set1_epi64(static_cast<long long>(mask))))};
}
inline DoubleV magnitude(DoubleV a) { return {_mm512_abs_pd(a.v)}; }
/// Where a < b; as bits, lane 0 lowest.
inline unsigned less(DoubleV a, DoubleV b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ); }
inline unsigned at_least(DoubleV a, DoubleV b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_GE_OQ); }
/// Where a < b and c == d.
inline unsigned less_and_equal(DoubleV a, DoubleV b, DoubleV c, DoubleV d) {
  return _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ), c.v, d.v, _CMP_EQ_OQ);
}
/// to[i] += bits of a - bits of b, as integers.
inline void add_difference(std::int64_t* to, DoubleV a, DoubleV b) {
  const __m512i difference = _mm512_sub_epi64(_mm512_castpd_si512(a.v), _mm512_castpd_si512(b.v));
  _mm512_store_si512(to, _mm512_add_epi64(_mm512_load_si512(to), difference));
}

/// 2 * kDoubleLanes elements in an order that is quick to make; in_order undoes it. bfloat16: those
/// at even and at odd places, which a shift and an and take out of words without a shuffle.
template <class T>
inline void load_pair(const T* p, DoubleV& a, DoubleV& b) {
  a = load_double(p);
  b = load_double(p + kDoubleLanes);
}
inline void split_words(__m256i words, DoubleV& even, DoubleV& odd) {
  asm("" : "+v"(words));  // or GCC loads them twice
  const __m256i high = _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  even = {_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)))};
  odd = {_mm512_cvtps_pd(_mm256_castsi256_ps(high))};
}
inline void load_pair(const BFloat16* p, DoubleV& even, DoubleV& odd) {
  split_words(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), even, odd);
}
/// The first n > 0 of them, and +0.
template <class T>
inline void load_pair_partial(const T* p, std::int64_t n, DoubleV& a, DoubleV& b) {
  a = load_double_partial(p, n);
  b = n > kDoubleLanes ? load_double_partial(p + kDoubleLanes, n - kDoubleLanes) : zero_double();
}
inline void load_pair_partial(const BFloat16* p, std::int64_t n, DoubleV& even, DoubleV& odd) {
  split_words(_mm256_maskz_loadu_epi16(lane_mask(n), p), even, odd);
}
template <class T>
inline void in_order(DoubleV&, DoubleV&, T) {}
inline void in_order(DoubleV& a, DoubleV& b, BFloat16) {
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  const DoubleV even = a;
  a = {_mm512_permutex2var_pd(even.v, low, b.v)};
  b = {_mm512_permutex2var_pd(even.v, high, b.v)};
}

/// Lanes 0..15 of a segment to a vector of lanes: the fold h = 8.
inline DoubleV fold_segment(const DoubleV (&lanes)[2]) { return lanes[0] + lanes[1]; }
/// That of each of eight segments to their partials: the folds h = 4, h = 2 and h = 1.
inline DoubleV fold_segments(const DoubleV (&of)[8]) {
  const auto four = [](DoubleV a, DoubleV b) {
    return _mm512_add_pd(_mm512_shuffle_f64x2(a.v, b.v, 0x44),
                         _mm512_shuffle_f64x2(a.v, b.v, 0xee));
  };
  const auto two = [](__m512d a, __m512d b) {
    return _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xdd));
  };
  const __m512d even = two(four(of[0], of[2]), four(of[4], of[6]));
  const __m512d odd = two(four(of[1], of[3]), four(of[5], of[7]));
  return {_mm512_add_pd(_mm512_unpacklo_pd(even, odd), _mm512_unpackhi_pd(even, odd))};
}

/// Elements 0, 2, 4 ... and 1, 3, 5 ... of a piece of memory (level_pair.hpp).
struct PairV {
  FloatV even;
  FloatV odd;
};
struct PairMaskV {
  MaskV even;
  MaskV odd;
};
inline PairV widen_pair(__m512i words) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(words, high))}};
}
inline __m512i narrow_pair(PairV a) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded_bits(a.even.v), 16),
                                 rounded_bits(a.odd.v));
}
inline __mmask32 pair_lane_mask(std::int64_t n) {
  return static_cast<__mmask32>(n >= 32 ? ~0u : (1u << n) - 1u);
}
inline PairV load_pair(const BFloat16* p) { return widen_pair(_mm512_loadu_si512(p)); }
inline PairV load_pair_partial(const BFloat16* p, std::int64_t n) {
  return widen_pair(_mm512_maskz_loadu_epi16(pair_lane_mask(n), p));
}
inline void store(BFloat16* p, PairV a) { _mm512_storeu_si512(p, narrow_pair(a)); }
inline void store_partial(BFloat16* p, PairV a, std::int64_t n) {
  _mm512_mask_storeu_epi16(p, pair_lane_mask(n), narrow_pair(a));
}
/// The first kFloatLanes elements.
inline void stream_half(BFloat16* p, PairV a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(narrow_pair(a)));
}
/// p: at a multiple of half a vector.
inline void stream(BFloat16* p, PairV a) {
  const __m512i words = narrow_pair(a);
  if (reinterpret_cast<std::uintptr_t>(p) % 64 == 0) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), words);
  } else {
    auto* halves = reinterpret_cast<__m256i*>(p);
    _mm256_stream_si256(halves, _mm512_castsi512_si256(words));
    _mm256_stream_si256(halves + 1, _mm512_extracti64x4_epi64(words, 1));
  }
}
inline PairV load_floats_as_pair(const float* p) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512 a = _mm512_loadu_ps(p);
  const __m512 b = _mm512_loadu_ps(p + 16);
  return {{_mm512_permutex2var_ps(a, even, b)}, {_mm512_permutex2var_ps(a, odd, b)}};
}
inline PairMaskV pair_mask_from_bits(unsigned bits) {
  const __m512i words = _mm512_movm_epi16(bits);
  return {{_mm512_test_epi32_mask(words, _mm512_set1_epi32(0xffff))},
          {_mm512_test_epi32_mask(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))}};
}
inline unsigned bits_of(PairMaskV a) {
  return _mm512_movepi16_mask(_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_movm_epi32(a.even.v),
                                                      _mm512_movm_epi32(a.odd.v)));
}
