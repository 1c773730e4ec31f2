// SPDX-License-Identifier: Apache-2.0
// The vector type of level_passes.hpp on AVX2 with FMA and F16C. Included by one level file only,
// inside its unnamed namespace.

constexpr int kFloatLanes = 8;
constexpr int kDoubleLanes = 4;

struct FloatV {
  __m256 v;
};
struct DoubleV {
  __m256d v;
};
/// Vectors of level_finalize.hpp, and of what those leave.
using WidestV = __m256d;
using LeastV = __m256d;

// All ones in the first n of 8 lanes.
inline __m256i lane_mask(std::int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline __m256 widen(__m128i bits, Half) { return _mm256_cvtph_ps(bits); }
inline __m256 widen(__m128i bits, BFloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline __m128i narrow(__m256 v, Half) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Round to nearest even on the bits, the upper half of which is meant; NaN keeps its top bits and
// turns quiet.
inline __m256i rounded_bits(__m256 v) {
  const __m256i b = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(b, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}
constexpr bool kBFloat16Pairs = true;
inline __m128i narrow(__m256 v, BFloat16) {
  const __m256i wide = _mm256_srli_epi32(rounded_bits(v), 16);
  const __m256i packed = _mm256_packus_epi32(wide, wide);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

inline FloatV load(const float* p) { return {_mm256_loadu_ps(p)}; }
template <class T>
inline FloatV load(const T* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{})};
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
  return {widen(_mm_load_si128(reinterpret_cast<const __m128i*>(buffer)), T{})};
}

inline void store(float* p, FloatV a) { _mm256_storeu_ps(p, a.v); }
template <class T>
inline void store(T* p, FloatV a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a.v, T{}));
}
inline void stream(float* p, FloatV a) { _mm256_stream_ps(p, a.v); }
template <class T>
inline void stream(T* p, FloatV a) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow(a.v, T{}));
}
inline void store_partial(float* p, FloatV a, std::int64_t n) {
  _mm256_maskstore_ps(p, lane_mask(n), a.v);
}
template <class T>
inline void store_partial(T* p, FloatV a, std::int64_t n) {
  alignas(16) T buffer[kFloatLanes];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), narrow(a.v, T{}));
  for (std::int64_t i = 0; i < n; ++i) {
    p[i] = buffer[i];
  }
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

inline FloatV broadcast(float v) { return {_mm256_set1_ps(v)}; }
inline FloatV operator+(FloatV a, FloatV b) { return {_mm256_add_ps(a.v, b.v)}; }
inline FloatV operator-(FloatV a, FloatV b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline FloatV operator*(FloatV a, FloatV b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline FloatV fused(FloatV a, FloatV b, FloatV c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }

/// One truth value per float lane; as bits, lane 0 lowest.
struct MaskV {
  __m256 v;
};
inline MaskV is_positive(FloatV a) { return {_mm256_cmp_ps(a.v, _mm256_setzero_ps(), _CMP_GT_OQ)}; }
inline MaskV is_nan(FloatV a) { return {_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)}; }
inline MaskV mask_of(bool all) { return {_mm256_castsi256_ps(_mm256_set1_epi32(all ? -1 : 0))}; }
inline MaskV mask_from_bits(unsigned bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane))};
}
inline MaskV nonzero_bytes(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {
      _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_setzero_si256()))};
}
inline unsigned bits_of(MaskV a) { return static_cast<unsigned>(_mm256_movemask_ps(a.v)); }
inline MaskV operator|(MaskV a, MaskV b) { return {_mm256_or_ps(a.v, b.v)}; }
inline MaskV operator&(MaskV a, MaskV b) { return {_mm256_and_ps(a.v, b.v)}; }
inline FloatV select(MaskV m, FloatV yes, FloatV no) {
  return {_mm256_blendv_ps(no.v, yes.v, m.v)};
}

