// The element-wise passes over the vector type of one level (simd_*.hpp). Included inside a level
// file's unnamed namespace; uses nothing but intrinsics, so that no shared inline function is
// compiled with the level's flags (the linker might pick that copy for processors that lack the
// instructions).

inline std::int64_t minimum(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

template <class T>
inline const T* plane_of(const Operand& operand, std::int64_t sample, std::int64_t channel) {
  return static_cast<const T*>(operand.data) + sample * operand.sample_stride +
         channel * operand.channel_stride;
}
template <class T>
inline T* output_of(const Operand& operand, std::int64_t sample, std::int64_t channel) {
  return const_cast<T*>(plane_of<T>(operand, sample, channel));
}

/// Bytes of the activation mask bits of a vector, or of its first n lanes.
inline unsigned load_bits(const std::uint8_t* from, std::int64_t n = kFloatLanes) {
  return kFloatLanes == 16 && n > 8 ? from[0] | static_cast<unsigned>(from[1]) << 8 : from[0];
}
inline void store_bits(std::uint8_t* to, unsigned bits, std::int64_t n = kFloatLanes) {
  to[0] = static_cast<std::uint8_t>(bits);
  if (kFloatLanes == 16 && n > 8) {
    to[1] = static_cast<std::uint8_t>(bits >> 8);
  }
}

struct ActivationV {
  explicit ActivationV(const ActivationConstants& k)
      : slope(broadcast(k.negative_slope)), zero(broadcast(0.0f)), relu(mask_of(k.relu)) {}
  /// Where the gradient passes unchanged: v > 0, and for relu also where v is NaN.
  MaskV passes(FloatV v) const { return is_positive(v) | (is_nan(v) & relu); }
  FloatV value(FloatV v, MaskV passing) const {
    return select(passing, v, select(relu, zero, v * slope));
  }
  template <class T>
  FloatV gradient(FloatV dy, MaskV passing, T type) const {
    return select(passing, dy, select(relu, zero, rounded(dy * slope, type)));
  }
  FloatV slope;
  FloatV zero;
  MaskV relu;
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

constexpr std::int64_t kElementsAhead = 1024;  // bytes, as kSumsAhead

/// Whole vectors (n == kFloatLanes) or the first n lanes at index i.
template <class T, class Pass, bool kStream, bool kWhole>
inline void map_vector(const T* x, const T* other, T* out, std::uint8_t* activation_mask,
                       std::int64_t i, std::int64_t n, const typename Pass::Constants& k,
                       const ActivationV& activation) {
  const FloatV a = kWhole ? load(x + i) : load_partial(x + i, n);
  const FloatV b = !Pass::kOther ? a : kWhole ? load(other + i) : load_partial(other + i, n);
  unsigned bits =
      Pass::kActivationMask == ActivationMaskUse::kRead ? load_bits(activation_mask + i / 8, n) : 0;
  const FloatV result = Pass::apply(a, b, k, activation, bits, T{});
  if (Pass::kActivationMask == ActivationMaskUse::kWrite && activation_mask != nullptr) {
    store_bits(activation_mask + i / 8, bits, n);
  }
  if (!kWhole) {
    store_partial(out + i, result, n);
  } else if (kStream) {
    stream(out + i, result);
  } else {
    store(out + i, result);
  }
}

/// `count` contiguous elements with the same constants.
template <class T, class Pass, bool kStream>
inline void map_contiguous(const T* x, const T* other, T* out, std::uint8_t* activation_mask,
                           std::int64_t count, const typename Pass::Constants& k,
                           const ActivationV& activation) {
  std::int64_t i = 0;
  if (kStream) {  // up to an aligned address first
    constexpr std::uintptr_t kAlignment = kFloatLanes * sizeof(T);
    const auto past = reinterpret_cast<std::uintptr_t>(out) % kAlignment / sizeof(T);
    if (past != 0 &&
        activation_mask != nullptr) {  // vectors have to begin at a byte of the activation mask
      map_contiguous<T, Pass, false>(x, other, out, activation_mask, count, k, activation);
      return;
    }
    if (past != 0) {
      i = minimum(count, kFloatLanes - static_cast<std::int64_t>(past));
      map_vector<T, Pass, kStream, false>(x, other, out, activation_mask, 0, i, k, activation);
    }
  }
#pragma GCC unroll 2
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    prefetch(reinterpret_cast<const char*>(x + i) + kElementsAhead);
    if (Pass::kOther) {
      prefetch(reinterpret_cast<const char*>(other + i) + kElementsAhead);
    }
    map_vector<T, Pass, kStream, true>(x, other, out, activation_mask, i, kFloatLanes, k,
                                       activation);
  }
  if (i < count) {
    map_vector<T, Pass, kStream, false>(x, other, out, activation_mask, i, count - i, k,
                                        activation);
  }
}

/// A row of neighbouring channels.
template <class T, class Pass, bool kStream>
inline void map_row(const T* x, const T* other, T* out, std::uint8_t* activation_mask,
                    std::int64_t channels, const ElementConstants& constants,
                    const ActivationV& activation) {
  std::int64_t c = 0;
  const auto constants_here = [&](const float* array) { return load(array + c); };
  for (; c + kFloatLanes <= channels; c += kFloatLanes) {
    map_vector<T, Pass, kStream, true>(x, other, out, activation_mask, c, kFloatLanes,
                                       Pass::constants(constants, constants_here), activation);
  }
  if (c < channels) {
    map_vector<T, Pass, kStream, false>(x, other, out, activation_mask, c, channels - c,
                                        Pass::constants(constants, constants_here), activation);
  }
}

inline std::uint8_t* mask_run(const ActivationMaskOperand& activation_mask, std::int64_t sample,
                              std::int64_t run) {
  return activation_mask.data == nullptr
             ? nullptr
             : activation_mask.data + sample * activation_mask.sample_bytes +
                   run * activation_mask.run_bytes;
}

// Both walk backwards: what the sums read last is still in a cache.

template <class T, class Pass, bool kStream>
void map_planes(const ElementsTask& task) {
  const ActivationV activation(task.activation);
  const std::int64_t blocks = (task.plane + kElementBlock - 1) / kElementBlock;
  for (std::int64_t item = task.end; item-- > task.begin;) {
    const std::int64_t channel = item / blocks % task.channels;
    const std::int64_t sample = item / blocks / task.channels;
    const std::int64_t offset = item % blocks * kElementBlock;
    const std::int64_t count = minimum(kElementBlock, task.plane - offset);
    const T* x = plane_of<T>(task.x, sample, channel) + offset;
    const T* other = Pass::kOther ? plane_of<T>(task.other, sample, channel) + offset : x;
    T* out = output_of<T>(task.out, sample, channel) + offset;
    std::uint8_t* activation_mask = mask_run(task.activation_mask, sample, channel);
    const auto k = Pass::constants(task.constants,
                                   [&](const float* array) { return broadcast(array[channel]); });
    map_contiguous<T, Pass, kStream>(
        x, other, out, activation_mask == nullptr ? activation_mask : activation_mask + offset / 8,
        count, k, activation);
    if (task.mask != nullptr) {  // while the block is in a cache
      keep_counting(out, out, task.mask + sample * task.plane + offset, count);
    }
  }
  if (kStream) {
    _mm_sfence();
  }
}

template <class T, class Pass, bool kStream>
void map_rows(const ElementsTask& task) {
  const ActivationV activation(task.activation);
  // Streaming needs every vector of every row aligned.
  constexpr std::int64_t kAlignment = kFloatLanes * static_cast<std::int64_t>(sizeof(T));
  const bool aligned =
      kStream && reinterpret_cast<std::uintptr_t>(task.out.data) % kAlignment == 0 &&
      task.out.element_stride % kFloatLanes == 0 && task.out.sample_stride % kFloatLanes == 0;
  for (std::int64_t item = task.end; item-- > task.begin;) {
    const std::int64_t sample = item / task.plane;
    const std::int64_t e = item % task.plane;
    const T* x = plane_of<T>(task.x, sample, 0) + e * task.x.element_stride;
    const T* other =
        Pass::kOther ? plane_of<T>(task.other, sample, 0) + e * task.other.element_stride : x;
    T* out = output_of<T>(task.out, sample, 0) + e * task.out.element_stride;
    std::uint8_t* activation_mask = mask_run(task.activation_mask, sample, e);
    if (task.mask != nullptr && task.mask[item] == 0) {
      clear(out, task.channels);
    } else if (aligned) {
      map_row<T, Pass, true>(x, other, out, activation_mask, task.channels, task.constants,
                             activation);
    } else {
      map_row<T, Pass, false>(x, other, out, activation_mask, task.channels, task.constants,
                              activation);
    }
  }
  if (kStream) {
    _mm_sfence();
  }
}
