// SPDX-License-Identifier: Apache-2.0
// What the vector types of AVX2 and AVX-512 have in common. Included by simd_avx2.hpp and
// simd_avx512.hpp after what this needs of them: the registers Floats, Doubles and Ints, half as
// wide ones, SYNCBN_MM(name) for intrinsics, and primitives. Casts between registers keep bits;
// Ints are added and subtracted as 64-bit integers.

struct FloatV {
  Floats v;
};
struct DoubleV {
  Doubles v;
};
/// Bit patterns of floats.
struct BitsV {
  Ints v;
};

inline Ints all_words(std::uint32_t v) { return SYNCBN_MM(set1_epi32)(static_cast<int>(v)); }

inline FloatV broadcast(float v) { return {SYNCBN_MM(set1_ps)(v)}; }
inline FloatV operator+(FloatV a, FloatV b) { return {a.v + b.v}; }
inline FloatV operator-(FloatV a, FloatV b) { return {a.v - b.v}; }
inline FloatV operator*(FloatV a, FloatV b) { return {a.v * b.v}; }
inline FloatV fused(FloatV a, FloatV b, FloatV c) { return {SYNCBN_MM(fmadd_ps)(a.v, b.v, c.v)}; }
inline MaskV is_positive(FloatV a) { return compare<_CMP_GT_OQ>(a.v, Floats()); }
inline MaskV is_nan(FloatV a) { return compare<_CMP_UNORD_Q>(a.v, a.v); }

