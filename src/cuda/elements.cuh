// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/dense_kernels.cuh"
#include "cuda/element_kernels.cuh"
#include "cuda/launch.cuh"

// Which of the element-wise kernels runs, and on how many threads.
namespace syncbn::cuda {

/// A pass from x to out, and the mask that it writes, or null.
inline ElementArguments element_arguments(const char* name, const SampleView& x,
                                          const char* out_name, const SampleView& out,
                                          const std::uint8_t* written) {
  ElementArguments a;
  a.x = operand(name, x);
  a.out = operand(out_name, out);
  a.written = mask_bits(written, x);
  a.counts = x.mask;
  a.samples = x.samples;
  a.channels = x.channels;
  a.plane = x.plane;
  return a;
}

/// Makes one sample of all, where their rows follow each other at even steps.
inline void merge_samples(ElementArguments& a) {
  const auto even = [&](const Operand& operand) {
    return operand.data == nullptr || operand.sample_stride == a.plane * operand.element_stride ||
           a.plane == 1;
  };
  if (a.samples > 1 && even(a.x) && even(a.other) && even(a.out)) {
    for (Operand* operand : {&a.x, &a.other, &a.out}) {
      operand->element_stride = a.plane == 1 ? operand->sample_stride : operand->element_stride;
    }
    a.plane *= a.samples;
    a.samples = 1;
  }
}

template <class Pass, class T, int kVector>
void start_map_rows(const char* name, ElementArguments& a, const Stream& stream) {
  a.group = group_for<kVector>(a.channels);
  const std::int64_t blocks = divide_up(a.channels, a.group * kVector);
  const std::int64_t rounds = divide_up(a.samples * a.plane, kSteps * (kElementThreads / a.group));
  const std::int64_t rows = a.samples * a.plane;
  const std::int64_t chunks =
      std::clamp<std::int64_t>(divide_up(16 * multiprocessors(), blocks), 1, rounds);
  a.rows_of_job = divide_up(rows, chunks);
  a.chunks = Divisor(divide_up(rows, a.rows_of_job));
  a.per_sample = Divisor(a.plane);
  a.jobs = blocks * a.chunks.value();
  start(name, &map_rows<Pass, T, kVector>, grid_for(a.jobs, 1), kElementThreads, 0, stream, a);
}

template <class Pass, class T, int kVector>
void start_map_planes(const char* name, ElementArguments& a, const Stream& stream) {
  a.group = group_for<kVector>(a.plane);
  a.chunks = Divisor(divide_up(a.plane, a.group * kVector * kSteps));
  a.per_sample = Divisor(a.channels);
  a.jobs = a.samples * a.channels * a.chunks.value();
  start(name, &map_planes<Pass, T, kVector>, grid_for(a.jobs, kElementThreads / a.group),
        kElementThreads, 0, stream, a);
}

/// Elements of a 16-byte access, or of one that is smaller because a thread keeps constants of
/// each.
template <class Pass, class T>
inline constexpr int kMapRowVector = std::min(kWidest<T>, Pass::kMostChannels);

/// Whether all planes follow one another and begin at a 16-byte address.
inline bool is_dense_planes(const ElementArguments& a, Layout layout) {
  const auto dense = [&](const Operand& operand) {
    return operand.data == nullptr ||
           ((a.channels == 1 || operand.channel_stride == a.plane) &&
            (a.samples == 1 || operand.sample_stride == a.channels * a.plane) &&
            reinterpret_cast<std::uintptr_t>(operand.data) % 16 == 0);
  };
  return layout == Layout::kPlanes && a.plane >= kSmallestDensePlane && a.plane < kDenseLimit &&
         a.channels < kDenseLimit && dense(a.x) && dense(a.other) && dense(a.out);
}

/// Blocks of a multiprocessor at most, so that few of them prepare: a multiple of the 2, 3 or 4
/// that run at once.
inline constexpr std::int64_t kDenseBlocks = 12;

template <class Pass, class T>
void start_dense_planes(const char* name, ElementArguments& a, const Stream& stream) {
  constexpr std::int64_t kRound = kElementThreads * kWidest<T> * kSteps;
  a.chunks = Divisor(a.plane);
  a.per_sample = Divisor(a.channels);
  const std::int64_t total = a.samples * a.channels * a.plane;
  // The constants of several blocks should fit a multiprocessor's shared memory.
  constexpr std::int64_t kMostPlanes = 256;
  const std::int64_t rounds =
      std::clamp<std::int64_t>(std::min(divide_up(total, kRound * kDenseBlocks * multiprocessors()),
                                        kMostPlanes * a.plane / kRound),
                               1, 16);
  const DensePlanes dense{
      a, total, static_cast<int>(rounds * kRound),
      SmallDivisor(static_cast<std::uint32_t>(a.plane)),
      SmallDivisor(static_cast<std::uint32_t>(std::max<std::int64_t>(a.channels, 2)))};
  const auto blocks = static_cast<unsigned>(divide_up(total, std::int64_t{dense.of_block}));
  const auto planes = static_cast<std::size_t>(dense.of_block / a.plane + 2);
  const bool whole = a.plane % kWidest<T> == 0;
  start(name, whole ? &map_dense_planes<Pass, T, true> : &map_dense_planes<Pass, T, false>, blocks,
        kElementThreads, planes * sizeof(typename Pass::Channel), stream, dense);
}

/// Whether rows of one sample are several columns, in distances that kernels know in 32 bits.
template <class T>
bool is_dense_rows(const ElementArguments& a, const Plan& plan, std::int64_t columns) {
  const auto near = [](const Operand& operand) {
    return operand.element_stride < kDenseLimit / static_cast<std::int64_t>(sizeof(T));
  };
  return plan.layout == Layout::kRows && plan.wide && a.samples == 1 && columns > 1 && near(a.x) &&
         near(a.other) && near(a.out);
}

/// `a`: of one sample.
template <class Pass, class T, int kVector>
void start_dense_rows(const char* name, ElementArguments& a, const Stream& stream) {
  constexpr std::int64_t kMostColumns = 64;
  const std::int64_t columns = a.channels / kVector;
  a.group = static_cast<unsigned>(columns <= kMostColumns ? columns : device::kWarp);
  const std::int64_t blocks = divide_up(columns, a.group);
  const std::int64_t at_once = kElementThreads / a.group;
  const std::int64_t rounds = divide_up(a.plane, kSteps * at_once);
  const std::int64_t chunks =
      std::clamp<std::int64_t>(kDenseBlocks * multiprocessors() / blocks,
                               divide_up(rounds, kDenseLimit / (kSteps * at_once)), rounds);
  a.rows_of_job = divide_up(rounds, chunks) * kSteps * at_once;
  a.chunks = Divisor(divide_up(a.plane, a.rows_of_job));
  const auto bytes = [](const Operand& operand) {
    return static_cast<int>(operand.element_stride * static_cast<std::int64_t>(sizeof(T)));
  };
  start(name, &map_dense_rows<Pass, T, kVector>, static_cast<unsigned>(blocks * a.chunks.value()),
        kElementThreads, a.group * kVector * sizeof(typename Pass::Channel), stream,
        DenseRows{a, static_cast<int>(at_once), SmallDivisor(a.group), bytes(a.x), bytes(a.other),
                  bytes(a.out)});
}

template <class Pass, class T>
void load_dense() {
  load(&map_dense_planes<Pass, T, true>, &map_dense_planes<Pass, T, false>,
       &map_dense_rows<Pass, T, kMapRowVector<Pass, T>>);
}

/// The pass of a plain step with the dense kernels, if there is one and it fits.
template <class Pass, class T>
bool start_dense(const char* name, const Plan& plan, ElementArguments& a, const Stream& stream) {
  constexpr int kVector = kMapRowVector<Pass, T>;
  if (is_dense_rows<T>(a, plan, a.channels / kVector)) {
    start_dense_rows<Pass, T, kVector>(name, a, stream);
    return true;
  }
  if (is_dense_planes(a, plan.layout)) {
    start_dense_planes<Pass, T>(name, a, stream);
    return true;
  }
  return false;
}

/// Loads what start_elements starts.
template <template <class, class> class Pass>
void load_elements(DType dtype) {
  dispatch_dtype(dtype, [](auto type) {
    using T = decltype(type);
    using General = Pass<T, AnyOptions>;
    load(&map_strided<General, T>, &map_rows<General, T, 1>,
         &map_rows<General, T, kMapRowVector<General, T>>, &map_planes<General, T, 1>,
         &map_planes<General, T, kWidest<T>>);
    if constexpr (General::kHasPlain) {
      load_dense<Pass<T, Plain<NotPositive::kKept>>, T>();
      load_dense<Pass<T, Plain<NotPositive::kZero>>, T>();
    }
  });
}

template <template <class, class> class Pass>
void start_elements(const char* name, DType dtype, const Plan& plan, ElementArguments& a,
                    const Stream& stream) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    using General = Pass<T, AnyOptions>;
    if (plan.layout == Layout::kRows) {
      merge_samples(a);
    }
    if constexpr (General::kHasPlain) {
      const bool masked =
          a.counts != nullptr || a.written.data != nullptr || a.pullback.mask.data != nullptr;
      const auto dense = [&](auto options) {
        return start_dense<Pass<T, decltype(options)>, T>(name, plan, a, stream);
      };
      if (General::is_plain(a) && with_plain_options(masked, a.pullback.activation, dense)) {
        return;
      }
    }
    if (plan.layout == Layout::kStrided) {
      const bool by_rows = a.written.by_rows;
      a.chunks = Divisor(divide_up(by_rows ? a.channels : a.plane, 8));
      a.per_sample = Divisor(by_rows ? a.plane : a.channels);
      a.jobs = a.samples * a.per_sample.value() * a.chunks.value();
      start(name, &map_strided<General, T>, grid_for(a.jobs, kElementThreads), kElementThreads, 0,
            stream, a);
    } else if (plan.layout == Layout::kRows) {
      plan.wide ? start_map_rows<General, T, kMapRowVector<General, T>>(name, a, stream)
                : start_map_rows<General, T, 1>(name, a, stream);
    } else {
      plan.wide ? start_map_planes<General, T, kWidest<T>>(name, a, stream)
                : start_map_planes<General, T, 1>(name, a, stream);
    }
  });
}

}  // namespace syncbn::cuda
