// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

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

/// The largest that a kernel computes with in 32 bits.
inline constexpr std::int64_t kDenseLimit = std::int64_t{1} << 30;

struct DensePlanes {
  ElementArguments elements;
  std::int64_t total = 0;  ///< elements
  int of_block = 0;        ///< those of one
  SmallDivisor plane;
  SmallDivisor channels;  ///< if there are several
};

struct DenseRows {
  ElementArguments elements;
  int at_once = 0;  ///< rows
  SmallDivisor columns;
  int x_bytes = 0;  ///< from row to row
  int other_bytes = 0;
  int out_bytes = 0;
};

/// Calls each(s, at + s * step) for kCount of them where that is before `end`; kAll: it is.
template <int kCount, bool kAll, class Each>
SYNCBN_DEVICE void for_round(int at, int step, int end, const Each& each) {
  SYNCBN_UNROLL(8)
  for (int s = 0; s < kCount; ++s) {
    if (kAll || at + s * step < end) {
      each(s, at + s * step);
    }
  }
}

/// Takes a thread's vectors at `at`, at + step, and so on, before `end`, kCount at a time: load(s,
/// at) puts one into place s, store(s, at) has it done. The first loads are under way while
/// prepare() runs. Whole rounds are taken without a look at each vector; advance() follows each.
template <int kCount, class Load, class Prepare, class Store, class Advance>
SYNCBN_DEVICE void take_rounds(int at, int step, int end, const Load& load, const Prepare& prepare,
                               const Store& store, const Advance& advance) {
  const auto whole = [&] { return at + (kCount - 1) * step < end; };
  const bool any_whole = whole();
  any_whole ? for_round<kCount, true>(at, step, end, load)
            : for_round<kCount, false>(at, step, end, load);
  prepare();
  const auto store_round = [&] {
    for_round<kCount, true>(at, step, end, store);
    at += kCount * step;
    advance();
  };
  if (any_whole) {
    store_round();
    while (whole()) {
      for_round<kCount, true>(at, step, end, load);
      store_round();
    }
    for_round<kCount, false>(at, step, end, load);
  }
  for_round<kCount, false>(at, step, end, store);
}

/// Contiguous planes one after the other. A block takes `of_block` neighbours; kWhole: planes are
/// whole vectors.
template <class Pass, class T, bool kWhole>
SYNCBN_KERNEL(kElementThreads)
map_dense_planes(const DensePlanes dense) {
  constexpr int kVector = kWidest<T>;
  using Channel = typename Pass::Channel;
  const ElementArguments& a = dense.elements;
  const ActivationOf<T> activation =
      activation_of<T, typename Pass::Options>(a.pullback.activation);
  auto* const channels = device::shared<Channel>();
  const std::int64_t begin = std::int64_t{device::block_index()} * dense.of_block;
  const std::int64_t left = dense.total - begin;
  const int length = left < dense.of_block ? static_cast<int>(left) : dense.of_block;
  const int vectors = length / kVector * kVector;
  const auto thread = static_cast<int>(device::thread_index());
  const auto plane = static_cast<unsigned>(a.plane);
  constexpr int kStep = kElementThreads * kVector;
  const auto first = [&](const Operand& operand) { return static_cast<T*>(operand.data) + begin; };
  // Addresses that move with the rounds are the base of constant distances.
  const T* x = first(a.x) + thread * kVector;
  const T* other = Pass::kReadsOther ? first(a.other) + thread * kVector : x;
  T* out = first(a.out) + thread * kVector;
  unsigned before = 0;  // elements of the block's first plane that lie in front of it
  device::Vector<T, kVector> xs[kSteps];
  device::Vector<T, kVector> others[kSteps];
  take_rounds<kSteps>(
      thread * kVector, kElementThreads * kVector, vectors,
      [&](int s, int) {
        xs[s] = device::load_vector<kVector>(x + s * kStep);
        others[s] = Pass::kReadsOther ? device::load_vector<kVector>(other + s * kStep) : xs[s];
      },
      [&] {
        const std::int64_t first = a.chunks.quotient(begin);  // plane
        before = static_cast<unsigned>(begin - first * a.plane);
        const auto first_channel = static_cast<unsigned>(a.per_sample.remainder(first));
        const unsigned planes =
            dense.plane.quotient(before + static_cast<unsigned>(length) - 1) + 1;
        for (unsigned p = device::thread_index(); p < planes; p += kElementThreads) {
          const unsigned c = first_channel + p;
          channels[p] = Channel(a, a.channels == 1 ? 0
                                                   : c - dense.channels.quotient(c) *
                                                             static_cast<unsigned>(a.channels));
        }
        device::block_barrier();  // the constants are there
      },
      [&](int s, int at) {
        const unsigned place = before + static_cast<unsigned>(at);
        const unsigned p = dense.plane.quotient(place);
        const unsigned rest = (p + 1) * plane - place;  // elements of this plane
        const Channel* const here = channels + p;
        const Channel first_of_vector = *here;
        device::Vector<T, kVector> result;
        SYNCBN_UNROLL(8)
        for (unsigned k = 0; k < kVector; ++k) {
          const Channel channel =
              kWhole || k == 0 ? first_of_vector : *(k < rest ? here : here + 1);
          bool passes = false;
          result.at[k] =
              Pass::apply(a, activation, channel, 0, xs[s].at[k], others[s].at[k], passes);
        }
        device::store_vector(out + s * kStep, result);
      },
      [&] {
        x += kSteps * kStep;
        other += kSteps * kStep;
        out += kSteps * kStep;
      });
  const int last = vectors + thread;  // no whole vector
  if (last < length) {
    const unsigned p = dense.plane.quotient(before + static_cast<unsigned>(last));
    const T x_last = first(a.x)[last];
    bool passes = false;
    first(a.out)[last] = Pass::apply(a, activation, channels[p], 0, x_last,
                                     Pass::kReadsOther ? first(a.other)[last] : x_last, passes);
  }
}

