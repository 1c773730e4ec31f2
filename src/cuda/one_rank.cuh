// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/element_passes.cuh"
#include "cuda/running.cuh"
#include "cuda/sums.cuh"
#include "cuda/warp_finalize.cuh"

// A whole direction of a plain step of one rank, in one kernel whose blocks all run at once: each
// adds up its share of the tensor and keeps it in shared memory, the last one done with a channel
// finalizes it, all wait for each other, and each writes what becomes of its share. So memory is
// read once.
namespace syncbn::cuda {

struct OneRankArguments {
  SumsArguments sums;
  ElementArguments elements;
  std::int64_t* meeting = nullptr;  ///< kMeetingWords, zero before and after
  unsigned tile_at = 0;             ///< bytes of shared memory before the tile
  // Forward:
  double* mean = nullptr;
  double* var = nullptr;
  double* rstd = nullptr;
  std::int64_t* info = nullptr;
  double eps = 0;
  RunningArrays running;
  double momentum = 0;
  // Backward:
  const std::int64_t* forward_info = nullptr;
  ChannelArray weight;
  double* coefficients = nullptr;
  ChannelArray dweight;
  ChannelArray dbias;
};

/// Waits for all blocks, which run at once: what they wrote before is there after.
SYNCBN_DEVICE void meet_grid(std::int64_t* meeting) {
  device::block_barrier();  // the block's writes are done
  if (device::thread_index() == 0) {
    const std::int64_t blocks = device::grid_size();
    device::atomic_hand_over(meeting, 1);
    while (device::load_acquire(meeting) < blocks) {
    }
    if (device::atomic_hand_over(meeting + 1, 1) + 1 == blocks) {  // all have seen the others
      meeting[0] = 0;
      meeting[1] = 0;
    }
  }
  device::block_barrier();  // so are those of the others
}

/// A thread's vectors, in the order in which it takes them. They lie as many bytes apart as the
/// block's threads take together, so that no bank is met twice.
template <class T, int kVector, bool kGradient>
class Tile {
 public:
  using Vectors = device::Vector<T, kVector>;
  static constexpr unsigned kInputs = kGradient ? 2 : 1;

  SYNCBN_DEVICE explicit Tile(unsigned at)
      : first_(reinterpret_cast<Vectors*>(device::shared<unsigned char>() + at) +
               device::thread_index()),
        next_(first_) {}
  SYNCBN_DEVICE void keep(const Vectors& u, const Vectors& v) {
    *step() = u;
    if constexpr (kGradient) {
      *step() = v;
    }
  }
  SYNCBN_DEVICE void rewind() { next_ = first_; }
  SYNCBN_DEVICE void take(Vectors& u, Vectors& v) {
    u = *step();
    v = u;
    if constexpr (kGradient) {
      v = *step();
    }
  }

 private:
  SYNCBN_DEVICE Vectors* step() {
    Vectors* const now = next_;
    next_ += device::block_size();
    return now;
  }
  Vectors* first_;
  Vectors* next_;
};

/// What the kernel does besides adding up: keeps the tile, and finalizes.
template <class T, int kVector, bool kGradient, unsigned kPackers>
struct OneRank {
  /// A block that shares a channel has no other, and packed() begins with a barrier.
  static constexpr bool kGoesOn = false;

  const OneRankArguments& a;
  Tile<T, kVector, kGradient> tile;

  SYNCBN_DEVICE explicit OneRank(const OneRankArguments& arguments)
      : a(arguments), tile(arguments.tile_at) {}
  template <class Vectors>
  SYNCBN_DEVICE void keep(const Vectors& u, const Vectors& v) {
    tile.keep(u, v);
  }
  SYNCBN_DEVICE void packed(std::int64_t c0, unsigned channels) {
    kPackers == device::kWarp ? device::warp_barrier()
                              : device::block_barrier();  // words are there
    constexpr unsigned kAtOnce = kPackers / kDigitThreads;
    const unsigned thread = device::thread_index() % kPackers;
    for (unsigned first = 0; first < channels; first += kAtOnce) {
      const unsigned i = first + thread / kDigitThreads;
      const std::int64_t c = c0 + (i < channels ? i : channels - 1);
      const bool writes = i < channels && thread % kDigitThreads == 0;
      kGradient ? finalize_gradients(c, writes) : finalize_moments(c, writes);
    }
  }

