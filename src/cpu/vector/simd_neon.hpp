// SPDX-License-Identifier: Apache-2.0
// The vector type of passes.hpp on aarch64: two registers each, because passes take eight
// floats and four doubles at least. Included by one level file only, inside its unnamed namespace.
#include "cpu/vector/simd_any.hpp"

constexpr int kFloatLanes = 8;
constexpr int kDoubleLanes = 4;

struct FloatV {
  float32x4_t low;
  float32x4_t high;
};
struct DoubleV {
  float64x2_t low;
  float64x2_t high;
};
/// Vectors of finalize.hpp, and of what those leave.
using WidestV = float64x2_t;
using LeastV = float64x2_t;

/// The first n of kCount elements at p, then +0.
template <int kCount, class T>
struct Part {
  Part(const T* p, std::int64_t n) {
    for (std::int64_t i = 0; i < n && i < kCount; ++i) {
      values[i] = p[i];
    }
  }
  alignas(16) T values[kCount] = {};
};
/// The first n of kCount elements.
template <int kCount, class T, class V>
inline void store_part(T* p, const V& a, std::int64_t n) {
  alignas(16) T buffer[kCount];
  store(buffer, a);
  for (std::int64_t i = 0; i < n; ++i) {
    p[i] = buffer[i];
  }
}

template <class T>
inline const std::uint16_t* bits_at(const T* p) {
  return &p->bits;
}
inline float32x4_t widen(uint16x4_t bits, Half) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }
inline float32x4_t widen(uint16x4_t bits, BFloat16) {
  return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}
inline uint16x4_t narrow(float32x4_t v, Half) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); }
// Round to nearest even on the bits, the upper half of which is meant; NaN keeps its top bits and
// turns quiet.
inline uint32x4_t rounded_bits(float32x4_t v) {
  const uint32x4_t b = vreinterpretq_u32_f32(v);
  const uint32x4_t rounded = b + ((b >> 16 & 1) + 0x7fff);
  return vbslq_u32(vceqq_f32(v, v), rounded, vorrq_u32(b, vdupq_n_u32(0x400000)));
}
constexpr bool kRoundsBFloat16 = false;
inline uint16x4_t narrow(float32x4_t v, BFloat16) { return vshrn_n_u32(rounded_bits(v), 16); }

inline FloatV load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
template <class T>
inline FloatV load(const T* p) {
  const uint16x8_t bits = vld1q_u16(bits_at(p));
  return {widen(vget_low_u16(bits), T{}), widen(vget_high_u16(bits), T{})};
}
template <class T>
inline FloatV load_partial(const T* p, std::int64_t n) {
  return load(Part<kFloatLanes, T>(p, n).values);
}
inline void store(float* p, FloatV a) {
  vst1q_f32(p, a.low);
  vst1q_f32(p + 4, a.high);
}
template <class T>
inline void store(T* p, FloatV a) {
  vst1q_u16(&p->bits, vcombine_u16(narrow(a.low, T{}), narrow(a.high, T{})));
}
// Stores past the caches are left to the processor, which finds them by itself.
template <class T>
inline void stream(T* p, FloatV a) {
  store(p, a);
}
template <class T>
inline void store_partial(T* p, FloatV a, std::int64_t n) {
  store_part<kFloatLanes>(p, a, n);
}
inline void fence_streams() {}

/// To the nearest number of type T.
inline FloatV rounded(FloatV a, float) { return a; }
template <class T>
inline FloatV rounded(FloatV a, T type) {
  return {widen(narrow(a.low, type), type), widen(narrow(a.high, type), type)};
}

