// SPDX-License-Identifier: Apache-2.0
// Walks over planes with the passes of elements.hpp, whose rules hold here too.

constexpr std::int64_t kElementsAhead = 1024;  // bytes
constexpr std::int64_t kMapPiece = std::int64_t{64} << 10;

template <class T, class Pass>
using ConstantsOf = typename Pass::template Constants<T>;

/// Whole vectors (n == kLanesOf<T>) or the first n lanes at index i. bits: of the activation mask.
/// Where `counts` has no bit the result is +0.
template <class T, class Pass, bool kStream, bool kWhole>
inline void map_vector(const T* x, const T* other, T* out, std::int64_t i, std::int64_t n,
                       const ConstantsOf<T, Pass>& k, const ActivationV<T>& activation,
                       unsigned& bits, unsigned counts = kAllLanesOf<T>) {
  const VectorOf<T> a = kWhole ? load_lanes(x + i) : load_some_lanes(x + i, n);
  const VectorOf<T> b = !Pass::kOther ? a
                        : kWhole      ? load_lanes(other + i)
                                      : load_some_lanes(other + i, n);
  VectorOf<T> result = Pass::template apply<T>(a, b, k, activation, bits);
  if (counts != kAllLanesOf<T>) {
    result = select(mask_for<T>(counts), result, all_lanes<T>(0.0f));
  }
  if (kWhole) {
    kStream ? stream(out + i, result) : store(out + i, result);
  } else {
    kStream ? stream_some(out + i, result, n) : store_partial(out + i, result, n);
  }
}

/// What goes with one plane, or one row of channels: activation mask and mask, or null.
struct Companions {
  std::uint8_t* bits = nullptr;
  const std::uint8_t* mask = nullptr;
};

/// n lanes from index i on. kWhole: n == kLanesOf<T>, and the companions are those of all lanes.
template <class T, class Pass, bool kStream, bool kWhole>
__attribute__((always_inline)) inline void map_lanes(const T* x, const T* other, T* out,
                                                     const Companions& with, std::int64_t i,
                                                     std::int64_t n, const ConstantsOf<T, Pass>& k,
                                                     const ActivationV<T>& activation) {
  const bool whole_bytes = kWhole && i % 8 == 0;
  unsigned bits = 0;
  if (Pass::kActivationMask == ActivationMaskUse::kRead) {
    bits =
        whole_bytes ? load_whole_bits<kLanesOf<T>>(with.bits + i / 8) : load_bits(with.bits, i, n);
  }
  const unsigned counts = with.mask == nullptr ? kAllLanesOf<T>
                          : kWhole             ? counting_lanes<T>(with.mask + i)
                                               : counting(with.mask + i, n);
  map_vector<T, Pass, kStream, kWhole>(x, other, out, i, n, k, activation, bits, counts);
  if (Pass::kActivationMask == ActivationMaskUse::kWrite && with.bits != nullptr) {
    if (whole_bytes) {
      store_whole_bits<kLanesOf<T>>(with.bits + i / 8, bits);
    } else {
      store_bits(with.bits, i, n, bits);
    }
  }
}

template <class T, class Pass>
inline void ask_ahead(const T* x, const T* other) {
  prefetch(reinterpret_cast<const char*>(x) + kElementsAhead);
  if (Pass::kOther) {
    prefetch(reinterpret_cast<const char*>(other) + kElementsAhead);
  }
}

/// One vector of each tensor that the sums read next.
template <class T>
inline void ask(NextRead& next) {
  constexpr auto kBytes = kLanesOf<T> * static_cast<std::int64_t>(sizeof(T));
  prefetch_second(next.u);
  prefetch_second(next.v);
  next.u += kBytes;
  next.v += kBytes;
}

/// The whole vectors of one plane from element i on that end at `stop` or before; where they end.
template <class T, class Pass, bool kStream, bool kAsks>
inline std::int64_t map_inside(const T* x, const T* other, T* out, const Companions& with,
                               std::int64_t i, std::int64_t stop, const ConstantsOf<T, Pass>& k,
                               const ActivationV<T>& activation, NextRead& next) {
#pragma GCC unroll 2
  for (; i + kLanesOf<T> <= stop; i += kLanesOf<T>) {
    ask_ahead<T, Pass>(x + i, other + i);
    if (kAsks) {
      ask<T>(next);
    }
    map_lanes<T, Pass, kStream, true>(x, other, out, with, i, kLanesOf<T>, k, activation);
  }
  return i;
}

