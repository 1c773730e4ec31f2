// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/packing.cuh"
#include "cuda/sums.cuh"
#include "cuda/widen.cuh"

// The sums of short planes that are no whole 16 bytes (49 elements, or 196 of 16 bits). Planes of
// neighbouring channels are one run of memory: a warp copies that of 32 channels to shared memory
// by vectors, where each thread takes one channel and keeps all lanes in registers. The distance of
// planes is an odd number of words, of pairs of words or of half words, so that at most two threads
// meet in a bank.
namespace syncbn::cuda {

/// Bytes of shared memory.
template <class T, bool kGradient>
constexpr std::size_t short_plane_bytes(unsigned plane) {
  return (kGradient ? 2 : 1) * device::kWarp * plane * sizeof(T);
}

/// Copies `count` elements. The whole warp.
template <class T>
SYNCBN_DEVICE void stage(const T* from, unsigned count, T* to) {
  using Words = device::Vector<std::uint32_t, 4>;  // not halves, which nvcc would take apart
  constexpr unsigned kAtOnce = 4;
  const auto* const source = reinterpret_cast<const std::uint32_t*>(from);
  auto* const target = reinterpret_cast<Words*>(to);
  const unsigned lane = device::thread_index();
  const unsigned vectors = count / kWidest<T>;
  for (unsigned first = lane; first < vectors; first += kAtOnce * device::kWarp) {
    Words values[kAtOnce];
    SYNCBN_UNROLL(4)
    for (unsigned s = 0; s < kAtOnce; ++s) {
      const unsigned v = first + s * device::kWarp;
      if (v < vectors) {
        values[s] = device::load_vector<4>(source + v * 4);
      }
    }
    SYNCBN_UNROLL(4)
    for (unsigned s = 0; s < kAtOnce; ++s) {
      const unsigned v = first + s * device::kWarp;
      if (v < vectors) {
        target[v] = values[s];
      }
    }
  }
  for (unsigned e = vectors * kWidest<T> + lane; e < count; e += device::kWarp) {
    to[e] = from[e];
  }
}

/// body(lane) for `count` lanes. (nvcc does not unroll a loop that breaks off, and an index that is
/// known only at run time takes local memory.)
template <int kLane = 0, class Body>
SYNCBN_DEVICE void for_first_lanes(int count, const Body& body) {
  if constexpr (kLane < kLanes) {
    if (kLane < count) {
      body(kLane);
      for_first_lanes<kLane + 1>(count, body);
    }
  }
}

/// A thread's part: the lanes of one plane of at least kLanes elements, folded.
template <class T, bool kGradient, bool kActivated>
SYNCBN_DEVICE void add_plane(const SumsArguments& a, const ActivationOf<T>& activation,
                             const ChannelPullback<T>& pullback, const T* us, const T* vs,
                             Lane<T>& sum, Lane<T>& product) {
  Lane<T> sums[kLanes];
  Lane<T> products[kLanes];
  const auto plane = static_cast<int>(a.plane);
  const auto take = [&](int e, auto&& use) {
    T u = us[e];
    const T v = kGradient ? vs[e] : u;
    if constexpr (kActivated) {
      u = pullback.without_mask(activation, u, v);
    }
    use(u, v);
  };
  const auto add = [&](int lane, int e) {
    take(e, [&](T u, T v) {
      sums[lane].add(as_double(u));
      products[lane].add_product(as_double(u), as_double(v));
    });
  };
  // Zero and an element are that element, but for the sign of zeros, which no partial has.
  SYNCBN_UNROLL(16)
  for (int l = 0; l < kLanes; ++l) {
    take(l, [&](T u, T v) {
      sums[l].sum = as_double(u);
      products[l].sum = as_double(u) * as_double(v);
    });
  }
  int e = kLanes;
  for (; e + kLanes <= plane; e += kLanes) {
    SYNCBN_UNROLL(16)
    for (int l = 0; l < kLanes; ++l) {
      add(l, e + l);
    }
  }
  for_first_lanes(plane - e, [&](int l) { add(l, e + l); });
  fold(sums);
  fold(products);
  sum = sums[0];
  product = products[0];
}

/// A block is one warp. Units are samples, and blocks of channels have 32. 16 lanes of two sums are
/// 64 registers: with 128 in all the kernels of gradients would spill.
template <class T, bool kGradient>
SYNCBN_KERNEL_OF(device::kWarp, 8)
sum_short_planes(const SumsArguments a) {
  static_assert(!Lane<T>::kPair, "the lanes of float64 do not fit the registers");
  const ActivationOf<T> activation(a.pullback.activation);
  const bool activated = kGradient && a.pullback.activation.changes();
  const auto plane = static_cast<unsigned>(a.plane);
  const unsigned lane = device::thread_index();
  T* const us = device::shared<T>();
  T* const vs = kGradient ? us + device::kWarp * plane : us;
  for (std::int64_t job = device::block_index(); job < a.jobs; job += device::grid_size()) {
    const SumsJob my(a, job);
    const std::int64_t c0 = my.channel * device::kWarp;
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
    for (std::int64_t n = my.begin; n < my.end; ++n) {
      stage(a.u.at<T>(n, c0), planes * plane, us);
      if constexpr (kGradient) {
        stage(a.v.at<T>(n, c0), planes * plane, vs);
      }
      device::warp_barrier();  // the planes are there
      if (mine) {
        Lane<T> sum;
        Lane<T> product;
        if (activated) {
          add_plane<T, kGradient, kGradient>(a, activation, pullback, us + lane * plane,
                                             vs + lane * plane, sum, product);
        } else {
          add_plane<T, kGradient, false>(a, activation, pullback, us + lane * plane,
                                         vs + lane * plane, sum, product);
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