inline FloatV broadcast(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
inline FloatV operator+(FloatV a, FloatV b) { return {a.low + b.low, a.high + b.high}; }
inline FloatV operator-(FloatV a, FloatV b) { return {a.low - b.low, a.high - b.high}; }
inline FloatV operator*(FloatV a, FloatV b) { return {a.low * b.low, a.high * b.high}; }
inline FloatV fused(FloatV a, FloatV b, FloatV c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}

/// One truth value per float lane; as bits, lane 0 lowest.
struct MaskV {
  uint32x4_t low;
  uint32x4_t high;
};
/// The bits of eight lanes, `step` apart.
inline MaskV bits_of_lanes(int step) {
  alignas(16) std::uint32_t bits[kFloatLanes];
  for (int i = 0; i < kFloatLanes; ++i) {
    bits[i] = 1u << step * i;
  }
  return {vld1q_u32(bits), vld1q_u32(bits + 4)};
}
inline MaskV is_positive(FloatV a) { return {vcgtzq_f32(a.low), vcgtzq_f32(a.high)}; }
inline MaskV is_nan(FloatV a) {
  return {vmvnq_u32(vceqq_f32(a.low, a.low)), vmvnq_u32(vceqq_f32(a.high, a.high))};
}
inline MaskV mask_from_bits(unsigned bits) {
  const MaskV lane = bits_of_lanes(1);
  const uint32x4_t all = vdupq_n_u32(bits);
  return {vtstq_u32(all, lane.low), vtstq_u32(all, lane.high)};
}
inline MaskV nonzero_bytes(const std::uint8_t* p) {
  const uint16x8_t words = vmovl_u8(vld1_u8(p));
  const auto nonzero = [](uint16x4_t v) {
    const uint32x4_t wide = vmovl_u16(v);
    return vtstq_u32(wide, wide);
  };
  return {nonzero(vget_low_u16(words)), nonzero(vget_high_u16(words))};
}
inline unsigned bits_of(MaskV a) {
  const MaskV lane = bits_of_lanes(1);
  return vaddvq_u32(vorrq_u32(vandq_u32(a.low, lane.low), vandq_u32(a.high, lane.high)));
}
inline MaskV operator|(MaskV a, MaskV b) { return {a.low | b.low, a.high | b.high}; }
inline MaskV operator&(MaskV a, MaskV b) { return {a.low & b.low, a.high & b.high}; }
inline FloatV select(MaskV m, FloatV yes, FloatV no) {
  return {vbslq_f32(m.low, yes.low, no.low), vbslq_f32(m.high, yes.high, no.high)};
}

inline DoubleV widened(float32x4_t v) {
  return {vcvt_f64_f32(vget_low_f32(v)), vcvt_high_f64_f32(v)};
}
inline DoubleV load_double(const float* p) { return widened(vld1q_f32(p)); }
template <class T>
inline DoubleV load_double(const T* p) {
  return widened(widen(vld1_u16(bits_at(p)), T{}));
}
template <class T>
inline DoubleV load_double_partial(const T* p, std::int64_t n) {
  return load_double(Part<kDoubleLanes, T>(p, n).values);
}

inline DoubleV broadcast(double v) { return {vdupq_n_f64(v), vdupq_n_f64(v)}; }
inline DoubleV zero_double() { return broadcast(0.0); }
inline DoubleV load_double(const double* p) { return {vld1q_f64(p), vld1q_f64(p + 2)}; }
inline void store_double(double* p, DoubleV a) {
  vst1q_f64(p, a.low);
  vst1q_f64(p + 2, a.high);
}
inline DoubleV operator+(DoubleV a, DoubleV b) { return {a.low + b.low, a.high + b.high}; }
inline DoubleV operator-(DoubleV a, DoubleV b) { return {a.low - b.low, a.high - b.high}; }
inline DoubleV operator*(DoubleV a, DoubleV b) { return {a.low * b.low, a.high * b.high}; }
inline DoubleV fused(DoubleV a, DoubleV b, DoubleV c) {
  return {vfmaq_f64(c.low, a.low, b.low), vfmaq_f64(c.high, a.high, b.high)};
}
/// a*b - c, rounded once.
inline float64x2_t fused_minus(float64x2_t a, float64x2_t b, float64x2_t c) {
  return vfmaq_f64(vnegq_f64(c), a, b);
}
inline DoubleV fused_minus(DoubleV a, DoubleV b, DoubleV c) {
  return {fused_minus(a.low, b.low, c.low), fused_minus(a.high, b.high, c.high)};
}
inline float64x2_t square_root(float64x2_t a) { return vsqrtq_f64(a); }
/// Whether no bit is set: -0 has one.
inline bool is_zero(float64x2_t a) { return vmaxvq_u32(vreinterpretq_u32_f64(a)) == 0; }
inline DoubleV low_half(FloatV a) { return widened(a.low); }
inline DoubleV high_half(FloatV a) { return widened(a.high); }

/// Bit patterns of floats.
struct BitsV {
  uint32x4_t low;
  uint32x4_t high;
};
inline BitsV broadcast_bits(std::uint32_t v) { return {vdupq_n_u32(v), vdupq_n_u32(v)}; }
inline BitsV load_bits_of(const std::uint32_t* p) { return {vld1q_u32(p), vld1q_u32(p + 4)}; }
inline void store_bits_of(std::uint32_t* p, BitsV a) {
  vst1q_u32(p, a.low);
  vst1q_u32(p + 4, a.high);
}
inline BitsV magnitude_bits(FloatV a) {
  return {(uint32x4_t)a.low & 0x7fffffff, (uint32x4_t)a.high & 0x7fffffff};
}
inline BitsV minus_one(BitsV a) { return {a.low - 1, a.high - 1}; }
inline BitsV plus_one(BitsV a) { return {a.low + 1, a.high + 1}; }
inline BitsV larger(BitsV a, BitsV b) {
  return {vmaxq_u32(a.low, b.low), vmaxq_u32(a.high, b.high)};
}
inline BitsV smaller(BitsV a, BitsV b) {
  return {vminq_u32(a.low, b.low), vminq_u32(a.high, b.high)};
}
/// Floats given by their bits.
inline DoubleV load_double_of_bits(const std::uint32_t* p) {
  return widened(vreinterpretq_f32_u32(vld1q_u32(p)));
}

inline DoubleV with_bits(DoubleV a, std::uint64_t mask) {
  return {(float64x2_t)((uint64x2_t)a.low & mask), (float64x2_t)((uint64x2_t)a.high & mask)};
}
inline DoubleV magnitude(DoubleV a) { return {vabsq_f64(a.low), vabsq_f64(a.high)}; }
/// Truth values of four lanes as bits, lane 0 lowest.
inline unsigned bits_of(uint64x2_t low, uint64x2_t high) {
  alignas(16) static const std::uint32_t kLane[4] = {1, 2, 4, 8};
  const uint32x4_t all = vcombine_u32(vmovn_u64(low), vmovn_u64(high));
  return vaddvq_u32(vandq_u32(all, vld1q_u32(kLane)));
}
/// Where a < b; as bits, lane 0 lowest.
inline unsigned less(DoubleV a, DoubleV b) {
  return bits_of(vcltq_f64(a.low, b.low), vcltq_f64(a.high, b.high));
}
inline unsigned at_least(DoubleV a, DoubleV b) {
  return bits_of(vcgeq_f64(a.low, b.low), vcgeq_f64(a.high, b.high));
}
/// Where a < b and c == d.
inline unsigned less_and_equal(DoubleV a, DoubleV b, DoubleV c, DoubleV d) {
  return bits_of(vandq_u64(vcltq_f64(a.low, b.low), vceqq_f64(c.low, d.low)),
                 vandq_u64(vcltq_f64(a.high, b.high), vceqq_f64(c.high, d.high)));
}
/// to[i] += bits of a - bits of b, as integers.
inline void add_difference(std::int64_t* to, DoubleV a, DoubleV b) {
  store_any(to, load_any<int64x2_t>(to) + ((int64x2_t)a.low - (int64x2_t)b.low));
  store_any(to + 2, load_any<int64x2_t>(to + 2) + ((int64x2_t)a.high - (int64x2_t)b.high));
}

/// 2 * kDoubleLanes elements, here in their order.
template <class T>
inline void load_pair(const T* p, DoubleV& a, DoubleV& b) {
  const FloatV both = load(p);
  a = low_half(both);
  b = high_half(both);
}
/// The first n > 0 of them, and +0.
template <class T>
inline void load_pair_partial(const T* p, std::int64_t n, DoubleV& a, DoubleV& b) {
  load_pair(Part<2 * kDoubleLanes, T>(p, n).values, a, b);
}
template <class T>
inline void in_order(DoubleV&, DoubleV&, T) {}

/// Lanes 0..15 of a segment to a vector of lanes: the folds h = 8 and h = 4.
inline DoubleV fold_segment(const DoubleV (&lanes)[4]) {
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}
/// That of each of four segments to their partials: the folds h = 2 and h = 1.
inline DoubleV fold_segments(const DoubleV (&of)[4]) {
  const auto folded = [](DoubleV v) { return vaddq_f64(v.low, v.high); };
  return {vpaddq_f64(folded(of[0]), folded(of[1])), vpaddq_f64(folded(of[2]), folded(of[3]))};
}

/// Elements 0, 2, 4 ... and 1, 3, 5 ... of a piece of memory (pair.hpp).
struct PairV {
  FloatV even;
  FloatV odd;
};
struct PairMaskV {
  MaskV even;
  MaskV odd;
};
inline PairV load_pair(const BFloat16* p) {
  const std::uint16_t* bits = bits_at(p);
  const uint32x4_t low = vreinterpretq_u32_u16(vld1q_u16(bits));
  const uint32x4_t high = vreinterpretq_u32_u16(vld1q_u16(bits + 8));
  const auto even = [](uint32x4_t v) { return vreinterpretq_f32_u32(vshlq_n_u32(v, 16)); };
  const auto odd = [](uint32x4_t v) {
    return vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff0000u)));
  };
  return {{even(low), even(high)}, {odd(low), odd(high)}};
}
inline PairV load_pair_partial(const BFloat16* p, std::int64_t n) {
  return load_pair(Part<2 * kFloatLanes, BFloat16>(p, n).values);
}
inline void store(BFloat16* p, PairV a) {
  const auto words = [](float32x4_t even, float32x4_t odd) {
    return vreinterpretq_u16_u32(vsriq_n_u32(rounded_bits(odd), rounded_bits(even), 16));
  };
  vst1q_u16(&p->bits, words(a.even.low, a.odd.low));
  vst1q_u16(&p->bits + 8, words(a.even.high, a.odd.high));
}
inline void store_partial(BFloat16* p, PairV a, std::int64_t n) {
  store_part<2 * kFloatLanes>(p, a, n);
}
/// The first kFloatLanes elements.
inline void stream_half(BFloat16* p, PairV a) { store_partial(p, a, kFloatLanes); }
inline void stream(BFloat16* p, PairV a) { store(p, a); }
inline PairV load_floats_as_pair(const float* p) {
  const FloatV a = load(p);
  const FloatV b = load(p + 8);
  return {{vuzp1q_f32(a.low, a.high), vuzp1q_f32(b.low, b.high)},
          {vuzp2q_f32(a.low, a.high), vuzp2q_f32(b.low, b.high)}};
}
inline PairMaskV pair_mask_from_bits(unsigned bits) {
  const MaskV lane = bits_of_lanes(2);
  const auto has = [&](unsigned shifted) {
    const uint32x4_t all = vdupq_n_u32(shifted);
    return MaskV{vtstq_u32(all, lane.low), vtstq_u32(all, lane.high)};
  };
  return {has(bits), has(bits >> 1)};
}
inline unsigned bits_of(PairMaskV a) {
  const MaskV lane = bits_of_lanes(2);
  const auto taken = [&](MaskV m) {
    return vaddvq_u32(vorrq_u32(vandq_u32(m.low, lane.low), vandq_u32(m.high, lane.high)));
  };
  return taken(a.even) | taken(a.odd) << 1;
}