inline std::uint8_t* mask_run(const ActivationMaskOperand& activation_mask, std::int64_t sample,
                              std::int64_t run) {
  return activation_mask.data == nullptr
             ? nullptr
             : activation_mask.data + sample * activation_mask.sample_bytes +
                   run * activation_mask.run_bytes;
}

/// Elements between p and the multiple of kBytes before it.
template <class T, std::size_t kBytes>
inline std::int64_t elements_past(const T* p) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p) % kBytes / sizeof(T));
}

// Both walk backwards in pieces: what the sums read last is still in a cache.

/// The plane at hand of planes that follow each other; elements are counted from the first one's
/// beginning.
struct PlaneAt {
  PlaneAt(const ElementsTask& task, std::int64_t of_sample, std::int64_t of_channel,
          std::int64_t offset)
      : sample(of_sample), channel(of_channel), begin(offset), end(offset + task.plane) {
    find(task);
  }
  void next(const ElementsTask& task) {
    if (++channel == task.channels) {
      channel = 0;
      ++sample;
    }
    begin = end;
    end += task.plane;
    find(task);
  }
  void find(const ElementsTask& task) {
    with.bits = mask_run(task.activation_mask, sample, channel);
    with.mask = task.mask == nullptr ? nullptr : task.mask + sample * task.plane;
  }
  std::int64_t sample;
  std::int64_t channel;
  std::int64_t begin;
  std::int64_t end;
  Companions with;
};

/// Planes that follow each other without gaps, from this one on.
template <class T, class Pass>
struct PlaneRun {
  PlaneRun(const ElementsTask& task, std::int64_t sample, std::int64_t channel)
      : x(plane_of<T>(task.x, sample, channel)),
        other(Pass::kOther ? plane_of<T>(task.other, sample, channel) : x),
        out(output_of<T>(task.out, sample, channel)) {}
  const T* x;
  const T* other;
  T* out;
};

