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

/// Bits [i, i + n) of a run's activation mask, n at most 16; those above the lowest n are garbage.
inline unsigned load_bits(const std::uint8_t* run, std::int64_t i, std::int64_t n) {
  unsigned bits = 0;
  for (std::int64_t byte = (i + n - 1) / 8; byte >= i / 8; --byte) {
    bits = bits << 8 | run[byte];
  }
  return bits >> i % 8;
}
/// Leaves the bits around them as they are.
inline void store_bits(std::uint8_t* run, std::int64_t i, std::int64_t n, unsigned bits) {
  run += i / 8;
  if (i % 8 == 0 && n == kFloatLanes) {
    for (int byte = 0; byte < kFloatLanes / 8; ++byte) {
      run[byte] = static_cast<std::uint8_t>(bits >> 8 * byte);
    }
    return;
  }
  unsigned own = ((1u << n) - 1) << i % 8;
  bits <<= i % 8;
  for (; own != 0; ++run, own >>= 8, bits >>= 8) {
    *run = static_cast<std::uint8_t>((*run & ~own) | (bits & own));
  }
}

struct ActivationV {
  explicit ActivationV(const ActivationConstants& k)
      : slope(broadcast(k.negative_slope)), zero(broadcast(0.0f)), to_zero(mask_of(k.zero)) {}
  /// Where the gradient passes unchanged: v > 0, and with 0 below also where v is NaN.
  MaskV passes(FloatV v) const { return is_positive(v) | (is_nan(v) & to_zero); }
  FloatV value(FloatV v, MaskV passing) const {
    return select(passing, v, select(to_zero, zero, v * slope));
  }
  template <class T>
  FloatV gradient(FloatV dy, MaskV passing, T type) const {
    return select(passing, dy, select(to_zero, zero, rounded(dy * slope, type)));
  }
  FloatV slope;
  FloatV zero;
  MaskV to_zero;
};

/// Channel constants of the vector lanes at hand.
struct AffineV {
  FloatV mean_high, mean_low, scale, shift;
  FloatV operator()(FloatV x) const { return fused(scale, (x - mean_high) - mean_low, shift); }
};
template <class Get>
inline AffineV affine(const ElementConstants& k, const Get& get) {
  return {get(k.mean_high), get(k.mean_low), get(k.scale), get(k.shift)};
}
inline AffineV select(MaskV m, const AffineV& yes, const AffineV& no) {
  return {select(m, yes.mean_high, no.mean_high), select(m, yes.mean_low, no.mean_low),
          select(m, yes.scale, no.scale), select(m, yes.shift, no.shift)};
}
struct GradientV {
  FloatV mean_high, mean_low, c1, c2, c3, power;
  FloatV operator()(FloatV x, FloatV u) const {
    return fused(c1, u, fused(c2, ((x - mean_high) - mean_low) * power, c3));
  }
};
template <class Get>
inline GradientV gradient(const ElementConstants& k, const Get& get) {
  return {get(k.mean_high), get(k.mean_low), get(k.c1), get(k.c2), get(k.c3), get(k.power)};
}
inline GradientV select(MaskV m, const GradientV& yes, const GradientV& no) {
  return {select(m, yes.mean_high, no.mean_high),
          select(m, yes.mean_low, no.mean_low),
          select(m, yes.c1, no.c1),
          select(m, yes.c2, no.c2),
          select(m, yes.c3, no.c3),
          select(m, yes.power, no.power)};
}

// A pass maps x and `other` to a result. kActivationMask: activation mask bits go in with `bits`,
// or out.
enum class ActivationMaskUse : std::uint8_t { kNone, kRead, kWrite };

struct Normalize {
  using Constants = AffineV;
  static constexpr bool kOther = false;
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kNone;
  template <class Get>
  static Constants constants(const ElementConstants& k, const Get& get) {
    return affine(k, get);
  }
  template <class T>
  static FloatV apply(FloatV x, FloatV, const Constants& k, const ActivationV&, unsigned&, T) {
    return k(x);
  }
};

template <bool kResidual>
struct NormalizeActivated : Normalize {
  static constexpr bool kOther = kResidual;
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kWrite;
  template <class T>
  static FloatV apply(FloatV x, FloatV other, const Constants& k, const ActivationV& activation,
                      unsigned& bits, T) {
    const FloatV v = kResidual ? k(x) + other : k(x);
    const MaskV passing = activation.passes(v);
    bits = bits_of(passing);
    return activation.value(v, passing);
  }
};

struct InputGradient {
  using Constants = GradientV;
  static constexpr bool kOther = true;
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kNone;
  template <class Get>
  static Constants constants(const ElementConstants& k, const Get& get) {
    return gradient(k, get);
  }
  template <class T>
  static FloatV apply(FloatV x, FloatV dy, const Constants& k, const ActivationV&, unsigned&, T) {
    return k(x, dy);
  }
};

struct InputGradientActivated {
  struct Constants {
    AffineV affine;
    GradientV gradient;
    friend Constants select(MaskV m, const Constants& yes, const Constants& no) {
      return {select(m, yes.affine, no.affine), select(m, yes.gradient, no.gradient)};
    }
  };
  static constexpr bool kOther = true;
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kNone;
  template <class Get>
  static Constants constants(const ElementConstants& k, const Get& get) {
    return {affine(k, get), gradient(k, get)};
  }
  template <class T>
  static FloatV apply(FloatV x, FloatV dy, const Constants& k, const ActivationV& activation,
                      unsigned&, T type) {
    return k.gradient(x, activation.gradient(dy, activation.passes(k.affine(x)), type));
  }
};

struct InputGradientActivationMask : InputGradient {
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kRead;
  template <class T>
  static FloatV apply(FloatV x, FloatV dy, const Constants& k, const ActivationV& activation,
                      unsigned& bits, T type) {
    return k(x, activation.gradient(dy, mask_from_bits(bits), type));
  }
};

/// dy come back through the activation, for the sums.
struct Upstream : Normalize {
  static constexpr bool kOther = true;
  template <class T>
  static FloatV apply(FloatV x, FloatV dy, const Constants& k, const ActivationV& activation,
                      unsigned&, T type) {
    return activation.gradient(dy, activation.passes(k(x)), type);
  }
};
struct UpstreamActivationMask : Upstream {
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kRead;
  template <class T>
  static FloatV apply(FloatV, FloatV dy, const Constants&, const ActivationV& activation,
                      unsigned& bits, T type) {
    return activation.gradient(dy, mask_from_bits(bits), type);
  }
};

/// x = fma(scale, v - shift, mean_low) + mean_high, v = leaky_relu backwards of y; the scale and
/// the slope are the reciprocals of those that made y.
struct Recover : Normalize {
  static constexpr ActivationMaskUse kActivationMask = ActivationMaskUse::kWrite;
  template <class T>
  static FloatV apply(FloatV y, FloatV, const Constants& k, const ActivationV& activation,
                      unsigned& bits, T) {
    const MaskV passing = activation.passes(y);
    bits = bits_of(passing);
    const FloatV v = activation.value(y, passing);
    return fused(k.scale, v - k.shift, k.mean_low) + k.mean_high;
  }
};
