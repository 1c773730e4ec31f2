// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "cuda/views.cuh"

// The element-wise passes: out = Pass(x, other), one read of each input and one write. These
// kernels take all options, masks and strides at run time. A Pass has Channel, the constants of one
// channel, kMostChannels, of how many a thread can keep them in registers, and
//   static T apply(arguments, activation, channel, bits, x, other, passes)
// `bits`: of a mask that is read; `passes`: what a mask that is written keeps of the element.
namespace syncbn::cuda {

struct ElementArguments {
  Operand x;
  Operand other;  ///< dy, or the residual; no data if there is none
  Operand out;
  MaskBits written;
  PullbackArrays pullback;  ///< normalize: affine and activation; gradients: all of it
  const double* coefficients = nullptr;
  const std::uint8_t* counts = nullptr;  ///< bytes (N, plane), 0: the output is +0; null: all count
  std::int64_t samples = 0;
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  Divisor per_sample;  ///< planes: channels; rows: rows of a sample; strided: runs of one
  unsigned group = 0;  ///< planes: threads side by side on one; rows: columns of a block
  Divisor chunks;      ///< planes: pieces of one; rows: pieces of all; strided: bytes of a run
  std::int64_t rows_of_job = 0;
  std::int64_t jobs = 0;
};

inline constexpr unsigned kElementThreads = 256;
inline constexpr int kSteps = 4;  ///< accesses of a thread that are under way at a time

/// kSteps vectors of a channel (or of kVector channels, side by side) of one thread.
template <class Pass, class T, int kVector>
struct Batch {
  device::Vector<T, kVector> x[kSteps];
  device::Vector<T, kVector> other[kSteps];
  unsigned bits[kSteps];
  unsigned counted[kSteps];
  bool inside[kSteps];