inline Floats widen(HalfInts bits, Half) { return SYNCBN_MM(cvtph_ps)(bits); }
inline Floats widen(HalfInts bits, BFloat16) {
  return (Floats)SYNCBN_MM(slli_epi32)(SYNCBN_MM(cvtepu16_epi32)(bits), 16);
}
inline HalfInts narrow(Floats v, Half) {
  return SYNCBN_MM(cvtps_ph)(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline HalfInts narrow(Floats v, BFloat16);
// Round to nearest even on the bits, the upper half of which is meant; NaN keeps its top bits and
// turns quiet.
inline Ints rounded_bits(Floats v) {
  const auto b = (Ints)v;
  const Ints odd = SYNCBN_MM(srli_epi32)(b, 16) & all_words(1);
  const Ints rounded = SYNCBN_MM(add_epi32)(b, SYNCBN_MM(add_epi32)(odd, all_words(0x7fff)));
  return or_where(is_nan({v}), rounded, b, all_words(0x400000));
}

inline FloatV load(const float* p) { return {load_any<Floats>(p)}; }
template <class T>
inline FloatV load(const T* p) {
  return {widen(load_any<HalfInts>(p), T{})};
}
inline void store(float* p, FloatV a) { store_any(p, a.v); }
template <class T>
inline void store(T* p, FloatV a) {
  store_half(p, narrow(a.v, T{}));
}
inline void stream(float* p, FloatV a) { SYNCBN_MM(stream_ps)(p, a.v); }
template <class T>
inline void stream(T* p, FloatV a) {
  stream_any(p, narrow(a.v, T{}));
}
inline void fence_streams() { _mm_sfence(); }

/// To the nearest number of type T.
inline FloatV rounded(FloatV a, float) { return a; }
template <class T>
inline FloatV rounded(FloatV a, T type) {
  return {widen(narrow(a.v, type), type)};
}

inline DoubleV broadcast(double v) { return {SYNCBN_MM(set1_pd)(v)}; }
inline DoubleV zero_double() { return {Doubles()}; }
inline DoubleV load_double(const double* p) { return {SYNCBN_MM(load_pd)(p)}; }
inline void store_double(double* p, DoubleV a) { SYNCBN_MM(store_pd)(p, a.v); }
inline DoubleV widened(HalfFloats v) { return {SYNCBN_MM(cvtps_pd)(v)}; }
inline DoubleV load_double(const float* p) { return widened(load_any<HalfFloats>(p)); }
template <class T>
inline DoubleV load_double(const T* p) {
  return widened(load_few(p));
}
inline DoubleV low_half(FloatV a) { return widened(lower(a.v)); }
inline DoubleV high_half(FloatV a) { return widened(upper(a.v)); }
inline DoubleV operator+(DoubleV a, DoubleV b) { return {a.v + b.v}; }
inline DoubleV operator-(DoubleV a, DoubleV b) { return {a.v - b.v}; }
inline DoubleV operator*(DoubleV a, DoubleV b) { return {a.v * b.v}; }
inline DoubleV fused(DoubleV a, DoubleV b, DoubleV c) {
  return {SYNCBN_MM(fmadd_pd)(a.v, b.v, c.v)};
}
inline DoubleV fused_minus(DoubleV a, DoubleV b, DoubleV c) {
  return {SYNCBN_MM(fmsub_pd)(a.v, b.v, c.v)};
}
/// a*b - c, rounded once.
inline __m256d fused_minus(__m256d a, __m256d b, __m256d c) { return _mm256_fmsub_pd(a, b, c); }
inline __m256d square_root(__m256d a) { return _mm256_sqrt_pd(a); }
/// Whether no bit is set: -0 has one.
inline bool is_zero(__m256d a) { return _mm256_testz_si256((__m256i)a, (__m256i)a) != 0; }

inline BitsV broadcast_bits(std::uint32_t v) { return {all_words(v)}; }
inline BitsV load_bits_of(const std::uint32_t* p) { return {*reinterpret_cast<const Ints*>(p)}; }
inline void store_bits_of(std::uint32_t* p, BitsV a) { *reinterpret_cast<Ints*>(p) = a.v; }
inline BitsV magnitude_bits(FloatV a) { return {(Ints)a.v & all_words(0x7fffffff)}; }
inline BitsV minus_one(BitsV a) { return {SYNCBN_MM(add_epi32)(a.v, all_words(0xffffffff))}; }
inline BitsV plus_one(BitsV a) { return {SYNCBN_MM(add_epi32)(a.v, all_words(1))}; }
inline BitsV larger(BitsV a, BitsV b) { return {SYNCBN_MM(max_epu32)(a.v, b.v)}; }
inline BitsV smaller(BitsV a, BitsV b) { return {SYNCBN_MM(min_epu32)(a.v, b.v)}; }
/// Floats given by their bits.
inline DoubleV load_double_of_bits(const std::uint32_t* p) {
  return widened(*reinterpret_cast<const HalfFloats*>(p));
}

inline DoubleV with_bits(DoubleV a, std::uint64_t mask) {
  return {(Doubles)((Ints)a.v & (Ints() + static_cast<long long>(mask)))};
}
inline DoubleV magnitude(DoubleV a) { return with_bits(a, 0x7fffffffffffffff); }
/// Where a < b; as bits, lane 0 lowest.
inline unsigned less(DoubleV a, DoubleV b) { return compare<_CMP_LT_OQ>(a.v, b.v); }
inline unsigned at_least(DoubleV a, DoubleV b) { return compare<_CMP_GE_OQ>(a.v, b.v); }
/// to[i] += bits of a - bits of b, as integers.
inline void add_difference(std::int64_t* to, DoubleV a, DoubleV b) {
  Ints* const at = reinterpret_cast<Ints*>(to);  // auto would forget that registers may alias
  *at = *at + ((Ints)a.v - (Ints)b.v);
}

/// The first n of kDoubleLanes elements, and +0.
inline DoubleV load_double_partial(const float* p, std::int64_t n);
template <class T>
inline DoubleV load_double_partial(const T* p, std::int64_t n);

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

/// Elements 0, 2, 4 ... and 1, 3, 5 ... of a piece of memory (pair.hpp).
struct PairV {
  FloatV even;
  FloatV odd;
};
struct PairMaskV {
  MaskV even;
  MaskV odd;
};
inline PairV widen_pair(Ints words) {
  return {{(Floats)SYNCBN_MM(slli_epi32)(words, 16)}, {(Floats)(words & all_words(0xffff0000u))}};
}
inline PairV load_pair(const BFloat16* p) { return widen_pair(load_any<Ints>(p)); }
inline Ints narrow_pair(PairV a) {
  return in_turns(SYNCBN_MM(srli_epi32)(rounded_bits(a.even.v), 16), rounded_bits(a.odd.v));
}
inline void store(BFloat16* p, PairV a) { store_any(p, narrow_pair(a)); }
/// The first kFloatLanes elements.
inline void stream_half(BFloat16* p, PairV a) { stream_any(p, lower(narrow_pair(a))); }
/// p: at a multiple of half a vector.
inline void stream(BFloat16* p, PairV a) {
  const Ints words = narrow_pair(a);
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(Ints) == 0) {
    stream_any(p, words);
  } else {
    stream_any(p, lower(words));
    stream_any(p + kFloatLanes, upper(words));
  }
}