 private:
  SYNCBN_DEVICE const std::int64_t* words(std::int64_t c) const {
    return a.sums.message + kHeaderWords + c * FormatTraits<T>::kWords;
  }
  SYNCBN_DEVICE void finalize_moments(std::int64_t c, bool writes) const {
    const std::int64_t count = a.sums.header.count;
    const ChannelMoments moments = finalize_channel_by_digits<T>(words(c), count, a.eps);
    if (!writes) {
      return;
    }
    a.mean[c] = moments.mean;
    a.var[c] = moments.var;
    a.rstd[c] = moments.rstd;
    a.running.update(c, moments.mean, moments.var, count, a.momentum);
    if (c == 0) {
      a.info[0] = count;
      a.info[1] = a.sums.message[kHeaderFingerprint];
      a.running.count_call(count);
    }
  }
  SYNCBN_DEVICE void finalize_gradients(std::int64_t c, bool writes) const {
    const AffineArrays& affine = a.elements.pullback.affine;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const std::int64_t count = a.sums.header.count;
    ChannelGradients gradients =
        finalize_channel_gradients_by_digits<T>(words(c), affine.mean[c], affine.rstd[c]);
    if (a.forward_info[0] != count) {  // a forward over other ranks
      gradients = {nan, nan, nan, nan, true};
    }
    if (writes) {
      store_coefficients(coefficients_of(gradients, a.weight.get(c), affine.rstd[c], count),
                         a.coefficients, c, a.sums.channels);
      a.dweight.set(c, gradients.dweight);
      a.dbias.set(c, gradients.dbias);
    }
  }
};

/// The pass's result for a vector of the tile. u has come back through the activation already;
/// coming back a second time changes nothing.
template <class Pass, class T, int kVector, class Kept>
SYNCBN_DEVICE void write_next(const ElementArguments& a, const ActivationOf<T>& activation,
                              const typename Pass::Channel* channels, bool one_channel, Kept& kept,
                              T* out) {
  device::Vector<T, kVector> us;
  device::Vector<T, kVector> vs;
  kept.take(us, vs);
  SYNCBN_UNROLL(8)
  for (int k = 0; k < kVector; ++k) {
    bool passes = false;
    us.at[k] =
        Pass::apply(a, activation, channels[one_channel ? 0 : k], 0, vs.at[k], us.at[k], passes);
  }
  device::store_vector(out, us);
}

/// The options of the sums: forward's have no activation.
template <bool kGradient, class Options>
using SumOptions = std::conditional_t<kGradient, Options, Plain<NotPositive::kKept>>;

/// Contiguous planes, as add_planes takes them.
template <class Pass, class T, bool kGradient>
SYNCBN_KERNEL_OF(kPlaneSumThreads, 6)
one_rank_planes(const OneRankArguments all) {
  constexpr int kVector = kWidest<T>;
  constexpr unsigned kThreads = kLanes / kVector;
  constexpr unsigned kGroups = device::kWarp / kThreads;
  const SumsArguments& a = all.sums;
  OneRank<T, kVector, kGradient, device::kWarp> also(all);
  add_planes<T, kVector, kGradient, false, SumOptions<kGradient, typename Pass::Options>>(a, also);
  meet_grid(all.meeting);
  also.tile.rewind();
  const auto activation = activation_of<T, typename Pass::Options>(a.pullback.activation);
  const unsigned lane = device::thread_index() % device::kWarp;
  const unsigned member = lane % kThreads;
  const std::int64_t warps = device::block_size() / device::kWarp;
  for (std::int64_t job = device::block_index() * warps + device::thread_index() / device::kWarp;
       job < a.jobs; job += device::grid_size() * warps) {
    const SumsJob my(a, job);
    const typename Pass::Channel channel(all.elements, my.channel);
    SegmentOf<true> segment(a, my.begin + lane / kThreads);
    for (std::int64_t unit = my.begin + lane / kThreads; unit < my.end; unit += kGroups) {
      const int length = segment.length;
      T* const out = all.elements.out.at<T>(segment.n, my.channel) + segment.e;
      segment.advance(kGroups);
      SYNCBN_UNROLL(4)
      for (int i = static_cast<int>(member) * kVector; i < length; i += kLanes) {
        write_next<Pass, T, kVector>(all.elements, activation, &channel, true, also.tile, out + i);
      }
    }
  }
}

/// Neighbouring channels side by side, as add_rows takes them.
template <class Pass, class T, bool kGradient, int kVector>
SYNCBN_KERNEL_OF(kLanes* kRowColumns<kVector>, 3)
one_rank_rows(const OneRankArguments all) {
  constexpr int kColumns = kRowColumns<kVector>;
  const SumsArguments& a = all.sums;
  OneRank<T, kVector, kGradient, kLanes * kRowColumns<kVector>> also(all);
  add_rows<T, kVector, kGradient, SumOptions<kGradient, typename Pass::Options>>(a, also);
  meet_grid(all.meeting);
  also.tile.rewind();
  const auto activation = activation_of<T, typename Pass::Options>(a.pullback.activation);
  const int lane = static_cast<int>(device::thread_index()) / kColumns;
  for (std::int64_t job = device::block_index(); job < a.jobs; job += device::grid_size()) {
    const SumsJob my(a, job);
    const std::int64_t c = (my.channel * kColumns + device::thread_index() % kColumns) * kVector;
    if (c >= a.channels) {
      continue;
    }
    typename Pass::Channel channels[kVector];
    SYNCBN_UNROLL(8)
    for (int k = 0; k < kVector; ++k) {
      channels[k] = typename Pass::Channel(all.elements, c + k);
    }
    SegmentOf<false> segment(a, my.begin);
    for (std::int64_t unit = my.begin; unit < my.end; ++unit) {
      const int length = segment.length;
      const std::int64_t stride = all.elements.out.element_stride;
      T* const out = all.elements.out.at<T>(segment.n, 0) + segment.e * stride + c;
      segment.advance();
      SYNCBN_UNROLL(4)
      for (int i = lane; i < length; i += kLanes) {
        write_next<Pass, T, kVector>(all.elements, activation, channels, false, also.tile,
                                     out + i * stride);
      }
    }
  }
}

}  // namespace syncbn::cuda
