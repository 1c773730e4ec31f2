// SPDX-License-Identifier: Apache-2.0
// The vector type of passes.hpp on AVX2 with FMA and F16C. Included by one level file only,
// inside its unnamed namespace.
#include "cpu/vector/simd_any.hpp"

#define SYNCBN_MM(name) _mm256_##name
constexpr int kFloatLanes = 8;
constexpr int kDoubleLanes = 4;
using Floats = __m256;
using Doubles = __m256d;
using Ints = __m256i;
using HalfFloats = __m128;
using HalfInts = __m128i;
/// Vectors of finalize.hpp, and of what those leave.
using WidestV = __m256d;
using LeastV = __m256d;

inline __m128 lower(__m256 a) { return _mm256_castps256_ps128(a); }
inline __m128 upper(__m256 a) { return _mm256_extractf128_ps(a, 1); }
inline __m128i lower(__m256i a) { return _mm256_castsi256_si128(a); }
inline __m128i upper(__m256i a) { return _mm256_extracti128_si256(a, 1); }
// Of store_any GCC makes a conversion to float16 in memory, which is slow.
inline void store_half(void* p, __m128i a) { _mm_storeu_si128(static_cast<__m128i*>(p), a); }
inline void stream_any(void* p, __m128i a) { _mm_stream_si128(static_cast<__m128i*>(p), a); }
inline void stream_any(void* p, __m256i a) { _mm256_stream_si256(static_cast<__m256i*>(p), a); }

/// One truth value per float lane; as bits, lane 0 lowest.
struct MaskV {
  __m256 v;
};
template <int kHow>
inline MaskV compare(__m256 a, __m256 b) {
  return {_mm256_cmp_ps(a, b, kHow)};
}
template <int kHow>
inline unsigned compare(__m256d a, __m256d b) {
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(a, b, kHow)));
}
inline MaskV mask_from_bits(unsigned bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_set1_epi32(static_cast<int>(bits)) & lane;
  return {(__m256)_mm256_cmpeq_epi32(set, lane)};
}
inline MaskV nonzero_bytes(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {(__m256)_mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(bytes), __m256i())};
}
inline unsigned bits_of(MaskV a) { return static_cast<unsigned>(_mm256_movemask_ps(a.v)); }
inline MaskV operator|(MaskV a, MaskV b) { return {_mm256_or_ps(a.v, b.v)}; }
inline MaskV operator&(MaskV a, MaskV b) { return {_mm256_and_ps(a.v, b.v)}; }
/// a | b where m, else no.
inline __m256i or_where(MaskV m, __m256i no, __m256i a, __m256i b) {
  return _mm256_blendv_epi8(no, a | b, (__m256i)m.v);
}
/// kDoubleLanes elements as floats.
inline __m128 load_few(const Half* p) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m128 load_few(const BFloat16* p) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (__m128)_mm_unpacklo_epi16(__m128i(), bits);
}
/// Even 16-bit words of a, odd ones of b.
inline __m256i in_turns(__m256i a, __m256i b) { return _mm256_blend_epi16(a, b, 0xaa); }

#include "cpu/vector/simd_x86.hpp"

inline FloatV select(MaskV m, FloatV yes, FloatV no) {
  return {_mm256_blendv_ps(no.v, yes.v, m.v)};
}
constexpr bool kRoundsBFloat16 = false;
inline __m128i narrow(__m256 v, BFloat16) {
  const __m256i wide = _mm256_srli_epi32(rounded_bits(v), 16);
  return lower(_mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08));
}

// All ones in the first n of 8 lanes.
inline __m256i lane_mask(std::int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline FloatV load_partial(const float* p, std::int64_t n) {
  return {_mm256_maskload_ps(p, lane_mask(n))};
}
template <class T>
inline FloatV load_partial(const T* p, std::int64_t n) {
  alignas(16) T buffer[kFloatLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    buffer[i] = p[i];
  }
  return load(buffer);
}
inline void store_partial(float* p, FloatV a, std::int64_t n) {
  _mm256_maskstore_ps(p, lane_mask(n), a.v);
}
/// The first n elements of type T.
template <class T, class V>
inline void store_partial(T* p, V a, std::int64_t n) {
  alignas(32) T buffer[2 * kFloatLanes];
  store(buffer, a);
  for (std::int64_t i = 0; i < n; ++i) {
    p[i] = buffer[i];
  }
}
inline DoubleV load_double_partial(const float* p, std::int64_t n) {
  return widened(_mm_maskload_ps(p, lower(lane_mask(n))));
}
template <class T>
inline DoubleV load_double_partial(const T* p, std::int64_t n) {
  std::uint64_t words = 0;  // a load of what narrower stores wrote would have to wait for them
  for (std::int64_t i = 0; i < n && i < kDoubleLanes; ++i) {
    words |= std::uint64_t{p[i].bits} << (16 * i);
  }
  return load_double(reinterpret_cast<const T*>(&words));
}
/// Where a < b and c == d.
inline unsigned less_and_equal(DoubleV a, DoubleV b, DoubleV c, DoubleV d) {
  return static_cast<unsigned>(_mm256_movemask_pd(
      _mm256_and_pd(_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ), _mm256_cmp_pd(c.v, d.v, _CMP_EQ_OQ))));
}

/// Lanes 0..15 of a segment to a vector of lanes: the folds h = 8 and h = 4.
inline DoubleV fold_segment(const DoubleV (&lanes)[4]) {
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}
/// That of each of four segments to their partials: the folds h = 2 and h = 1.
inline DoubleV fold_segments(const DoubleV (&of)[4]) {
  const auto folded = [](__m256d a, __m256d b) {
    return _mm256_permute2f128_pd(a, b, 0x20) + _mm256_permute2f128_pd(a, b, 0x31);
  };
  const __m256d even =
      folded(_mm256_unpacklo_pd(of[0].v, of[1].v), _mm256_unpacklo_pd(of[2].v, of[3].v));
  const __m256d odd =
      folded(_mm256_unpackhi_pd(of[0].v, of[1].v), _mm256_unpackhi_pd(of[2].v, of[3].v));
  return {even + odd};
}

inline PairV load_pair_partial(const BFloat16* p, std::int64_t n) {
  alignas(32) BFloat16 buffer[2 * kFloatLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    buffer[i] = p[i];
  }
  return load_pair(buffer);
}
inline PairV load_floats_as_pair(const float* p) {
  const auto in_order = [](__m256 v) {  // lanes 0 1 4 5 are the first four, 2 3 6 7 the others
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
  };
  const __m256 a = _mm256_loadu_ps(p);
  const __m256 b = _mm256_loadu_ps(p + 8);
  return {{in_order(_mm256_shuffle_ps(a, b, 0x88))}, {in_order(_mm256_shuffle_ps(a, b, 0xdd))}};
}
inline PairMaskV pair_mask_from_bits(unsigned bits) {
  const __m256i even =
      _mm256_setr_epi32(1, 1 << 2, 1 << 4, 1 << 6, 1 << 8, 1 << 10, 1 << 12, 1 << 14);
  const __m256i odd = _mm256_slli_epi32(even, 1);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  const auto has = [&](__m256i lane) {
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, lane), lane));
  };
  return {{has(even)}, {has(odd)}};
}
inline unsigned bits_of(PairMaskV a) {
  const __m256i words =
      _mm256_blend_epi16(_mm256_castps_si256(a.even.v), _mm256_castps_si256(a.odd.v), 0xaa);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  return static_cast<unsigned>(_mm_movemask_epi8(bytes));
}
