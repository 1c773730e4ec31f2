// SPDX-License-Identifier: Apache-2.0
// Two vectors of floats as one, for bfloat16 where it is rounded by integers: a 32-bit word of
// memory holds an even and an odd element, so that the even ones are one vector and the odd ones
// another without shuffles.
// Included inside a level file's unnamed namespace, after the vector type (simd_*.hpp).

inline PairV operator+(PairV a, PairV b) { return {a.even + b.even, a.odd + b.odd}; }
inline PairV operator-(PairV a, PairV b) { return {a.even - b.even, a.odd - b.odd}; }
inline PairV operator*(PairV a, PairV b) { return {a.even * b.even, a.odd * b.odd}; }
inline PairV fused(PairV a, PairV b, PairV c) {
  return {fused(a.even, b.even, c.even), fused(a.odd, b.odd, c.odd)};
}
inline PairV rounded(PairV a, BFloat16 type) {
  return {rounded(a.even, type), rounded(a.odd, type)};
}
inline PairMaskV is_positive(PairV a) { return {is_positive(a.even), is_positive(a.odd)}; }
inline PairMaskV is_nan(PairV a) { return {is_nan(a.even), is_nan(a.odd)}; }
inline PairMaskV operator|(PairMaskV a, PairMaskV b) { return {a.even | b.even, a.odd | b.odd}; }
inline PairMaskV operator&(PairMaskV a, PairMaskV b) { return {a.even & b.even, a.odd & b.odd}; }
inline PairV select(PairMaskV m, PairV yes, PairV no) {
  return {select(m.even, yes.even, no.even), select(m.odd, yes.odd, no.odd)};
}

/// Where rounding takes several instructions, whose constants both vectors share.
template <class T>
constexpr bool kInPairs = !kRoundsBFloat16 && std::is_same_v<T, BFloat16>;
/// The vector in which the element-wise passes take elements of type T.
template <class T>
struct VectorFor {
  using Type = FloatV;
  using Mask = MaskV;
  static constexpr int kLanes = kFloatLanes;
};
template <class T>
  requires kInPairs<T>
struct VectorFor<T> {
  using Type = PairV;
  using Mask = PairMaskV;
  static constexpr int kLanes = 2 * kFloatLanes;
};
template <class T>
using VectorOf = typename VectorFor<T>::Type;
template <class T>
constexpr int kLanesOf = VectorFor<T>::kLanes;
template <class T>
constexpr unsigned kAllLanesOf = kLanesOf<T> == 32 ? ~0u : (1u << kLanesOf<T> % 32) - 1;

// Lanes as bits, lane 0 lowest, in the order of memory.
inline void set_mask(MaskV& mask, unsigned bits) { mask = mask_from_bits(bits); }
inline void set_mask(PairMaskV& mask, unsigned bits) { mask = pair_mask_from_bits(bits); }
template <class T>
inline auto mask_for(unsigned bits) {
  typename VectorFor<T>::Mask mask;
  set_mask(mask, bits);
  return mask;
}

inline void spread(FloatV& to, float v) { to = broadcast(v); }
inline void spread(PairV& to, float v) { to = {broadcast(v), broadcast(v)}; }
/// Each lane has v.
template <class T>
inline VectorOf<T> all_lanes(float v) {
  VectorOf<T> vector;
  spread(vector, v);
  return vector;
}

inline void load_floats(FloatV& to, const float* p) { to = load(p); }
inline void load_floats(PairV& to, const float* p) { to = load_floats_as_pair(p); }
/// A number for each lane, in the order of memory.
template <class T>
inline VectorOf<T> lanes_from(const float* p) {
  VectorOf<T> vector;
  load_floats(vector, p);
  return vector;
}

// Elements in memory; simd_*.hpp have these by other names.
template <class T>
inline VectorOf<T> load_lanes(const T* p) {
  if constexpr (kInPairs<T>) {
    return load_pair(p);
  } else {
    return load(p);
  }
}
template <class T>
inline VectorOf<T> load_some_lanes(const T* p, std::int64_t n) {
  if constexpr (kInPairs<T>) {
    return load_pair_partial(p, n);
  } else {
    return load_partial(p, n);
  }
}
/// The first n lanes, past the caches where half a vector can go there.
template <class T>
inline void stream_some(T* p, FloatV a, std::int64_t n) {
  store_partial(p, a, n);
}
inline void stream_some(BFloat16* p, PairV a, std::int64_t n) {
  if (n == kFloatLanes &&
      reinterpret_cast<std::uintptr_t>(p) % (kFloatLanes * sizeof(BFloat16)) == 0) {
    stream_half(p, a);
  } else {
    store_partial(p, a, n);
  }
}