/// Elements [begin, end) of a run, the first of them in the plane `at`. Planes may end inside of
/// vectors, which take each lane's constants then: streamed stores have to be whole, and at
/// multiples of their size.
template <class T, class Pass, bool kStream, bool kAsks>
void map_run(const ElementsTask& task, const PlaneRun<T, Pass>& run, PlaneAt at, std::int64_t begin,
             std::int64_t end, const ActivationV<T>& activation) {
  constexpr bool kReads = Pass::kActivationMask == ActivationMaskUse::kRead;
  const ElementConstants constants = task.constants;
  const bool alone = task.activation_mask.data == nullptr && task.mask == nullptr;
  const auto constants_at = [&](const PlaneAt& plane) {
    return Pass::template constants<T>(
        constants, [&](const float* array) { return all_lanes<T>(array[plane.channel]); });
  };
  NextRead next = task.next;
  if (kAsks &&
      next.u == nullptr) {  // a branch in the loop would cost more than asking for what is there
    next = {reinterpret_cast<const char*>(run.x + begin),
            reinterpret_cast<const char*>(run.other + begin)};
  }
  auto k = constants_at(at);
  for (std::int64_t i = begin; i < end;) {
    if (i == at.end) {
      at.next(task);
      k = constants_at(at);
    }
    const auto past = kStream ? elements_past<T, kLanesOf<T> * sizeof(T)>(run.out + i) : 0;
    if (past == 0) {
      const std::int64_t stop = minimum(end, at.end);
      i = at.begin + map_inside<T, Pass, kStream, kAsks>(run.x + at.begin, run.other + at.begin,
                                                         run.out + at.begin, at.with, i - at.begin,
                                                         stop - at.begin, k, activation, next);
      if (i == stop) {
        continue;
      }
    }
    if (alone && past == 0 && i + kLanesOf<T> <= minimum(end, at.end + task.plane)) {
      // The same as below for a whole vector of two planes and no more.
      const auto mask = mask_for<T>(kAllLanesOf<T> << (at.end - i));
      at.next(task);
      const auto next = constants_at(at);
      unsigned none = 0;
      ask_ahead<T, Pass>(run.x + i, run.other + i);
      map_vector<T, Pass, kStream, true>(run.x, run.other, run.out, i, kLanesOf<T>,
                                         select(mask, next, k), activation, none);
      k = next;
      i += kLanesOf<T>;
      continue;
    }
    // The vector in which this plane ends, with short ones after it, or where the elements do.
    const std::int64_t n = minimum(end - i, kLanesOf<T> - past);
    const PlaneAt before = at;
    unsigned bits = 0;
    unsigned counts = task.mask == nullptr ? kAllLanesOf<T> : 0;
    auto mixed = k;
    const auto for_each_part = [&](PlaneAt& plane, const auto& body) {
      for (std::int64_t lane = 0;;) {
        const std::int64_t e = i + lane - plane.begin;
        const std::int64_t part = minimum(n - lane, task.plane - e);
        body(lane, e, part);
        lane += part;
        if (lane == n) {
          return;
        }
        plane.next(task);
      }
    };
    for_each_part(at, [&](std::int64_t lane, std::int64_t e, std::int64_t part) {
      if (lane > 0) {
        k = constants_at(at);
        mixed = select(mask_for<T>(kAllLanesOf<T> << lane), k, mixed);
      }
      if (kReads) {
        bits |= (load_bits(at.with.bits, e, part) & ((1u << part) - 1)) << lane;
      }
      if (task.mask != nullptr) {
        counts |= counting(at.with.mask + e, part) << lane;
      }
    });
    if (n == kLanesOf<T>) {
      map_vector<T, Pass, kStream, true>(run.x, run.other, run.out, i, n, mixed, activation, bits,
                                         counts);
    } else {
      map_vector<T, Pass, kStream, false>(run.x, run.other, run.out, i, n, mixed, activation, bits,
                                          counts);
    }
    if (Pass::kActivationMask == ActivationMaskUse::kWrite && before.with.bits != nullptr) {
      PlaneAt plane = before;
      for_each_part(plane, [&](std::int64_t lane, std::int64_t e, std::int64_t part) {
        store_bits(plane.with.bits, e, part, bits >> lane);
      });
    }
    i += n;
  }
}

template <class T, class Pass, bool kStream>
void map_planes(const ElementsTask& task) {
  constexpr std::int64_t kPiece = kMapPiece / static_cast<std::int64_t>(sizeof(T));
  const ActivationV<T> activation(task.activation);
  if (task.piecemeal) {
    constexpr bool kAsks = kStream && Pass::kOther;
    map_run<T, Pass, kStream, kAsks>(task, {task, task.sample, task.channel},
                                     {task, task.sample, task.channel, 0}, task.begin, task.end,
                                     activation);
    return;
  }
  const std::int64_t blocks = (task.plane + kElementBlock - 1) / kElementBlock;
  const auto element_of = [&](std::int64_t item) {
    return item / blocks * task.plane + item % blocks * kElementBlock;
  };
  const std::int64_t run_length = task.run * task.plane;
  const std::int64_t first = element_of(task.begin);
  for (std::int64_t end = element_of(task.end); end > first;) {
    const std::int64_t origin = (end - 1) / run_length * run_length;
    const std::int64_t first_plane = origin / task.plane;
    const PlaneRun<T, Pass> run(task, first_plane / task.channels, first_plane % task.channels);
    // Pieces begin at cache lines.
    const std::int64_t past = elements_past<T, kCacheLine>(run.out + (end - origin));
    const std::int64_t begin = maximum(end - kPiece - past, maximum(origin, first));
    const std::int64_t plane = begin / task.plane;
    const PlaneAt at(task, plane / task.channels, plane % task.channels,
                     plane * task.plane - origin);
    map_run<T, Pass, kStream, false>(task, run, at, begin - origin, end - origin, activation);
    end = begin;
  }
  if (kStream) {
    fence_streams();
  }
}
