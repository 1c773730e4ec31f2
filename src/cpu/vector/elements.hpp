// SPDX-License-Identifier: Apache-2.0
// The element-wise passes over the vector type of one level (simd_*.hpp). Included inside a level
// file's unnamed namespace; uses nothing but intrinsics, so that no shared inline function is
// compiled with the level's flags (the linker might pick that copy for processors that lack the
// instructions).

inline std::int64_t minimum(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t maximum(std::int64_t a, std::int64_t b) { return a < b ? b : a; }

template <class T>
inline const T* plane_of(const Operand& operand, std::int64_t sample, std::int64_t channel) {
  return static_cast<const T*>(operand.data) + sample * operand.sample_stride +
         channel * operand.channel_stride;
}
template <class T>
inline T* output_of(const Operand& operand, std::int64_t sample, std::int64_t channel) {
  return const_cast<T*>(plane_of<T>(operand, sample, channel));
}

/// Bits [i, i + n) of a run's activation mask, n at most 32; those above the lowest n are garbage.
inline unsigned load_bits(const std::uint8_t* run, std::int64_t i, std::int64_t n) {
  std::uint64_t bits = 0;
  for (std::int64_t byte = (i + n - 1) / 8; byte >= i / 8; --byte) {
    bits = bits << 8 | run[byte];
  }
  return static_cast<unsigned>(bits >> i % 8);
}
/// Of a whole vector whose bits begin with a byte, as they mostly do.
template <std::int64_t kBits>
inline unsigned load_whole_bits(const std::uint8_t* from) {
  unsigned bits = 0;
  for (std::int64_t byte = 0; byte < kBits / 8; ++byte) {
    bits |= static_cast<unsigned>(from[byte]) << 8 * byte;
  }
  return bits;
}
template <std::int64_t kBits>
inline void store_whole_bits(std::uint8_t* to, unsigned bits) {
  for (std::int64_t byte = 0; byte < kBits / 8; ++byte) {
    to[byte] = static_cast<std::uint8_t>(bits >> 8 * byte);
  }
}
/// Leaves the bits around them as they are.
inline void store_bits(std::uint8_t* run, std::int64_t i, std::int64_t n, unsigned bits) {
  run += i / 8;
  std::uint64_t own = ((std::uint64_t{1} << n) - 1) << i % 8;
  std::uint64_t shifted = static_cast<std::uint64_t>(bits) << i % 8;
  for (; own != 0; ++run, own >>= 8, shifted >>= 8) {
    *run = static_cast<std::uint8_t>((*run & ~own) | (shifted & own));
  }
}

template <class T>
struct ActivationV {
  using V = VectorOf<T>;
  using Mask = typename VectorFor<T>::Mask;
  explicit ActivationV(const ActivationConstants& k)
      : slope(all_lanes<T>(k.negative_slope)),
        zero(all_lanes<T>(0.0f)),
        to_zero(mask_for<T>(k.zero ? kAllLanesOf<T> : 0)) {}
  /// Where the gradient passes unchanged: v > 0, and with 0 below also where v is NaN.
  Mask passes(V v) const { return is_positive(v) | (is_nan(v) & to_zero); }
  V value(V v, Mask passing) const { return select(passing, v, select(to_zero, zero, v * slope)); }
  V gradient(V dy, Mask passing) const {
    return select(passing, dy, select(to_zero, zero, rounded(dy * slope, T{})));
  }
  V slope;
  V zero;
  Mask to_zero;
};

/// Channel constants of the vector lanes at hand.
template <class T>
struct AffineV {
  VectorOf<T> mean_high, mean_low, scale, shift;
  VectorOf<T> operator()(VectorOf<T> x) const {
    return fused(scale, (x - mean_high) - mean_low, shift);
  }
};
template <class T, class Get>
inline AffineV<T> affine(const ElementConstants& k, const Get& get) {
  return {get(k.mean_high), get(k.mean_low), get(k.scale), get(k.shift)};
}
template <class T, class Mask>
inline AffineV<T> select(Mask m, const AffineV<T>& yes, const AffineV<T>& no) {
  return {select(m, yes.mean_high, no.mean_high), select(m, yes.mean_low, no.mean_low),
          select(m, yes.scale, no.scale), select(m, yes.shift, no.shift)};
}
template <class T>
struct GradientV {
  VectorOf<T> mean_high, mean_low, c1, c2, c3, power;
  VectorOf<T> operator()(VectorOf<T> x, VectorOf<T> u) const {
    return fused(c1, u, fused(c2, ((x - mean_high) - mean_low) * power, c3));
  }
};
template <class T, class Get>
inline GradientV<T> gradient(const ElementConstants& k, const Get& get) {
  return {get(k.mean_high), get(k.mean_low), get(k.c1), get(k.c2), get(k.c3), get(k.power)};
}
template <class T, class Mask>
inline GradientV<T> select(Mask m, const GradientV<T>& yes, const GradientV<T>& no) {
  return {select(m, yes.mean_high, no.mean_high),
          select(m, yes.mean_low, no.mean_low),
          select(m, yes.c1, no.c1),
          select(m, yes.c2, no.c2),
          select(m, yes.c3, no.c3),
          select(m, yes.power, no.power)};
}
template <class T>
struct AffineAndGradientV {
  AffineV<T> affine;
  GradientV<T> gradient;
};
template <class T, class Mask>
inline AffineAndGradientV<T> select(Mask m, const AffineAndGradientV<T>& yes,
                                    const AffineAndGradientV<T>& no) {
  return {select(m, yes.affine, no.affine), select(m, yes.gradient, no.gradient)};
}

// A pass maps x and `other` to a result. kActivationMask: activation mask bits go in with `bits`,
// or out.
enum class ActivationMaskUse : std::uint8_t { kNone, kRead, kWrite };

struct Normalize {
  template <class T>
  using Constants = AffineV<T>;
  static constexpr bool kOther = false;
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kNone;
  template <class T, class Get>
  static Constants<T> constants(const ElementConstants& k, const Get& get) {
    return affine<T>(k, get);
  }
  template <class T>
  static VectorOf<T> apply(VectorOf<T> x, VectorOf<T>, const Constants<T>& k, const ActivationV<T>&,
                           unsigned&) {
    return k(x);
  }
};

template <bool kResidual>
struct NormalizeActivated : Normalize {
  static constexpr bool kOther = kResidual;
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kWrite;
  template <class T>
  static VectorOf<T> apply(VectorOf<T> x, VectorOf<T> other, const Constants<T>& k,
                           const ActivationV<T>& activation, unsigned& bits) {
    const VectorOf<T> v = kResidual ? k(x) + other : k(x);
    const auto passing = activation.passes(v);
    bits = bits_of(passing);
    return activation.value(v, passing);
  }
};

struct InputGradient {
  template <class T>
  using Constants = GradientV<T>;
  static constexpr bool kOther = true;
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kNone;
  template <class T, class Get>
  static Constants<T> constants(const ElementConstants& k, const Get& get) {
    return gradient<T>(k, get);
  }
  template <class T>
  static VectorOf<T> apply(VectorOf<T> x, VectorOf<T> dy, const Constants<T>& k,
                           const ActivationV<T>&, unsigned&) {
    return k(x, dy);
  }
};

struct InputGradientActivated {
  template <class T>
  using Constants = AffineAndGradientV<T>;
  static constexpr bool kOther = true;
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kNone;
  template <class T, class Get>
  static Constants<T> constants(const ElementConstants& k, const Get& get) {
    return {affine<T>(k, get), gradient<T>(k, get)};
  }
  template <class T>
  static VectorOf<T> apply(VectorOf<T> x, VectorOf<T> dy, const Constants<T>& k,
                           const ActivationV<T>& activation, unsigned&) {
    return k.gradient(x, activation.gradient(dy, activation.passes(k.affine(x))));
  }
};

struct InputGradientActivationMask : InputGradient {
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kRead;
  template <class T>
  static VectorOf<T> apply(VectorOf<T> x, VectorOf<T> dy, const Constants<T>& k,
                           const ActivationV<T>& activation, unsigned& bits) {
    return k(x, activation.gradient(dy, mask_for<T>(bits)));
  }
};

/// dy come back through the activation, for the sums.
struct Upstream : Normalize {
  static constexpr bool kOther = true;
  template <class T>
  static VectorOf<T> apply(VectorOf<T> x, VectorOf<T> dy, const Constants<T>& k,
                           const ActivationV<T>& activation, unsigned&) {
    return activation.gradient(dy, activation.passes(k(x)));
  }
};
struct UpstreamActivationMask : Upstream {
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kRead;
  template <class T>
  static VectorOf<T> apply(VectorOf<T>, VectorOf<T> dy, const Constants<T>&,
                           const ActivationV<T>& activation, unsigned& bits) {
    return activation.gradient(dy, mask_for<T>(bits));
  }
};

/// x = fma(scale, v - shift, mean_low) + mean_high, v = leaky_relu backwards of y; the scale and
/// the slope are the reciprocals of those that made y.
struct Recover : Normalize {
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kWrite;
  template <class T>
  static VectorOf<T> apply(VectorOf<T> y, VectorOf<T>, const Constants<T>& k,
                           const ActivationV<T>& activation, unsigned& bits) {
    const auto passing = activation.passes(y);
    bits = bits_of(passing);
    const VectorOf<T> v = activation.value(y, passing);
    return fused(k.scale, v - k.shift, k.mean_low) + k.mean_high;
  }
};