/// `distance` times `row` bytes further, by one multiplication.
template <class T>
SYNCBN_DEVICE const T* of_row(const T* first, int row, int distance) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(first) +
                                    std::int64_t{row} * distance);
}

/// Vectors of rows that are under way at a time: two inputs and the constants of 8 channels leave
/// registers for fewer.
template <class Pass, int kVector>
inline constexpr int kRowSteps = Pass::kReadsOther && kVector == 8 ? 2 : kSteps;

/// Rows of neighbouring channels, at even steps. A thread keeps the constants of kVector channels
/// and takes many rows.
template <class Pass, class T, int kVector>
SYNCBN_KERNEL(kElementThreads)
map_dense_rows(const DenseRows dense) {
  using Channel = typename Pass::Channel;
  const ElementArguments& a = dense.elements;
  const ActivationOf<T> activation =
      activation_of<T, typename Pass::Options>(a.pullback.activation);
  auto* const channels = device::shared<Channel>();
  const unsigned columns = a.group;
  const unsigned row = dense.columns.quotient(device::thread_index());  // at_once: none is left
  const unsigned column = device::thread_index() - row * columns;
  const std::int64_t job = device::block_index();
  const std::int64_t block = a.chunks.quotient(job);  // of channels
  const std::int64_t first_channel = block * columns * kVector;
  const std::int64_t c = first_channel + column * kVector;
  const std::int64_t begin = (job - block * a.chunks.value()) * a.rows_of_job;
  const std::int64_t left = a.plane - begin;
  const auto rows = static_cast<int>(left < a.rows_of_job ? left : a.rows_of_job);
  const bool active = c < a.channels && static_cast<int>(row) < dense.at_once;
  const auto first = [&](const Operand& operand) {
    return static_cast<T*>(operand.data) + begin * operand.element_stride + c;
  };
  const T* const x = first(a.x);
  const T* const other = Pass::kReadsOther ? first(a.other) : x;
  T* const out = first(a.out);
  device::Vector<T, kVector> xs[kRowSteps<Pass, kVector>];
  device::Vector<T, kVector> others[kRowSteps<Pass, kVector>];
  Channel mine[kVector];
  take_rounds<kRowSteps<Pass, kVector>>(
      static_cast<int>(row), dense.at_once, active ? rows : 0,
      [&](int s, int at) {
        xs[s] = device::load_vector<kVector>(of_row(x, at, dense.x_bytes));
        others[s] = Pass::kReadsOther
                        ? device::load_vector<kVector>(of_row(other, at, dense.other_bytes))
                        : xs[s];
      },
      [&] {
        for (unsigned i = device::thread_index(); i < columns * kVector; i += kElementThreads) {
          if (first_channel + i < a.channels) {
            channels[i] = Channel(a, first_channel + i);
          }
        }
        device::block_barrier();  // the constants are there
        SYNCBN_UNROLL(8)
        for (int k = 0; k < kVector; ++k) {
          mine[k] = channels[column * kVector + static_cast<unsigned>(k)];
        }
      },
      [&](int s, int at) {
        device::Vector<T, kVector> result;
        SYNCBN_UNROLL(8)
        for (int k = 0; k < kVector; ++k) {
          bool passes = false;
          result.at[k] =
              Pass::apply(a, activation, mine[k], 0, xs[s].at[k], others[s].at[k], passes);
        }
        device::store_vector(const_cast<T*>(of_row(out, at, dense.out_bytes)), result);
      },
      [] {});
}

}  // namespace syncbn::cuda
