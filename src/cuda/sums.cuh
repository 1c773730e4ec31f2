// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "cuda/packing.cuh"
#include "cuda/row_sums.cuh"
#include "cuda/sum_work.cuh"
#include "cuda/views.cuh"
#include "cuda/widen.cuh"
#include "cuda/window.cuh"
#include "statistics/lanes.hpp"

// docs/numerics.md, sections 1 and 2: the sums of u and u*v. Forward: u = v = x. Backward: u is dy
// come back through the activation, v = x. Three kernels, by how elements lie in memory.
namespace syncbn::cuda {

inline constexpr unsigned kSumThreads = 256;
/// Of planes, where warps need nothing of each other: small blocks spread over all multiprocessors.
inline constexpr unsigned kPlaneSumThreads = 64;

/// Folds the lanes of a segment that lie on neighbouring threads, kVector lanes each. The result is
/// the first thread's.
template <int kVector, class LaneType>
SYNCBN_DEVICE void fold_threads(LaneType* lanes) {
  SYNCBN_UNROLL(4)
  for (int h = kLanes / 2; h >= 1; h /= 2) {
    if (h < kVector) {
      for (int k = 0; k < h; ++k) {
        lanes[k].fold(lanes[k + h]);
      }
      continue;
    }
    SYNCBN_UNROLL(8)
    for (int k = 0; k < kVector; ++k) {
      LaneType other;
      other.sum = device::shuffle_xor(lanes[k].sum, static_cast<unsigned>(h / kVector));
      if constexpr (LaneType::kPair) {
        other.carry = device::shuffle_xor(lanes[k].carry, static_cast<unsigned>(h / kVector));
      }
      lanes[k].fold(other);
    }
  }
}

template <class LaneType>
SYNCBN_DEVICE LaneType lane_of(const LaneType& lane, unsigned thread) {
  LaneType out;
  out.sum = device::shuffle_index(lane.sum, thread);
  if constexpr (LaneType::kPair) {
    out.carry = device::shuffle_index(lane.carry, thread);
  }
  return out;
}

/// Contiguous planes, or any strides (kStrided). A warp takes kGroups segments of a channel at a
/// time, each on neighbouring threads; its loop is as long as the longest of them. Shared memory:
/// packing_bytes.
template <class T, int kVector, bool kGradient, bool kStrided, class Options = AnyOptions>
SYNCBN_KERNEL(kPlaneSumThreads)
sum_planes(const SumsArguments a) {
  static_assert(!kStrided || kVector == 1);
  using Scratch = ChannelScratch<T>;
  constexpr unsigned kThreads = kLanes / kVector;  // of a segment
  constexpr unsigned kGroups = device::kWarp / kThreads;
  const unsigned lane = device::thread_index() % device::kWarp;
  const unsigned member = lane % kThreads;
  const unsigned warp = device::thread_index() / device::kWarp;
  const unsigned warps = device::block_size() / device::kWarp;
  const auto activation = activation_of<T, Options>(a.pullback.activation);
  for (std::int64_t job = std::int64_t{device::block_index()} * warps + warp; job < a.jobs;
       job += std::int64_t{device::grid_size()} * warps) {
    const SumsJob my(a, job);
    const std::int64_t c = my.channel;
    const Scratch scratch(a.workspace, c);
    PartialSum<T> partial(static_cast<int>(member), scratch);
    if (!Options::kPlain && a.counts != nullptr && c == 0) {
      count_elements<T>(a, my.begin, my.end, lane, device::kWarp);
    }
    ChannelPullback<T> pullback;
    if constexpr (kGradient) {
      pullback = ChannelPullback<T>(a.pullback, c);
    }
    SegmentOf<true> segment(a, my.begin + lane / kThreads);
    for (std::int64_t first = my.begin; first < my.end; first += kGroups) {
      Lane<T> sums[kVector];
      Lane<T> products[kVector];
      if (first + lane / kThreads < my.end) {
        const std::int64_t n = segment.n;
        const std::int64_t e = segment.e;
        const int length = segment.length;
        const T* const u = a.u.at<T>(n, c) + (kStrided ? 0 : e);
        const T* const v = a.v.at<T>(n, c) + (kStrided ? 0 : e);
        T* const kept = Options::kPlain || a.kept.data == nullptr
                            ? nullptr
                            : a.kept.at<T>(n, c) + (kStrided ? 0 : e);
        SYNCBN_UNROLL(device::vectors_ahead(kVector))
        for (int i = static_cast<int>(member) * kVector; i < length; i += kLanes) {
          device::Vector<T, kVector> us;
          device::Vector<T, kVector> vs;
          const std::int64_t u_at = kStrided ? a.u.element(e + i) : i;
          const std::int64_t v_at = kStrided ? a.v.element(e + i) : i;
          const std::int64_t kept_at = kStrided ? a.kept.element(e + i) : i;
          const std::int64_t mask_at = kGradient ? a.pullback.mask.bit(n, c, e + i) : 0;
          load_pair<T, kVector, kGradient, Options>(
              a, activation, &pullback, true, mask_at, n * a.plane + e + i, u + u_at, v + v_at,
              kept == nullptr ? nullptr : kept + kept_at, us, vs);
          SYNCBN_UNROLL(8)
          for (int k = 0; k < kVector; ++k) {
            sums[k].add(as_double(us.at[k]));
            products[k].add_product(as_double(us.at[k]), as_double(vs.at[k]));
          }
        }
      }
      fold_threads<kVector>(sums);
      fold_threads<kVector>(products);
      segment.advance(kGroups);
      const unsigned leader = lane - member;
      partial.add(lane_of(sums[0], leader), lane_of(products[0], leader));
    }
    partial.gather(kThreads);
    partial.finish(scratch);
    device::warp_barrier();  // the whole warp's additions are done
    std::int64_t done = 0;
    if (lane == 0) {
      done = device::atomic_hand_over(scratch.words + Scratch::kDone, 1) + 1;
    }
    device::warp_barrier();  // a shuffle orders no memory
    if (device::shuffle_index(done, 0) == a.jobs_per_channel.value()) {
      pack_channels<T, 1>(a, c, c + 1, 1,
                          device::shared<std::int64_t>() + warp * packing_bytes<T>(1) / 8);
    }
  }
}

/// Threads of a block that takes rows: kLanes times the columns, which read a line of 128 bytes (or
/// of 16-bit gradients 64). Wider blocks are too few for the device where a tensor is small.
template <int kVector>
inline constexpr unsigned kRowColumns = kVector == 1 ? 32 : 8;

/// Channels of a thread: a 16-byte access, in backward of at most 4, or registers would not do.
template <class T, bool kGradient>
inline constexpr int kRowVector = kGradient ? std::min(kWidest<T>, 4) : kWidest<T>;

/// Neighbouring channels lie side by side (channels-last). A thread takes kVector channels and one
/// lane of a segment, which is 512 rows; lanes are folded through shared memory. (With 128
/// registers the gradients of float32 spill on sm_80.)
template <class T, int kVector, bool kGradient, class Options = AnyOptions>
SYNCBN_KERNEL_OF(kLanes* kRowColumns<kVector>, kVector == 1 ? 1 : 3)
sum_rows(const SumsArguments a) {
  constexpr int kColumns = kRowColumns<kVector>;
  constexpr int kWidth = kColumns * kVector;  // channels of a block
  static_assert(kWidth * kPartials<T> <= kLanes * kColumns);
  const int column = static_cast<int>(device::thread_index()) % kColumns;
  const int lane = static_cast<int>(device::thread_index()) / kColumns;
  auto* const staged = device::shared<Lane<T>>();  // [lane][channel]
  const auto activation = activation_of<T, Options>(a.pullback.activation);
  for (std::int64_t job = device::block_index(); job < a.jobs; job += device::grid_size()) {
    const SumsJob my(a, job);
    const std::int64_t c0 = my.channel * kWidth;
    if (!Options::kPlain && a.counts != nullptr && c0 == 0) {
      count_elements<T>(a, my.begin, my.end, device::thread_index(), device::block_size());
    }
    const std::int64_t c = c0 + column * kVector;
    const bool inside = c < a.channels;
    ChannelPullback<T> pullback[kVector];
    if (kGradient && inside) {
      SYNCBN_UNROLL(8)
      for (int k = 0; k < kVector; ++k) {
        pullback[k] = ChannelPullback<T>(a.pullback, c + k);
      }
    }
    // After the fold: which partial of which channel this thread adds up.
    const int mine = static_cast<int>(device::thread_index()) % kWidth;
    const int which = static_cast<int>(device::thread_index()) / kWidth;
    const bool adds = which < kPartials<T> && c0 + mine < a.channels;
    const ChannelScratch<T> scratch(a.workspace, adds ? c0 + mine : c0);
    PartialSum<T> partial(which, scratch);
    SegmentOf<false> segment(a, my.begin);
    for (std::int64_t unit = my.begin; unit < my.end; ++unit) {
      const std::int64_t n = segment.n;
      const std::int64_t e = segment.e;
      const int length = segment.length;
      Lane<T> sums[kVector];
      Lane<T> products[kVector];
      if (inside) {
        const T* u = a.u.at<T>(n, 0) + (e + lane) * a.u.element_stride + c;
        const T* v = a.v.at<T>(n, 0) + (e + lane) * a.v.element_stride + c;
        T* const kept =
            Options::kPlain || a.kept.data == nullptr ? nullptr : a.kept.at<T>(n, 0) + c;
        SYNCBN_UNROLL(device::vectors_ahead(kVector))
        for (int left = length - lane; left > 0; left -= kLanes) {
          const int i = length - left;
          device::Vector<T, kVector> us;
          device::Vector<T, kVector> vs;
          const std::int64_t mask_at = kGradient ? a.pullback.mask.bit(n, c, e + i) : 0;
          load_pair<T, kVector, kGradient, Options>(
              a, activation, pullback, false, mask_at, n * a.plane + e + i, u, v,
              kept == nullptr ? nullptr : kept + (e + i) * a.kept.element_stride, us, vs);
          SYNCBN_UNROLL(8)
          for (int k = 0; k < kVector; ++k) {
            sums[k].add(as_double(us.at[k]));
            products[k].add_product(as_double(us.at[k]), as_double(vs.at[k]));
          }
          u += kLanes * a.u.element_stride;
          v += kLanes * a.v.element_stride;
        }
      }
      Lane<T> folded[2];
      for (int sum = 0; sum < 2; ++sum) {
        SYNCBN_UNROLL(8)
        for (int k = 0; k < kVector; ++k) {
          staged[lane * kWidth + column * kVector + k] = sum == 0 ? sums[k] : products[k];
        }
        device::block_barrier();  // the lanes are staged
        if (adds && (which < kPartials<T> / 2) == (sum == 0)) {
          Lane<T> lanes[kLanes];
          for (int l = 0; l < kLanes; ++l) {
            lanes[l] = staged[l * kWidth + mine];
          }
          fold(lanes);
          folded[sum] = lanes[0];
        }
        device::block_barrier();  // and read
      }
      if (adds) {
        partial.add(folded[0], folded[1]);
      }
      segment.advance();
    }
    if (adds) {
      partial.finish(scratch);
    }
    finish_channels<T, kWidth, true>(a, c0);
  }
}

/// Blocks of sum_columns that fit a multiprocessor of sm_90.
template <class T, bool kGradient>
inline constexpr int kColumnBlocks = kGradient && sizeof(T) == 2 ? 2 : 3;

/// Some rows' elements of one channel, on their way from memory.
template <class T>
struct RowsOfColumn {
  static constexpr int kCount = RowSums<T>::kAtOnce;
  T u[kCount];
  T v[kCount];
};

/// Planes of one element (2-D input): every element is a partial. A thread takes one channel of
/// many rows and keeps all its partials in registers, added up where that is exact. The next rows
/// are under way meanwhile. (With 80 registers gradients spill on some architectures.)
template <class T, bool kGradient, class Options = AnyOptions>
SYNCBN_KERNEL_OF(kSumThreads, kGradient ? 2 : 3)
sum_columns(const SumsArguments a) {
  constexpr int kWidth = device::kWarp;
  constexpr int kRows = kSumThreads / kWidth;
  using Rows = RowsOfColumn<T>;
  const int column = static_cast<int>(device::thread_index()) % kWidth;
  const int row = static_cast<int>(device::thread_index()) / kWidth;
  const auto activation = activation_of<T, Options>(a.pullback.activation);
  for (std::int64_t job = device::block_index(); job < a.jobs; job += device::grid_size()) {
    const SumsJob my(a, job);
    const std::int64_t c0 = my.channel * kWidth;
    const std::int64_t c = c0 + column;
    if (!Options::kPlain && a.counts != nullptr && c0 == 0) {
      count_elements<T>(a, my.begin, my.end, device::thread_index(), device::block_size());
    }
    if (c < a.channels) {
      const ChannelScratch<T> scratch(a.workspace, c);
      PartialSum<T> sum(0, scratch);
      PartialSum<T> product(kPartials<T> / 2, scratch);
      PartialSum<T> product_rest(kPartials<T> - 1, scratch);  // float64; the sum's is zero
      ChannelPullback<T> pullback;
      if constexpr (kGradient) {
        pullback = ChannelPullback<T>(a.pullback, c);
      }
      std::int64_t n = my.begin + row;
      auto left = static_cast<int>(my.end - n);
      const T* u = a.u.at<T>(n, c);
      const T* v = a.v.at<T>(n, c);
      const std::int64_t u_step = kRows * a.u.sample_stride;
      const std::int64_t v_step = kRows * a.v.sample_stride;
      const auto load = [&](Rows& rows) {
        SYNCBN_UNROLL(4)
        for (int i = 0; i < Rows::kCount; ++i) {
          device::Vector<T, 1> one{};
          device::Vector<T, 1> other{};
          if (i * kRows < left) {
            T* const kept =
                Options::kPlain || a.kept.data == nullptr ? nullptr : a.kept.at<T>(n, c);
            load_pair<T, 1, kGradient, Options>(a, activation, &pullback, true,
                                                kGradient ? a.pullback.mask.bit(n, c, 0) : 0, n, u,
                                                v, kept, one, other);
          }
          rows.u[i] = one.at[0];
          rows.v[i] = other.at[0];
          n += kRows;
          u += u_step;
          v += v_step;
        }
        left -= Rows::kCount * kRows;
      };
      const auto add_one = [&](T u, T v) {
        Lane<T> one;
        Lane<T> squared;
        one.add(to_double(u));
        squared.add_product(to_double(u), to_double(v));
        sum.add(one, squared);
        product.add(one, squared);
        if constexpr (Lane<T>::kPair) {
          product_rest.add(one, squared);
        }
      };
      RowSums<T> exact;
      Rows next;
      for (load(next); left > -Rows::kCount * kRows;) {
        Rows rows = next;
        load(next);
        if (!exact.add(rows.u, rows.v, sum, product)) {
          SYNCBN_NO_UNROLL
          for (int i = 0; i < Rows::kCount; ++i) {
            add_one(rows.u[0], rows.v[0]);
            SYNCBN_UNROLL(4)
            for (int k = 1; k < Rows::kCount; ++k) {  // an index known only at run time
              rows.u[k - 1] = rows.u[k];              // would take local memory
              rows.v[k - 1] = rows.v[k];
            }
          }
        }
      }
      exact.finish(sum, product);
      sum.finish(scratch);
      product.finish(scratch);
      if constexpr (Lane<T>::kPair) {
        product_rest.finish(scratch);
      }
    }
    finish_channels<T, kWidth, false>(a, c0);
  }
}

}  // namespace syncbn::cuda
