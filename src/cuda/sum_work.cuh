// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "cuda/packing.cuh"
#include "cuda/views.cuh"
#include "cuda/window.cuh"

// Which elements a thread of the sums' kernels takes, and how it loads them.
namespace syncbn::cuda {

/// The units of one channel (or block of channels) that are taken together.
struct SumsJob {
  std::int64_t channel;
  std::int64_t begin;
  std::int64_t end;
  SYNCBN_DEVICE SumsJob(const SumsArguments& a, std::int64_t job)
      : channel(a.jobs_per_channel.quotient(job)),
        begin(a.jobs_per_channel.remainder(job) * a.units_per_job),
        end(begin + a.units_per_job < a.units ? begin + a.units_per_job : a.units) {}
};

/// A segment of a channel. Units of planes are the first segments of all samples, then the second
/// ones, so that threads side by side have equally long ones; units of rows are a sample's
/// segments, then those of the next.
template <bool kPlanes>
class SegmentOf {
 public:
  SYNCBN_DEVICE SegmentOf(const SumsArguments& a, std::int64_t unit)
      : n(kPlanes ? a.samples.remainder(unit) : a.segments.quotient(unit)),
        e((kPlanes ? a.samples.quotient(unit) : a.segments.remainder(unit)) * kSegment),
        samples_(a.samples.value()),
        plane_(a.plane) {
    set_length();
  }
  /// (Without divisions.)
  SYNCBN_DEVICE void advance(unsigned units = 1) {
    if constexpr (kPlanes) {
      for (n += units; n >= samples_; n -= samples_) {
        e += kSegment;
        set_length();
      }
    } else {
      e += kSegment;
      if (e >= plane_) {
        e = 0;
        ++n;
      }
      set_length();
    }
  }

  std::int64_t n;  ///< its sample,
  std::int64_t e;  ///< first element
  int length;      ///< and elements; less than one behind the last segment

 private:
  SYNCBN_DEVICE void set_length() {
    length = plane_ - e < kSegment ? static_cast<int>(plane_ - e) : kSegment;
  }
  std::int64_t samples_;
  std::int64_t plane_;
};

/// Loads kVector elements of u and v, pulls u back and stores it if it is kept. What does not count
/// is zero. element: n * plane + e.
template <class T, int kVector, bool kGradient, class Options>
SYNCBN_DEVICE void load_pair(const SumsArguments& a, const ActivationOf<T>& activation,
                             const ChannelPullback<T>* pullback, bool one_channel,
                             std::int64_t mask_at, std::int64_t element, const T* u, const T* v,
                             T* kept, device::Vector<T, kVector>& us,
                             device::Vector<T, kVector>& vs) {
  us = device::load_vector<kVector>(u);
  vs = us;
  if constexpr (kGradient) {
    vs = device::load_vector<kVector>(v);
    unsigned bits = 0;
    if (!Options::kPlain && a.pullback.mask.data != nullptr) {
      bits = static_cast<unsigned>(a.pullback.mask.data[mask_at / 8]) >> (mask_at % 8);
    }
    SYNCBN_UNROLL(8)
    for (int k = 0; k < kVector; ++k) {
      const ChannelPullback<T>& back = pullback[one_channel ? 0 : k];
      us.at[k] = Options::kPlain ? back.without_mask(activation, us.at[k], vs.at[k])
                                 : back(a.pullback, activation, bits >> k, us.at[k], vs.at[k]);
    }
  }
  if constexpr (Options::kPlain) {
    return;
  }
  if (a.counts != nullptr) {
    const unsigned counted = counted_bits<kVector>(a.counts, element, one_channel);
    SYNCBN_UNROLL(8)
    for (int k = 0; k < kVector; ++k) {
      us.at[k] = (counted >> k & 1u) != 0 ? us.at[k] : T{};
      vs.at[k] = (counted >> k & 1u) != 0 ? vs.at[k] : T{};
    }
  }
  if (kGradient && kept != nullptr) {
    device::store_vector(kept, us);
  }
}

/// Adds the elements of a job's share that count to the first channel's scratch memory. Which job
/// counts which does not matter: here they are dealt out evenly over units.
template <class T>
SYNCBN_DEVICE void count_elements(const SumsArguments& a, std::int64_t begin, std::int64_t end,
                                  unsigned thread, unsigned threads) {
  const std::int64_t share = a.segments.quotient(a.plane + a.segments.value() - 1);  // of a unit
  const std::int64_t last = end * share < a.header.count ? end * share : a.header.count;
  std::int64_t count = 0;
  for (std::int64_t i = begin * share + thread; i < last; i += threads) {
    count += a.counts[i] != 0;
  }
  if (count != 0) {
    device::atomic_add(a.workspace + ChannelScratch<T>::kCount, count);
  }
}

}  // namespace syncbn::cuda
