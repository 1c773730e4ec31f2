// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/divisor.cuh"
#include "cuda/packing.cuh"
#include "cuda/sums.cuh"

// The sums of short planes that are no whole 16 bytes (49 elements, or 196 of 16 bits). Planes of
// neighbouring channels are one run of memory: a warp copies that of 32 channels to shared memory
// by vectors, where each thread takes one channel and keeps all lanes in registers.
namespace syncbn::cuda {

/// Elements between the rows of shared memory, a row for each channel: an odd number of words, so
/// that threads at the same element of their rows meet no bank twice.
template <class T>
SYNCBN_HD constexpr unsigned row_of_short_plane(unsigned plane) {
  constexpr unsigned kOfWord = 4 / sizeof(T);
  return ((plane + kOfWord - 1) / kOfWord | 1u) * kOfWord;
}

/// Bytes of shared memory.
template <class T, bool kGradient>
constexpr std::size_t short_plane_bytes(unsigned plane) {
  return (kGradient ? 2 : 1) * device::kWarp * row_of_short_plane<T>(plane) * sizeof(T);
}

struct ShortSumsArguments {
  SumsArguments sums;
  SmallDivisor plane;
};

/// Copies `planes` planes that begin at `from` to rows. The whole warp.
template <class T>
SYNCBN_DEVICE void stage_planes(const T* from, unsigned planes, unsigned plane,
                                const SmallDivisor& by_plane, T* rows) {
  constexpr int kVector = 4;  // with 8 of 16 bits there would be no registers for all addresses
  constexpr unsigned kAtOnce = 4;
  const unsigned lane = device::thread_index();
  const unsigned row = row_of_short_plane<T>(plane);
  const unsigned count = planes * plane;
  const unsigned vectors = count / kVector;
  for (unsigned first = lane; first < vectors; first += kAtOnce * device::kWarp) {
    device::Vector<T, kVector> values[kAtOnce];
    SYNCBN_UNROLL(4)
    for (unsigned s = 0; s < kAtOnce; ++s) {
      const unsigned v = first + s * device::kWarp;
      if (v < vectors) {
        values[s] = device::load_vector<kVector>(from + v * kVector);
      }
    }
    SYNCBN_UNROLL(4)
    for (unsigned s = 0; s < kAtOnce; ++s) {
      const unsigned v = first + s * device::kWarp;
      if (v < vectors) {
        const unsigned p = by_plane.quotient(v * kVector);
        const unsigned rest = (p + 1) * plane - v * kVector;  // of this plane
        T* const here = rows + p * (row - plane) + v * kVector;
        SYNCBN_UNROLL(8)
        for (unsigned k = 0; k < kVector; ++k) {
          here[k < rest ? k : k + (row - plane)] = values[s].at[k];
        }
      }
    }
  }
  for (unsigned e = vectors * kVector + lane; e < count; e += device::kWarp) {
    rows[by_plane.quotient(e) * (row - plane) + e] = from[e];
  }
}

/// A thread's part: the lanes of one plane, folded.
template <class T, bool kGradient, bool kActivated>
SYNCBN_DEVICE void add_plane(const SumsArguments& a, const ActivationOf<T>& activation,
                             const ChannelPullback<T>& pullback, const T* us, const T* vs,
                             Lane<T>& sum, Lane<T>& product) {
  Lane<T> sums[kLanes];
  Lane<T> products[kLanes];
  const auto plane = static_cast<int>(a.plane);
  const auto add = [&](int lane, int e) {
    T u = us[e];
    const T v = kGradient ? vs[e] : u;
    if constexpr (kActivated) {
      u = pullback.without_mask(activation, u, v);
    }
    sums[lane].add(u);
    products[lane].add_product(u, v);
  };
  int e = 0;
  for (; e + kLanes <= plane; e += kLanes) {
    SYNCBN_UNROLL(16)
    for (int l = 0; l < kLanes; ++l) {
      add(l, e + l);
    }
  }
  SYNCBN_UNROLL(16)
  for (int l = 0; l < kLanes; ++l) {
    if (e + l < plane) {
      add(l, e + l);
    }
  }
  fold(sums);
  fold(products);
  sum = sums[0];
  product = products[0];
}

/// A block is one warp. Units are samples, and blocks of channels have 32. 16 lanes of two sums are
/// 64 registers: with 128 in all the kernels of gradients would spill.
template <class T, bool kGradient>
SYNCBN_KERNEL_OF(device::kWarp, 8)
sum_short_planes(const ShortSumsArguments arguments) {
  static_assert(!Lane<T>::kPair, "the lanes of float64 do not fit the registers");
  const SumsArguments& a = arguments.sums;
  const ActivationOf<T> activation(a.pullback.activation);
  const bool activated = kGradient && a.pullback.activation.changes();
  const auto plane = static_cast<unsigned>(a.plane);
  const unsigned row = row_of_short_plane<T>(plane);
  const unsigned lane = device::thread_index();
  T* const us = device::shared<T>();
  T* const vs = kGradient ? us + device::kWarp * row : us;
  for (std::int64_t job = device::block_index(); job < a.jobs; job += device::grid_size()) {
    const std::int64_t c0 = a.jobs_per_channel.quotient(job) * device::kWarp;
    const std::int64_t begin = a.jobs_per_channel.remainder(job) * a.units_per_job;
    const std::int64_t end = begin + a.units_per_job < a.units ? begin + a.units_per_job : a.units;
    const std::int64_t left = a.channels - c0;
    const unsigned planes = left < device::kWarp ? static_cast<unsigned>(left) : device::kWarp;
    const bool mine = lane < planes;
    const ChannelScratch<T> scratch(a.workspace, mine ? c0 + lane : c0);
    PartialSum<T> partial_sum(0, scratch);
    PartialSum<T> partial_product(1, scratch);
    ChannelPullback<T> pullback;
    if (mine && activated) {
      pullback = ChannelPullback<T>(a.pullback, c0 + lane);
    }
    for (std::int64_t n = begin; n < end; ++n) {
      stage_planes<T>(a.u.at<T>(n, c0), planes, plane, arguments.plane, us);
      if constexpr (kGradient) {
        stage_planes<T>(a.v.at<T>(n, c0), planes, plane, arguments.plane, vs);
      }
      device::warp_barrier();  // the planes are there
      if (mine) {
        Lane<T> sum;
        Lane<T> product;
        if (activated) {
          add_plane<T, kGradient, kGradient>(a, activation, pullback, us + lane * row,
                                             vs + lane * row, sum, product);
        } else {
          add_plane<T, kGradient, false>(a, activation, pullback, us + lane * row, vs + lane * row,
                                         sum, product);
        }
        partial_sum.add(sum, product);
        partial_product.add(sum, product);
      }
      device::warp_barrier();  // and read
    }
    if (mine) {
      partial_sum.finish(scratch);
      partial_product.finish(scratch);
    }
    finish_channels<T, device::kWarp, true>(a, c0);
  }
}

}  // namespace syncbn::cuda