inline DoubleV load_double(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p))}; }
inline DoubleV load_double(const Half* p) {
  return {_mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline DoubleV load_double(const BFloat16* p) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtps_pd(_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bits)))};
}
inline DoubleV load_double_partial(const float* p, std::int64_t n) {
  return {_mm256_cvtps_pd(_mm_maskload_ps(p, _mm256_castsi256_si128(lane_mask(n))))};
}
template <class T>
inline DoubleV load_double_partial(const T* p, std::int64_t n) {
  std::uint64_t words = 0;  // a load of what narrower stores wrote would have to wait for them
  for (std::int64_t i = 0; i < n && i < kDoubleLanes; ++i) {
    words |= std::uint64_t{p[i].bits} << (16 * i);
  }
  return load_double(reinterpret_cast<const T*>(&words));
}

inline DoubleV zero_double() { return {_mm256_setzero_pd()}; }
inline DoubleV load_double(const double* p) { return {_mm256_load_pd(p)}; }
inline void store_double(double* p, DoubleV a) { _mm256_store_pd(p, a.v); }
inline DoubleV operator+(DoubleV a, DoubleV b) { return {_mm256_add_pd(a.v, b.v)}; }
inline DoubleV fused(DoubleV a, DoubleV b, DoubleV c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }

inline DoubleV operator-(DoubleV a, DoubleV b) { return {_mm256_sub_pd(a.v, b.v)}; }
inline DoubleV operator*(DoubleV a, DoubleV b) { return {_mm256_mul_pd(a.v, b.v)}; }
/// a*b - c, rounded once.
inline __m256d fused_minus(__m256d a, __m256d b, __m256d c) { return _mm256_fmsub_pd(a, b, c); }
inline DoubleV fused_minus(DoubleV a, DoubleV b, DoubleV c) { return {fused_minus(a.v, b.v, c.v)}; }
inline __m256d square_root(__m256d a) { return _mm256_sqrt_pd(a); }
/// Whether no bit is set: -0 has one.
inline bool is_zero(__m256d a) {
  const __m256i bits = _mm256_castpd_si256(a);
  return _mm256_testz_si256(bits, bits) != 0;
}
inline DoubleV low_half(FloatV a) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(a.v))}; }
inline DoubleV high_half(FloatV a) { return {_mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1))}; }

/// Bit patterns of floats.
struct BitsV {
  __m256i v;
};
inline BitsV broadcast_bits(std::uint32_t v) { return {_mm256_set1_epi32(static_cast<int>(v))}; }
inline BitsV load_bits_of(const std::uint32_t* p) {
  return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p))};
}
inline void store_bits_of(std::uint32_t* p, BitsV a) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), a.v);
}
inline BitsV magnitude_bits(FloatV a) {
  return {_mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(0x7fffffff))};
}
inline BitsV minus_one(BitsV a) { return {_mm256_add_epi32(a.v, _mm256_set1_epi32(-1))}; }
inline BitsV plus_one(BitsV a) { return {_mm256_add_epi32(a.v, _mm256_set1_epi32(1))}; }
inline BitsV larger(BitsV a, BitsV b) { return {_mm256_max_epu32(a.v, b.v)}; }
inline BitsV smaller(BitsV a, BitsV b) { return {_mm256_min_epu32(a.v, b.v)}; }

/// Floats given by their bits.
inline DoubleV load_double_of_bits(const std::uint32_t* p) {
  return {_mm256_cvtps_pd(_mm_castsi128_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p))))};
}

inline DoubleV broadcast(double v) { return {_mm256_set1_pd(v)}; }
inline DoubleV with_bits(DoubleV a, std::uint64_t mask) {
  return {
      _mm256_and_pd(a.v, _mm256_castsi256_pd(_mm256_set1_epi64x(static_cast<long long>(mask))))};
}
inline DoubleV magnitude(DoubleV a) { return with_bits(a, 0x7fffffffffffffff); }
/// Where a < b; as bits, lane 0 lowest.
inline unsigned less(DoubleV a, DoubleV b) {
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ)));
}
inline unsigned at_least(DoubleV a, DoubleV b) {
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(a.v, b.v, _CMP_GE_OQ)));
}
/// Where a < b and c == d.
inline unsigned less_and_equal(DoubleV a, DoubleV b, DoubleV c, DoubleV d) {
  return static_cast<unsigned>(_mm256_movemask_pd(
      _mm256_and_pd(_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ), _mm256_cmp_pd(c.v, d.v, _CMP_EQ_OQ))));
}
/// to[i] += bits of a - bits of b, as integers.
inline void add_difference(std::int64_t* to, DoubleV a, DoubleV b) {
  auto* at = reinterpret_cast<__m256i*>(to);
  const __m256i difference = _mm256_sub_epi64(_mm256_castpd_si256(a.v), _mm256_castpd_si256(b.v));
  _mm256_store_si256(at, _mm256_add_epi64(_mm256_load_si256(at), difference));
}

