// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/element_kernels.cuh"

// The element-wise passes of plain training steps on dense memory: no masks, no residual, all
// options known at compile time, 16-byte accesses whatever the sizes of planes. What they do not
// take goes to the kernels of element_kernels.cuh. A block computes the constants of its channels
// once, in shared memory.
namespace syncbn::cuda {

/// Elements that a block takes at a time.
template <class T>
inline constexpr unsigned kDenseRound = kElementThreads * kWidest<T> * kSteps;

/// A vector takes elements of two planes at most.
inline constexpr std::int64_t kSmallestDensePlane = 16;

struct DenseArguments {
  ElementArguments elements;
  std::int64_t total = 0;  ///< elements
  unsigned of_block = 0;   ///< those of one
  SmallDivisor plane;
};

/// One of both, word by word: nvcc may keep both in local memory for the choice between addresses.
template <class Channel>
SYNCBN_DEVICE Channel either(bool first, const Channel& a, const Channel& b) {
  constexpr unsigned kWords = sizeof(Channel) / sizeof(std::uint32_t);
  std::uint32_t of_a[kWords];
  std::uint32_t of_b[kWords];
  std::memcpy(of_a, &a, sizeof(a));
  std::memcpy(of_b, &b, sizeof(b));
  SYNCBN_UNROLL(32)
  for (unsigned i = 0; i < kWords; ++i) {
    of_a[i] = first ? of_a[i] : of_b[i];
  }
  Channel out;
  std::memcpy(&out, of_a, sizeof(out));
  return out;
}

/// A thread's vectors of one round.
template <class T>
struct DenseBatch {
  static constexpr int kVector = kWidest<T>;
  static constexpr unsigned kStep = kElementThreads * kVector;
  device::Vector<T, kVector> x[kSteps];
  device::Vector<T, kVector> other[kSteps];

