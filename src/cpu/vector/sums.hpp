// SPDX-License-Identifier: Apache-2.0
// The sums of planes over the vector type of one level. Included inside a level file's unnamed
// namespace, after single_rows.hpp and elements.hpp, whose rules hold here too.

constexpr int kParts = kLanes / kDoubleLanes;

// How far ahead contiguous passes ask for memory, in bytes: one core's hardware prefetchers stop at
// every page. Further for two tensors, and lines were gone from the first cache before their use.
constexpr std::int64_t kSumsAhead = 8192;
constexpr std::int64_t kProductsAhead = 6144;

/// Lane sums of one contiguous segment, folded to a vector. kProduct: second = u*v, else u*u.
template <class T, bool kProduct>
SYNCBN_INLINE void sum_segment(const T* u, const T* v, std::int64_t length, DoubleV& first,
                               DoubleV& second) {
  constexpr std::int64_t kAhead = kProduct ? kProductsAhead : kSumsAhead;
  DoubleV a[kParts];
  DoubleV b[kParts];
  for (int p = 0; p < kParts; ++p) {
    a[p] = zero_double();
    b[p] = zero_double();
  }
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) {
    prefetch(reinterpret_cast<const char*>(u + i) + kAhead);
    if (kProduct) {
      prefetch(reinterpret_cast<const char*>(v + i) + kAhead);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kParts; p += 2) {
      const std::int64_t at = i + p * kDoubleLanes;
      add_pair<T, kProduct, true>(u + at, v + at, 0, a + p, b + p);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kParts; p += 2) {
    const std::int64_t at = i + p * kDoubleLanes;
    if (at < length) {
      add_pair<T, kProduct, false>(u + at, v + at, length - at, a + p, b + p);
    }
    in_order(a[p], a[p + 1], T{});
    in_order(b[p], b[p + 1], T{});
  }
  first = fold_segment(a);
  second = fold_segment(b);
}

/// Both sums of kDoubleLanes segments, each in the lanes that are left of it.
struct Partials {
  DoubleV first[kDoubleLanes];
  DoubleV second[kDoubleLanes];
  void clear_from(std::int64_t begin) {
#pragma GCC unroll 8  // or GCC makes it a string instruction, which is slow to begin
    for (int i = 0; i < kDoubleLanes; ++i) {
      if (i >= begin) {
        first[i] = zero_double();
        second[i] = zero_double();
      }
    }
  }
};

template <int>
struct Count {};

template <class T, SumsOf kOf>
void sum_planes(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  const std::int64_t segments = (task.plane + kSegment - 1) / kSegment;
  std::int64_t unit = task.unit_begin;
  while (unit < task.unit_end) {
    const std::int64_t sample = unit / segments;
    const std::int64_t begin = unit % segments;
    const std::int64_t end = minimum(segments, begin + task.unit_end - unit);
    unit += end - begin;
    const auto sum_one = [&](std::int64_t channel, std::int64_t segment, Partials& to,
                             std::int64_t i) __attribute__((always_inline)) {
      const std::int64_t offset = segment * kSegment;
      const std::int64_t length = minimum(kSegment, task.plane - offset);
      const T* u = plane_of<T>(task.u, sample, channel) + offset;
      const T* v = kOf == SumsOf::kSquare || kOf == SumsOf::kMasked
                       ? u
                       : plane_of<T>(task.v, sample, channel) + offset;
      if (kOf == SumsOf::kActivated) {
        alignas(64) T buffer[kSegment];
        std::uint8_t* activation_mask = mask_run(task.activation_mask, sample, channel);
        T* target =
            task.out.data == nullptr ? buffer : output_of<T>(task.out, sample, channel) + offset;
        pull_segment(task, u, v, target,
                     activation_mask == nullptr ? activation_mask : activation_mask + offset / 8,
                     length, channel);
        sum_segment<T, true>(target, v, length, to.first[i], to.second[i]);
      } else if (kOf == SumsOf::kMasked) {
        alignas(64) T kept[2][kSegment];
        const bool square = task.v.data == nullptr;
        v = square ? u : plane_of<T>(task.v, sample, channel) + offset;
        if (task.constants != nullptr ||
            !all_count(task.mask + sample * task.plane + offset, length)) {
          keep_segment(task, sample, channel, offset, length, kept[0], kept[1]);
          u = kept[0];
          v = kept[square ? 0 : 1];
        }
        sum_segment<T, true>(u, v, length, to.first[i], to.second[i]);
      } else {
        sum_segment<T, kOf == SumsOf::kProduct>(u, v, length, to.first[i], to.second[i]);
      }
      if (task.meanwhile != nullptr) {
        const auto step = [&](const char* next_u, const char* next_v) {
          task.meanwhile->step(task.meanwhile->state, length, next_u, next_v);
        };
        if constexpr (kOf == SumsOf::kProduct || kOf == SumsOf::kActivated) {
          step(reinterpret_cast<const char*>(u + length) + kProductsAhead,
               reinterpret_cast<const char*>(v + length) + kProductsAhead);
        } else {
          step(nullptr, nullptr);  // one tensor is there in time
        }
      }
    };
    // The same segment of several channels at a time, read in the order of memory.
    const auto sum_channels = [&]<int kSegments>(Count<kSegments>) {
      for (std::int64_t c = 0; c < task.channels; c += kDoubleLanes) {
        Partials partials[kSegments];
        const std::int64_t some = minimum(kDoubleLanes, task.channels - c);
        for (std::int64_t i = 0; i < some; ++i) {
          for (int s = 0; s < kSegments; ++s) {
            sum_one(c + i, begin + s, partials[s], i);
          }
        }
        for (Partials& all : partials) {
          all.clear_from(some);
          merge_channels(windows, w, c, 0, fold_segments(all.first));
          merge_channels(windows, w, c, 1, fold_segments(all.second));
        }
      }
    };
    if (segments <= 2) {
      end - begin == 1 ? sum_channels(Count<1>()) : sum_channels(Count<2>());
      continue;
    }
    for (std::int64_t c = 0; c < task.channels; ++c) {
      Limbs limbs[2];
      for (std::int64_t s = begin; s < end; s += kDoubleLanes) {
        Partials all;
        const std::int64_t some = minimum(kDoubleLanes, end - s);
        all.clear_from(some);
        for (std::int64_t i = 0; i < some; ++i) {
          sum_one(c, s + i, all, i);
        }
        merge_segments(windows, w, c, 0, fold_segments(all.first), limbs[0]);
        merge_segments(windows, w, c, 1, fold_segments(all.second), limbs[1]);
      }
      limbs[0].move_to(w, c, 0);
      limbs[1].move_to(w, c, 1);
    }
  }
}
