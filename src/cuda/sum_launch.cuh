// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/loading.hpp"
#include "cuda/short_sums.cuh"
#include "cuda/sums.cuh"

// What sums are given, which of their kernels runs, and on how many threads.
namespace syncbn::cuda {

/// The message of a rank without elements: the header and zeros. copy: as SumsArguments::copy.
static SYNCBN_KERNEL(kSumThreads)
    write_empty_message(const MessageHeader header, std::int64_t* message, std::int64_t* copy,
                        std::int64_t words) {
  const std::int64_t first = std::int64_t{device::block_index()} * kSumThreads;
  const std::int64_t step = std::int64_t{device::grid_size()} * kSumThreads;
  for (std::int64_t i = kHeaderWords + first + device::thread_index(); i < words; i += step) {
    message[i] = 0;
    if (copy != nullptr) {
      copy[i] = 0;
    }
  }
  if (first == 0 && device::thread_index() == 0) {
    header.write(message, header.count);
    if (copy != nullptr) {
      header.write(copy, header.count);
    }
  }
}

/// Cuts the units of a channel into jobs, each a multiple of `at_once`: as many as fit the device
/// at a time, where a multiprocessor takes `resident` of them. A few more would take a second turn.
inline void deal(SumsArguments& a, std::int64_t channel_blocks, std::int64_t at_once,
                 std::int64_t resident) {
  const std::int64_t rounds = divide_up(a.units, at_once);
  const std::int64_t jobs =
      std::clamp<std::int64_t>(resident * multiprocessors() / channel_blocks, 1, rounds);
  a.units_per_job = divide_up(rounds, jobs) * at_once;
  a.jobs_per_channel = Divisor(divide_up(a.units, a.units_per_job));
  a.jobs = a.jobs_per_channel.value() * channel_blocks;
}

template <class T, bool kGradient, int kVector, bool kStrided, class Options = AnyOptions>
void start_planes(SumsArguments& a, const Stream& stream) {
  constexpr std::int64_t kWarps = kPlaneSumThreads / device::kWarp;
  constexpr std::int64_t kGroups = device::kWarp * kVector / kLanes;
  deal(a, a.channels, kGroups, 16);
  start("the sums of planes", &sum_planes<T, kVector, kGradient, kStrided, Options>,
        grid_for(a.jobs, kWarps, 32), kPlaneSumThreads, packing_bytes<T>(kWarps), stream, a);
}

template <class T, bool kGradient, int kVector, class Options = AnyOptions>
void start_rows(SumsArguments& a, const Stream& stream) {
  constexpr std::int64_t kWidth = kRowColumns<kVector> * kVector;
  constexpr unsigned kThreads = kLanes * kRowColumns<kVector>;
  constexpr std::size_t kFold = kLanes * kWidth * sizeof(Lane<T>);
  deal(a, divide_up(a.channels, kWidth), 1, kGradient ? 3 : 4);
  start("the sums of rows", &sum_rows<T, kVector, kGradient, Options>, grid_for(a.jobs, 1),
        kThreads, std::max(kFold, packing_bytes<T>(kThreads / device::kWarp)), stream, a);
}

template <class T, bool kGradient, class Options = AnyOptions>
void start_columns(SumsArguments& a, const Stream& stream) {
  constexpr std::int64_t kWarps = kSumThreads / device::kWarp;
  deal(a, divide_up(a.channels, device::kWarp), RowSums<T>::kAtOnce * kWarps,
       kColumnBlocks<T, kGradient>);
  start("the sums of 2-D input", &sum_columns<T, kGradient, Options>, grid_for(a.jobs, 1),
        kSumThreads, packing_bytes<T>(kWarps), stream, a);
}

/// Whether sum_short_planes takes these.
template <class T, bool kGradient>
bool is_short(const SumsArguments& a) {
  constexpr std::size_t kSharedBytes = std::size_t{40} << 10;
  const auto dense = [&](const Operand& operand) {
    return operand.channel_stride == a.plane &&
           (a.units == 1 || operand.sample_stride % kWidest<T> == 0) &&
           reinterpret_cast<std::uintptr_t>(operand.data) % 16 == 0;
  };
  return a.plane >= kLanes && a.plane <= kSegment && a.channels >= device::kWarp &&
         short_plane_bytes<T, kGradient>(static_cast<unsigned>(a.plane)) <= kSharedBytes &&
         a.counts == nullptr && a.kept.data == nullptr && a.pullback.mask.data == nullptr &&
         dense(a.u) && dense(a.v);
}

template <class T, bool kGradient>
void start_short_planes(SumsArguments& a, const Stream& stream) {
  deal(a, divide_up(a.channels, device::kWarp), 1, kGradient ? 8 : 12);
  const auto plane = static_cast<std::uint32_t>(a.plane);
  start("the sums of short planes", &sum_short_planes<T, kGradient>, grid_for(a.jobs, 1, 32),
        device::kWarp, std::max(short_plane_bytes<T, kGradient>(plane), packing_bytes<T>(1)),
        stream, a);
}

template <bool kGradient>
void start_sums(DType dtype, const Plan& plan, SumsArguments& a, const Stream& stream) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const bool rows = plan.layout == Layout::kRows;
    if (plan.layout == Layout::kStrided) {
      start_planes<T, kGradient, 1, true>(a, stream);
      return;
    }
    const bool masked =
        a.counts != nullptr || a.kept.data != nullptr || a.pullback.mask.data != nullptr;
    const auto with_options = [&](const auto& body) {
      const auto plain = [&](auto options) {
        // Forward has no activation.
        using Given = decltype(options);
        body(std::conditional_t<kGradient || !Given::kPlain, Given, Plain<NotPositive::kKept>>());
        return true;
      };
      if (!with_plain_options(masked, a.pullback.activation, plain)) {
        body(AnyOptions());
      }
    };
    if (rows && a.plane == 1) {
      with_options(
          [&](auto options) { start_columns<T, kGradient, decltype(options)>(a, stream); });
      return;
    }
    if (!plan.wide) {
      if constexpr (!Lane<T>::kPair) {
        if (!rows && is_short<T, kGradient>(a)) {
          start_short_planes<T, kGradient>(a, stream);
          return;
        }
      }
      rows ? start_rows<T, kGradient, 1>(a, stream)
           : start_planes<T, kGradient, 1, false>(a, stream);
      return;
    }
    with_options([&](auto options) {
      using Options = decltype(options);
      rows ? start_rows<T, kGradient, kRowVector<T, kGradient>, Options>(a, stream)
           : start_planes<T, kGradient, kWidest<T>, false, Options>(a, stream);
    });
  });
}