  SYNCBN_DEVICE void load(const ElementArguments& a, int s, const T* from, const T* with,
                          std::int64_t mask_at, std::int64_t element, bool one_channel) {
    x[s] = device::load_vector<kVector>(from);
    other[s] = with == nullptr ? x[s] : device::load_vector<kVector>(with);
    const std::uint8_t* mask = a.pullback.mask.data;
    bits[s] = mask == nullptr ? 0 : static_cast<unsigned>(mask[mask_at / 8]) >> (mask_at % 8);
    counted[s] = counted_bits<kVector>(a.counts, element, one_channel);
  }
  /// Returns the bits for a mask.
  SYNCBN_DEVICE unsigned store(const ElementArguments& a, const ActivationOf<T>& activation,
                               const typename Pass::Channel* channel, bool one_channel, int s,
                               T* to) {
    unsigned passing = 0;
    device::Vector<T, kVector> out;
    SYNCBN_UNROLL(8)
    for (int k = 0; k < kVector; ++k) {
      bool passes = false;
      out.at[k] = Pass::apply(a, activation, channel[one_channel ? 0 : k], bits[s] >> k, x[s].at[k],
                              other[s].at[k], passes);
      out.at[k] = (counted[s] >> k & 1u) != 0 ? out.at[k] : T{};
      passing |= static_cast<unsigned>(passes) << k;
    }
    device::store_vector(to, out);
    return passing;
  }
};

/// Joins the bits of neighbouring threads to bytes; the first of each 8 / kVector stores one. The
/// whole warp.
template <int kVector>
SYNCBN_DEVICE void store_mask(unsigned bits, bool inside, std::uint8_t* to) {
  constexpr unsigned kThreads = 8 / kVector;
  const unsigned member = device::thread_index() % kThreads;
  bits = inside ? bits << (member * kVector) : 0;
  for (unsigned d = 1; d < kThreads; d *= 2) {
    bits |= device::shuffle_xor(bits, d);
  }
  if (inside && member == 0) {
    *to = static_cast<std::uint8_t>(bits);
  }
}

/// Contiguous planes. A group of threads takes a piece of one plane.
template <class Pass, class T, int kVector>
SYNCBN_KERNEL(kElementThreads)
map_planes(const ElementArguments a) {
  const unsigned lane = device::thread_index() % device::kWarp;
  const unsigned member = lane % a.group;
  const std::int64_t groups = device::kWarp / a.group;  // of a warp
  const std::int64_t warps = device::block_size() / device::kWarp;
  const std::int64_t warp = device::block_index() * warps + device::thread_index() / device::kWarp;
  const ActivationOf<T> activation(a.pullback.activation);
  for (std::int64_t first = warp * groups; first < a.jobs;
       first += device::grid_size() * warps * groups) {
    const std::int64_t job = first + lane / a.group;
    const std::int64_t plane = a.chunks.quotient(job);
    const std::int64_t n = a.per_sample.quotient(plane);
    const std::int64_t c = plane - n * a.channels;
    const std::int64_t begin = a.chunks.remainder(job) * (a.group * kVector * kSteps);
    const bool active = job < a.jobs;
    const T* const x = a.x.at<T>(n, c);
    const T* const other = a.other.data == nullptr ? nullptr : a.other.at<T>(n, c);
    Batch<Pass, T, kVector> batch;
    SYNCBN_UNROLL(8)
    for (int s = 0; s < kSteps; ++s) {
      const std::int64_t e = begin + static_cast<std::int64_t>(
                                         (static_cast<unsigned>(s) * a.group + member) * kVector);
      batch.inside[s] = active && e < a.plane;
      if (batch.inside[s]) {
        batch.load(a, s, x + e, other == nullptr ? nullptr : other + e,
                   a.pullback.mask.bit(n, c, e), n * a.plane + e, true);
      }
    }
    typename Pass::Channel channel;
    if (active) {
      channel = typename Pass::Channel(a, c);
    }
    SYNCBN_UNROLL(8)
    for (int s = 0; s < kSteps; ++s) {
      const std::int64_t e = begin + static_cast<std::int64_t>(
                                         (static_cast<unsigned>(s) * a.group + member) * kVector);
      unsigned passing = 0;
      if (batch.inside[s]) {
        passing = batch.store(a, activation, &channel, true, s, a.out.at<T>(n, c) + e);
      }
      if (a.written.data != nullptr) {
        store_mask<kVector>(passing, batch.inside[s], a.written.data + a.written.bit(n, c, e) / 8);
      }
    }
  }
}

/// Neighbouring channels side by side. A thread keeps the constants of kVector channels and takes
/// many rows.
template <class Pass, class T, int kVector>
SYNCBN_KERNEL(kElementThreads)
map_rows(const ElementArguments a) {
  const unsigned column = device::thread_index() % a.group;
  const std::int64_t rows_at_once = kElementThreads / a.group;
  const std::int64_t rows = a.samples * a.plane;
  const ActivationOf<T> activation(a.pullback.activation);
  for (std::int64_t job = device::block_index(); job < a.jobs; job += device::grid_size()) {
    const std::int64_t c = (a.chunks.quotient(job) * a.group + column) * kVector;
    const std::int64_t begin = a.chunks.remainder(job) * a.rows_of_job;
    const std::int64_t end = begin + a.rows_of_job < rows ? begin + a.rows_of_job : rows;
    typename Pass::Channel channels[kVector];
    if (c < a.channels) {
      SYNCBN_UNROLL(8)
      for (int k = 0; k < kVector; ++k) {
        channels[k] = typename Pass::Channel(a, c + k);
      }
    }
    for (std::int64_t first = begin; first < end; first += kSteps * rows_at_once) {
      Batch<Pass, T, kVector> batch;
      std::int64_t n[kSteps];
      std::int64_t e[kSteps];
      SYNCBN_UNROLL(8)
      for (int s = 0; s < kSteps; ++s) {
        const std::int64_t row = first + s * rows_at_once + device::thread_index() / a.group;
        n[s] = a.per_sample.quotient(row);
        e[s] = row - n[s] * a.plane;
        batch.inside[s] = row < end && c < a.channels;
        if (batch.inside[s]) {
          batch.load(a, s, a.x.at<T>(n[s], 0) + e[s] * a.x.element_stride + c,
                     a.other.data == nullptr
                         ? nullptr
                         : a.other.at<T>(n[s], 0) + e[s] * a.other.element_stride + c,
                     a.pullback.mask.bit(n[s], c, e[s]), n[s] * a.plane + e[s], false);
        }
      }
      SYNCBN_UNROLL(8)
      for (int s = 0; s < kSteps; ++s) {
        unsigned passing = 0;
        if (batch.inside[s]) {
          passing = batch.store(a, activation, channels, false, s,
                                a.out.at<T>(n[s], 0) + e[s] * a.out.element_stride + c);
        }
        if (a.written.data != nullptr) {
          store_mask<kVector>(passing, batch.inside[s],
                              a.written.data + a.written.bit(n[s], c, e[s]) / 8);
        }
      }
    }
  }
}

/// Any strides: a thread takes the up to 8 elements that share a byte of the mask.
template <class Pass, class T>
SYNCBN_KERNEL(kElementThreads)
map_strided(const ElementArguments a) {
  const std::int64_t length = a.written.by_rows ? a.channels : a.plane;  // of a run of bits
  const ActivationOf<T> activation(a.pullback.activation);
  for (std::int64_t i =
           std::int64_t{device::block_index()} * kElementThreads + device::thread_index();
       i < a.jobs; i += std::int64_t{device::grid_size()} * kElementThreads) {
    const std::int64_t run = a.chunks.quotient(i);
    const std::int64_t n = a.per_sample.quotient(run);
    const std::int64_t begin = a.chunks.remainder(i) * 8;
    unsigned passing = 0;
    std::int64_t c = a.per_sample.remainder(run);
    std::int64_t e = c;
    for (int k = 0; k < 8 && begin + k < length; ++k) {
      (a.written.by_rows ? c : e) = begin + k;
      const typename Pass::Channel channel(a, c);
      const T x = a.x.at<T>(n, c)[a.x.element(e)];
      const T other = a.other.data == nullptr ? x : a.other.at<T>(n, c)[a.other.element(e)];
      const unsigned bits = a.pullback.mask.data == nullptr ? 0 : a.pullback.mask.get(n, c, e);
      bool passes = false;
      const T out = Pass::apply(a, activation, channel, bits, x, other, passes);
      a.out.at<T>(n, c)[a.out.element(e)] =
          counted_bits<1>(a.counts, n * a.plane + e, true) != 0 ? out : T{};
      passing |= static_cast<unsigned>(passes) << k;
    }
    if (a.written.data != nullptr) {
      a.written.data[i] = static_cast<std::uint8_t>(passing);
    }
  }
}

/// Threads side by side along `length` elements, kVector each: a power of 2, enough for a byte of
/// a mask.
template <int kVector>
unsigned group_for(std::int64_t length) {
  unsigned group = 8;
  while (group < device::kWarp && group * kVector < length) {
    group *= 2;
  }
  return group;
}

}  // namespace syncbn::cuda
