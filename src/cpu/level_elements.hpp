// The element-wise passes over the vector type of one level. Included inside a level file's unnamed
// namespace, after level_sums.hpp.

/// Channel constants of the vector lanes at hand.
struct NormalizeConstantsV {
  FloatV mean_high, mean_low, c1, c3;
};
struct GradientConstantsV {
  FloatV mean_high, mean_low, c1, c2, c3, power;
};

struct Normalize {
  using Constants = NormalizeConstantsV;
  static constexpr bool kNeedsGradient = false;
  template <class Get>
  static Constants constants(const ElementConstants& k, const Get& get) {
    return {get(k.mean_high), get(k.mean_low), get(k.c1), get(k.c3)};
  }
  static FloatV apply(FloatV x, FloatV, const Constants& k) {
    return fused(k.c1, (x - k.mean_high) - k.mean_low, k.c3);
  }
};

struct InputGradient {
  using Constants = GradientConstantsV;
  static constexpr bool kNeedsGradient = true;
  template <class Get>
  static Constants constants(const ElementConstants& k, const Get& get) {
    return {get(k.mean_high), get(k.mean_low), get(k.c1), get(k.c2), get(k.c3), get(k.power)};
  }
  static FloatV apply(FloatV x, FloatV dy, const Constants& k) {
    const FloatV t = (x - k.mean_high) - k.mean_low;
    return fused(k.c1, dy, fused(k.c2, t * k.power, k.c3));
  }
};

constexpr std::int64_t kElementsAhead = 1024;  // bytes, as kSumsAhead

/// `count` contiguous elements with the same constants.
template <class T, class Pass, bool kStream>
inline void map_contiguous(const T* x, const T* dy, T* out, std::int64_t count,
                           const typename Pass::Constants& k) {
  std::int64_t i = 0;
  const auto partial = [&](std::int64_t n) {
    const FloatV a = load_partial(x + i, n);
    const FloatV b = Pass::kNeedsGradient ? load_partial(dy + i, n) : a;
    store_partial(out + i, Pass::apply(a, b, k), n);
    i += n;
  };
  if (kStream) {  // up to an aligned address first
    constexpr std::uintptr_t kAlignment = kFloatLanes * sizeof(T);
    const auto past = reinterpret_cast<std::uintptr_t>(out) % kAlignment / sizeof(T);
    if (past != 0) {
      partial(minimum(count, kFloatLanes - static_cast<std::int64_t>(past)));
    }
  }
#pragma GCC unroll 2
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    prefetch(reinterpret_cast<const char*>(x + i) + kElementsAhead);
    if (Pass::kNeedsGradient) {
      prefetch(reinterpret_cast<const char*>(dy + i) + kElementsAhead);
    }
    const FloatV a = load(x + i);
    const FloatV b = Pass::kNeedsGradient ? load(dy + i) : a;
    const FloatV result = Pass::apply(a, b, k);
    if (kStream) {
      stream(out + i, result);
    } else {
      store(out + i, result);
    }
  }
  if (i < count) {
    partial(count - i);
  }
}

// Both walk backwards: what the sums read last is still in a cache.

template <class T, class Pass, bool kStream>
void map_planes(const ElementsTask& task) {
  const std::int64_t blocks = (task.plane + kElementBlock - 1) / kElementBlock;
  for (std::int64_t item = task.end; item-- > task.begin;) {
    const std::int64_t channel = item / blocks % task.channels;
    const std::int64_t sample = item / blocks / task.channels;
    const std::int64_t offset = item % blocks * kElementBlock;
    const T* x = plane_of<T>(task.x, sample, channel) + offset;
    const T* dy = Pass::kNeedsGradient ? plane_of<T>(task.dy, sample, channel) + offset : x;
    T* out = const_cast<T*>(plane_of<T>(task.out, sample, channel)) + offset;
    const auto k = Pass::constants(task.constants,
                                   [&](const float* array) { return broadcast(array[channel]); });
    map_contiguous<T, Pass, kStream>(x, dy, out, minimum(kElementBlock, task.plane - offset), k);
  }
  if (kStream) {
    _mm_sfence();
  }
}

template <class T, class Pass, bool kStream>
void map_rows(const ElementsTask& task) {
  // Streaming needs every vector of every row aligned.
  constexpr std::int64_t kAlignment = kFloatLanes * static_cast<std::int64_t>(sizeof(T));
  const bool aligned =
      kStream && reinterpret_cast<std::uintptr_t>(task.out.data) % kAlignment == 0 &&
      task.out.element_stride % kFloatLanes == 0 && task.out.sample_stride % kFloatLanes == 0;
  for (std::int64_t item = task.end; item-- > task.begin;) {
    const std::int64_t sample = item / task.plane;
    const std::int64_t e = item % task.plane;
    const T* x = plane_of<T>(task.x, sample, 0) + e * task.x.element_stride;
    const T* dy =
        Pass::kNeedsGradient ? plane_of<T>(task.dy, sample, 0) + e * task.dy.element_stride : x;
    T* out = const_cast<T*>(plane_of<T>(task.out, sample, 0)) + e * task.out.element_stride;
    std::int64_t c = 0;
    for (; c + kFloatLanes <= task.channels; c += kFloatLanes) {
      const auto k =
          Pass::constants(task.constants, [&](const float* array) { return load(array + c); });
      const FloatV a = load(x + c);
      const FloatV b = Pass::kNeedsGradient ? load(dy + c) : a;
      const FloatV result = Pass::apply(a, b, k);
      if (aligned) {
        stream(out + c, result);
      } else {
        store(out + c, result);
      }
    }
    if (c < task.channels) {
      const std::int64_t left = task.channels - c;
      const auto k =
          Pass::constants(task.constants, [&](const float* array) { return load(array + c); });
      const FloatV a = load_partial(x + c, left);
      const FloatV b = Pass::kNeedsGradient ? load_partial(dy + c, left) : a;
      store_partial(out + c, Pass::apply(a, b, k), left);
    }
  }
  if (kStream) {
    _mm_sfence();
  }
}