/// Loads those of wide accesses and of 2-D input.
template <class T, bool kGradient, class Options>
void load_sums_of() {
  load(&sum_planes<T, kWidest<T>, kGradient, false, Options>,
       &sum_rows<T, kRowVector<T, kGradient>, kGradient, Options>,
       &sum_columns<T, kGradient, Options>);
}

/// Loads what start_sums starts.
template <bool kGradient>
void load_sums(DType dtype) {
  dispatch_dtype(dtype, [](auto type) {
    using T = decltype(type);
    load(&sum_planes<T, 1, kGradient, true>, &sum_planes<T, 1, kGradient, false>,
         &sum_rows<T, 1, kGradient>, &write_empty_message);
    load_sums_of<T, kGradient, AnyOptions>();
    load_sums_of<T, kGradient, Plain<NotPositive::kKept>>();
    if constexpr (kGradient) {
      load_sums_of<T, kGradient, Plain<NotPositive::kZero>>();
    }
    if constexpr (!Lane<T>::kPair) {
      load(&sum_short_planes<T, kGradient>);
    }
  });
}

/// Everything but the layout, and loads all kernels. False: there is nothing to add up, and the
/// message is enqueued.
inline bool prepare_sums(SumsArguments& a, const SampleView& x, const MessageHeader& header,
                         std::int64_t* message, std::int64_t* workspace, const Stream& stream) {
  load_kernels(x.dtype);
  a.header = header;
  a.header.count = x.samples * x.plane;
  a.header.dtype = x.dtype;
  a.header.channels = x.channels;
  a.counts = x.mask;
  a.message = message;
  a.workspace = workspace;
  a.channels = x.channels;
  a.plane = x.plane;
  if (x.empty() || x.channels == 0) {
    const std::int64_t words = message_words(x.dtype, x.channels);
    start("an empty message", &write_empty_message, grid_for(words, kSumThreads), kSumThreads, 0,
          stream, a.header, message, a.copy, words);
    return false;
  }
  a.segments = Divisor(divide_up(x.plane, kSegment));
  a.samples = Divisor(x.samples);
  a.units = x.samples * a.segments.value();
  return true;
}

}  // namespace syncbn::cuda