  /// The vectors that begin before `end` (kAll: all do); at: of this thread's first.
  template <bool kReadsOther, bool kAll>
  SYNCBN_DEVICE void load(const T* xs, const T* others, unsigned at, unsigned end) {
    SYNCBN_UNROLL(8)
    for (unsigned s = 0; s < kSteps; ++s) {
      if (kAll || at + s * kStep < end) {
        x[s] = device::load_vector<kVector>(xs + at + s * kStep);
        other[s] = kReadsOther ? device::load_vector<kVector>(others + at + s * kStep) : x[s];
      }
    }
  }
};

/// What the pass makes of a round. channels: the constants of the planes from where `before`
/// elements lie in front of the block's; at, end: as above.
template <class Pass, class T, bool kWhole, bool kAll>
SYNCBN_DEVICE void store_round(const DenseArguments& dense, const ActivationOf<T>& activation,
                               const typename Pass::Channel* channels, const DenseBatch<T>& batch,
                               unsigned before, unsigned at, unsigned end, T* out) {
  constexpr int kVector = kWidest<T>;
  constexpr unsigned kStep = DenseBatch<T>::kStep;
  using Channel = typename Pass::Channel;
  const auto plane = static_cast<unsigned>(dense.elements.plane);
  SYNCBN_UNROLL(8)
  for (unsigned s = 0; s < kSteps; ++s) {
    if (kAll || at + s * kStep < end) {
      const unsigned place = before + at + s * kStep;
      const unsigned p = dense.plane.quotient(place);
      const Channel here = channels[p];
      const Channel next = kWhole ? here : channels[p + 1];
      const unsigned rest = kWhole ? kVector : (p + 1) * plane - place;  // of this plane
      device::Vector<T, kVector> result;
      SYNCBN_UNROLL(8)
      for (unsigned k = 0; k < kVector; ++k) {
        bool passes = false;
        result.at[k] =
            Pass::apply(dense.elements, activation, kWhole ? here : either(k < rest, here, next), 0,
                        batch.x[s].at[k], batch.other[s].at[k], passes);
      }
      device::store_vector(out + at + s * kStep, result);
    }
  }
}

/// Contiguous planes one after the other. A block takes `rounds` times kDenseRound neighbours;
/// kWhole: planes are whole vectors.
template <class Pass, class T, bool kWhole>
SYNCBN_KERNEL(kElementThreads)
map_dense_planes(const DenseArguments dense) {
  constexpr int kVector = kWidest<T>;
  using Channel = typename Pass::Channel;
  const ElementArguments& a = dense.elements;
  const ActivationOf<T> activation =
      activation_of<T, typename Pass::Options>(a.pullback.activation);
  auto* const channels = device::shared<Channel>();
  const std::int64_t begin = std::int64_t{device::block_index()} * dense.of_block;
  const std::int64_t left = dense.total - begin;
  const unsigned length = left < dense.of_block ? static_cast<unsigned>(left) : dense.of_block;
  const unsigned vectors = length / kVector * kVector;
  const T* const x = static_cast<const T*>(a.x.data) + begin;
  const T* const other = Pass::kReadsOther ? static_cast<const T*>(a.other.data) + begin : x;
  T* const out = static_cast<T*>(a.out.data) + begin;
  unsigned at = device::thread_index() * kVector;
  DenseBatch<T> batch;
  // Whole rounds are taken without a look at each vector; with 8 elements and two channels'
  // constants there would be no registers for it.
  const auto all = [&] {
    return (kWhole || kVector < 8) && at + (kSteps - 1) * DenseBatch<T>::kStep < vectors;
  };
  const auto load = [&] {
    all() ? batch.template load<Pass::kReadsOther, true>(x, other, at, vectors)
          : batch.template load<Pass::kReadsOther, false>(x, other, at, vectors);
  };
  load();
  const std::int64_t first = a.chunks.quotient(begin);  // plane
  const auto before = static_cast<unsigned>(begin - first * a.plane);
  const unsigned planes = dense.plane.quotient(before + length - 1) + 2;  // one more than it takes
  for (unsigned p = device::thread_index(); p < planes; p += kElementThreads) {
    channels[p] = Channel(a, a.per_sample.remainder(first + p));
  }
  device::block_barrier();  // the constants are there
  while (at < vectors) {
    all() ? store_round<Pass, T, kWhole, true>(dense, activation, channels, batch, before, at,
                                               vectors, out)
          : store_round<Pass, T, kWhole, false>(dense, activation, channels, batch, before, at,
                                                vectors, out);
    at += kDenseRound<T>;
    load();
  }
  const unsigned last = vectors + device::thread_index();  // no whole vector
  if (last < length) {
    bool passes = false;
    out[last] = Pass::apply(a, activation, channels[dense.plane.quotient(before + last)], 0,
                            x[last], other[last], passes);
  }
}

/// Rows of neighbouring channels, at even steps. A thread keeps the constants of kVector channels
/// and takes many rows.
template <class Pass, class T, int kVector>
SYNCBN_KERNEL(kElementThreads)
map_dense_rows(const ElementArguments a) {
  using Channel = typename Pass::Channel;
  const ActivationOf<T> activation =
      activation_of<T, typename Pass::Options>(a.pullback.activation);
  auto* const channels = device::shared<Channel>();
  const unsigned columns = a.group;
  const unsigned column = device::thread_index() % columns;
  const unsigned at_once = kElementThreads / columns;
  const unsigned row_of_block = device::thread_index() / columns;  // at_once: no columns are left
  const std::int64_t job = device::block_index();
  const std::int64_t first_channel = a.chunks.quotient(job) * columns * kVector;
  for (unsigned i = device::thread_index(); i < columns * kVector; i += kElementThreads) {
    if (first_channel + i < a.channels) {
      channels[i] = Channel(a, first_channel + i);
    }
  }
  device::block_barrier();  // the constants are there
  const std::int64_t c = first_channel + column * kVector;
  if (c >= a.channels || row_of_block == at_once) {
    return;
  }
  Channel mine[kVector];
  SYNCBN_UNROLL(8)
  for (int k = 0; k < kVector; ++k) {
    mine[k] = channels[column * kVector + static_cast<unsigned>(k)];
  }
  const std::int64_t begin = a.chunks.remainder(job) * a.rows_of_job;
  const std::int64_t end = begin + a.rows_of_job < a.plane ? begin + a.rows_of_job : a.plane;
  const T* const x = static_cast<const T*>(a.x.data) + c;
  const T* const other = Pass::kReadsOther ? static_cast<const T*>(a.other.data) + c : x;
  T* const out = static_cast<T*>(a.out.data) + c;
  for (std::int64_t row = begin + row_of_block; row < end; row += std::int64_t{kSteps} * at_once) {
    device::Vector<T, kVector> xs[kSteps];
    device::Vector<T, kVector> others[kSteps];
    SYNCBN_UNROLL(8)
    for (unsigned s = 0; s < kSteps; ++s) {
      const std::int64_t r = row + s * at_once;
      if (r < end) {
        xs[s] = device::load_vector<kVector>(x + r * a.x.element_stride);
        others[s] = Pass::kReadsOther
                        ? device::load_vector<kVector>(other + r * a.other.element_stride)
                        : xs[s];
      }
    }
    SYNCBN_UNROLL(8)
    for (unsigned s = 0; s < kSteps; ++s) {
      const std::int64_t r = row + s * at_once;
      if (r < end) {
        device::Vector<T, kVector> result;
        SYNCBN_UNROLL(8)
        for (int k = 0; k < kVector; ++k) {
          bool passes = false;
          result.at[k] =
              Pass::apply(a, activation, mine[k], 0, xs[s].at[k], others[s].at[k], passes);
        }
        device::store_vector(out + r * a.out.element_stride, result);
      }
    }
  }
}

}  // namespace syncbn::cuda