/// 2 * kDoubleLanes elements, here in their order.
template <class T>
inline void load_pair(const T* p, DoubleV& a, DoubleV& b) {
  a = load_double(p);
  b = load_double(p + kDoubleLanes);
}
/// The first n > 0 of them, and +0.
template <class T>
inline void load_pair_partial(const T* p, std::int64_t n, DoubleV& a, DoubleV& b) {
  a = load_double_partial(p, n);
  b = n > kDoubleLanes ? load_double_partial(p + kDoubleLanes, n - kDoubleLanes) : zero_double();
}
template <class T>
inline void in_order(DoubleV&, DoubleV&, T) {}

/// Lanes 0..15 of a segment to a vector of lanes: the folds h = 8 and h = 4.
inline DoubleV fold_segment(const DoubleV (&lanes)[4]) {
  return {
      _mm256_add_pd(_mm256_add_pd(lanes[0].v, lanes[2].v), _mm256_add_pd(lanes[1].v, lanes[3].v))};
}
/// That of each of four segments to their partials: the folds h = 2 and h = 1.
inline DoubleV fold_segments(const DoubleV (&of)[4]) {
  const __m256d ab_even = _mm256_unpacklo_pd(of[0].v, of[1].v);
  const __m256d ab_odd = _mm256_unpackhi_pd(of[0].v, of[1].v);
  const __m256d cd_even = _mm256_unpacklo_pd(of[2].v, of[3].v);
  const __m256d cd_odd = _mm256_unpackhi_pd(of[2].v, of[3].v);
  const __m256d even = _mm256_add_pd(_mm256_permute2f128_pd(ab_even, cd_even, 0x20),
                                     _mm256_permute2f128_pd(ab_even, cd_even, 0x31));
  const __m256d odd = _mm256_add_pd(_mm256_permute2f128_pd(ab_odd, cd_odd, 0x20),
                                    _mm256_permute2f128_pd(ab_odd, cd_odd, 0x31));
  return {_mm256_add_pd(even, odd)};
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
inline PairV widen_pair(__m256i words) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(words, high))}};
}
inline __m256i narrow_pair(PairV a) {
  return _mm256_blend_epi16(_mm256_srli_epi32(rounded_bits(a.even.v), 16), rounded_bits(a.odd.v),
                            0xaa);
}
inline PairV load_pair(const BFloat16* p) {
  return widen_pair(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline PairV load_pair_partial(const BFloat16* p, std::int64_t n) {
  alignas(32) BFloat16 buffer[2 * kFloatLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    buffer[i] = p[i];
  }
  return load_pair(buffer);
}
inline void store(BFloat16* p, PairV a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_pair(a));
}
inline void store_partial(BFloat16* p, PairV a, std::int64_t n) {
  alignas(32) BFloat16 buffer[2 * kFloatLanes];
  store(buffer, a);
  for (std::int64_t i = 0; i < n; ++i) {
    p[i] = buffer[i];
  }
}
/// The first kFloatLanes elements.
inline void stream_half(BFloat16* p, PairV a) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(narrow_pair(a)));
}
/// p: at a multiple of half a vector.
inline void stream(BFloat16* p, PairV a) {
  const __m256i words = narrow_pair(a);
  if (reinterpret_cast<std::uintptr_t>(p) % 32 == 0) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), words);
  } else {
    auto* halves = reinterpret_cast<__m128i*>(p);
    _mm_stream_si128(halves, _mm256_castsi256_si128(words));
    _mm_stream_si128(halves + 1, _mm256_extracti128_si256(words, 1));
  }
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
