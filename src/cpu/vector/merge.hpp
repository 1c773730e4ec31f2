// SPDX-License-Identifier: Apache-2.0
// Merging partials into the windows of their channels, over the vector type of one level. Included
// inside a level file's unnamed namespace, before sums.hpp; the rules of elements.hpp
// hold here too.

/// Partials split into the two limbs of windows, and which of them fit.
struct Split {
  DoubleV high;
  DoubleV low;
  unsigned fits;
};
constexpr unsigned kAllFit = (1u << kDoubleLanes) - 1;

inline Split split(DoubleV p, DoubleV magic_high, DoubleV magic_low, DoubleV bound) {
  Split s;
  s.high = p + magic_high;
  const DoubleV rest = p - (s.high - magic_high);
  s.low = rest + magic_low;
  s.fits = less_and_equal(magnitude(p), bound, s.low - magic_low, rest);
  return s;
}

/// Hands over the partials that do not fit and takes them out of p.
__attribute__((noinline)) DoubleV push_outside(Windows& windows, std::int64_t channel, int step,
                                               int sum, DoubleV p, unsigned fits) {
  alignas(64) double values[kDoubleLanes];
  store_double(values, p);
  for (int i = 0; i < kDoubleLanes; ++i) {
    if ((fits >> i & 1) == 0) {
      add_outside_window(windows, channel + i * step, sum, values[i]);
      values[i] = 0.0;
    }
  }
  return load_double(values);
}

/// Merges one partial of each of kDoubleLanes neighbouring channels.
SYNCBN_INLINE void merge_channels(Windows& windows, const WindowArrays& w, std::int64_t channel,
                                  int sum, DoubleV p) {
  while (true) {
    const DoubleV magic_high = load_double(w.magic_high[sum] + channel);
    const DoubleV magic_low = load_double(w.magic_low[sum] + channel);
    const Split s = split(p, magic_high, magic_low, load_double(w.bound[sum] + channel));
    if (__builtin_expect(static_cast<long>(s.fits == kAllFit), 1) != 0) {
      add_difference(w.high[sum] + channel, s.high, magic_high);
      add_difference(w.low[sum] + channel, s.low, magic_low);
      return;
    }
    p = push_outside(windows, channel, 1, sum, p, s.fits);
  }
}

/// What partials of one channel add to the limbs of its window, in parts.
struct Limbs {
  alignas(64) std::int64_t high[kDoubleLanes] = {};
  alignas(64) std::int64_t low[kDoubleLanes] = {};

  /// Before the window may move.
  void move_to(const WindowArrays& w, std::int64_t channel, int sum) {
    std::int64_t all_high = 0;
    std::int64_t all_low = 0;
    for (int i = 0; i < kDoubleLanes; ++i) {
      all_high += high[i];
      all_low += low[i];
    }
    w.high[sum][channel] += all_high;
    w.low[sum][channel] += all_low;
    *this = {};
  }
};

/// Merges kDoubleLanes partials of one channel.
SYNCBN_INLINE void merge_segments(Windows& windows, const WindowArrays& w, std::int64_t channel,
                                  int sum, DoubleV p, Limbs& limbs) {
  while (true) {
    const DoubleV magic_high = broadcast(w.magic_high[sum][channel]);
    const DoubleV magic_low = broadcast(w.magic_low[sum][channel]);
    const Split s = split(p, magic_high, magic_low, broadcast(w.bound[sum][channel]));
    if (__builtin_expect(static_cast<long>(s.fits == kAllFit), 1) != 0) {
      add_difference(limbs.high, s.high, magic_high);
      add_difference(limbs.low, s.low, magic_low);
      return;
    }
    limbs.move_to(w, channel, sum);
    p = push_outside(windows, channel, 0, sum, p, s.fits);
  }
}

/// Adds 2 * kDoubleLanes elements u, and u*v (or u*u), to both sums, in load_pair's order; of the
/// first n of them unless kWhole.
template <class T, bool kProduct, bool kWhole>
SYNCBN_INLINE void add_pair(const T* u, const T* v, std::int64_t n, DoubleV* first,
                            DoubleV* second) {
  const auto load = [n](const T* p, DoubleV(&to)[2]) __attribute__((always_inline)) {
    kWhole ? load_pair(p, to[0], to[1]) : load_pair_partial(p, n, to[0], to[1]);
  };
  DoubleV x[2];
  load(u, x);
  DoubleV y[2] = {x[0], x[1]};
  if (kProduct) {
    load(v, y);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    first[i] = first[i] + x[i];
    second[i] = fused(x[i], y[i], second[i]);
  }
}
