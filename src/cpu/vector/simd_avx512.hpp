// SPDX-License-Identifier: Apache-2.0
// The vector type of passes.hpp on AVX-512 (F, DQ, VL, BW), with and without BF16. Included
// by the level files of either, inside their unnamed namespaces.
#include "cpu/vector/simd_any.hpp"

#define SYNCBN_MM(name) _mm512_##name
constexpr int kFloatLanes = 16;
constexpr int kDoubleLanes = 8;
using Floats = __m512;
using Doubles = __m512d;
using Ints = __m512i;
using HalfFloats = __m256;
using HalfInts = __m256i;
/// Vectors of finalize.hpp, and of what those leave.
using WidestV = __m512d;
using LeastV = __m256d;

inline __m256 lower(__m512 a) { return _mm512_castps512_ps256(a); }
inline __m256 upper(__m512 a) { return _mm512_extractf32x8_ps(a, 1); }
inline __m256i lower(__m512i a) { return _mm512_castsi512_si256(a); }
inline __m256i upper(__m512i a) { return _mm512_extracti64x4_epi64(a, 1); }
// Of store_any GCC makes a conversion to float16 in memory, which is slow.
inline void store_half(void* p, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
inline void stream_any(void* p, __m256i a) { _mm256_stream_si256(static_cast<__m256i*>(p), a); }
inline void stream_any(void* p, __m512i a) { _mm512_stream_si512(static_cast<__m512i*>(p), a); }

/// One truth value per float lane; as bits, lane 0 lowest.
struct MaskV {
  __mmask16 v;
};
template <int kHow>
inline MaskV compare(__m512 a, __m512 b) {
  return {_mm512_cmp_ps_mask(a, b, kHow)};
}
template <int kHow>
inline unsigned compare(__m512d a, __m512d b) {
  return _mm512_cmp_pd_mask(a, b, kHow);
}
inline MaskV mask_from_bits(unsigned bits) { return {static_cast<__mmask16>(bits)}; }
inline MaskV nonzero_bytes(const std::uint8_t* p) {
  const auto bytes = load_any<__m128i>(p);
  return {_mm_test_epi8_mask(bytes, bytes)};
}
inline unsigned bits_of(MaskV a) { return a.v; }
inline MaskV operator|(MaskV a, MaskV b) { return mask_from_bits(bits_of(a) | bits_of(b)); }
inline MaskV operator&(MaskV a, MaskV b) { return mask_from_bits(bits_of(a) & bits_of(b)); }
/// a | b where m, else no.
inline __m512i or_where(MaskV m, __m512i no, __m512i a, __m512i b) {
  return _mm512_mask_or_epi32(no, m.v, a, b);
}
/// kDoubleLanes elements as floats.
inline __m256 floats_of(__m128i bits, Half) { return _mm256_cvtph_ps(bits); }
inline __m256 floats_of(__m128i bits, BFloat16) {
  return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
}
template <class T>
inline __m256 load_few(const T* p) {
  return floats_of(load_any<__m128i>(p), T{});
}
/// Even 16-bit words of a, odd ones of b.
inline __m512i in_turns(__m512i a, __m512i b) { return _mm512_mask_blend_epi16(0xaaaaaaaau, a, b); }

#include "cpu/vector/simd_x86.hpp"

inline FloatV select(MaskV m, FloatV yes, FloatV no) {
  return {_mm512_mask_blend_ps(m.v, no.v, yes.v)};
}
inline __m256i narrow_bits(__m512 v) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(v), 16));
}
#if defined(__AVX512BF16__)
constexpr bool kRoundsBFloat16 = true;
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
constexpr bool kRoundsBFloat16 = false;
inline __m256i narrow(__m512 v, BFloat16) { return narrow_bits(v); }
#endif

inline __mmask16 lane_mask(std::int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u);
}
inline FloatV load_partial(const float* p, std::int64_t n) {
  return {_mm512_maskz_loadu_ps(lane_mask(n), p)};
}
template <class T>
inline FloatV load_partial(const T* p, std::int64_t n) {
  return {widen(_mm256_maskz_loadu_epi16(lane_mask(n), p), T{})};
}
inline void store_partial(float* p, FloatV a, std::int64_t n) {
  _mm512_mask_storeu_ps(p, lane_mask(n), a.v);
}
template <class T>
inline void store_partial(T* p, FloatV a, std::int64_t n) {
  _mm256_mask_storeu_epi16(p, lane_mask(n), narrow(a.v, T{}));
}
inline __mmask8 half_mask(std::int64_t n) {
  return static_cast<__mmask8>(n >= 8 ? 0xffu : n <= 0 ? 0u : (1u << n) - 1u);
}
inline DoubleV load_double_partial(const float* p, std::int64_t n) {
  return widened(_mm256_maskz_loadu_ps(half_mask(n), p));
}
template <class T>
inline DoubleV load_double_partial(const T* p, std::int64_t n) {
  return widened(floats_of(_mm_maskz_loadu_epi16(half_mask(n), p), T{}));
}
inline __m512d fused_minus(__m512d a, __m512d b, __m512d c) { return _mm512_fmsub_pd(a, b, c); }
inline __m512d square_root(__m512d a) { return _mm512_sqrt_pd(a); }
inline bool is_zero(__m512d a) { return _mm512_test_epi64_mask((__m512i)a, (__m512i)a) == 0; }
/// Where a < b and c == d.
inline unsigned less_and_equal(DoubleV a, DoubleV b, DoubleV c, DoubleV d) {
  return _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ), c.v, d.v, _CMP_EQ_OQ);
}

// bfloat16 in an order that is quick to make, at even and at odd places, which a shift and an and
// take out of words without a shuffle.
inline void split_words(__m256i words, DoubleV& even, DoubleV& odd) {
  asm("" : "+v"(words));  // or GCC loads them twice
  const __m256i high = words & _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  even = widened((__m256)_mm256_slli_epi32(words, 16));
  odd = widened((__m256)high);
}
inline void load_pair(const BFloat16* p, DoubleV& even, DoubleV& odd) {
  split_words(load_any<__m256i>(p), even, odd);
}
inline void load_pair_partial(const BFloat16* p, std::int64_t n, DoubleV& even, DoubleV& odd) {
  split_words(_mm256_maskz_loadu_epi16(lane_mask(n), p), even, odd);
}
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

inline __mmask32 pair_lane_mask(std::int64_t n) {
  return static_cast<__mmask32>(n >= 32 ? ~0u : (1u << n) - 1u);
}
inline PairV load_pair_partial(const BFloat16* p, std::int64_t n) {
  return widen_pair(_mm512_maskz_loadu_epi16(pair_lane_mask(n), p));
}
inline void store_partial(BFloat16* p, PairV a, std::int64_t n) {
  _mm512_mask_storeu_epi16(p, pair_lane_mask(n), narrow_pair(a));
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
