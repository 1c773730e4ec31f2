// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "cuda/divisor.cuh"
#include "cuda/views.cuh"
#include "cuda/window.cuh"

// What the sums' kernels are given, and how the last to be done with a channel packs its message.
namespace syncbn::cuda {

struct SumsArguments {
  Operand u;  ///< x, or dy
  Operand v;
  Operand kept;  ///< where the pulled back u goes, if it has data
  PullbackArrays pullback;
  const std::uint8_t* counts = nullptr;  ///< bytes (N, plane), 0: left out; null: all count
  MessageHeader header;
  std::int64_t* message = nullptr;
  std::int64_t* copy = nullptr;  ///< where its words go, too
  std::int64_t* workspace = nullptr;
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  Divisor segments;  ///< of a plane
  Divisor samples;
  std::int64_t units = 0;  ///< segments of a channel
  std::int64_t units_per_job = 0;
  Divisor jobs_per_channel;  ///< (or block of channels)
  std::int64_t jobs = 0;
};

/// To the copy of the message, if there is one, what this thread wrote to the message.
SYNCBN_DEVICE void copy_words(const SumsArguments& a, const std::int64_t* words, int count) {
  if (a.copy != nullptr) {
    std::int64_t* const to = a.copy + (words - a.message);
    for (int i = 0; i < count; ++i) {
      to[i] = words[i];
    }
  }
}

/// The words of neighbouring channels from their scratch memory, which is zero afterwards; the
/// header with those of the first channel. `threads` threads, which meet at `barrier`, after
/// atomic_hand_over. staged: kWords words of shared memory per channel.
template <class T, class Barrier>
SYNCBN_DEVICE void pack_channels(const SumsArguments& a, std::int64_t c0, unsigned channels,
                                 std::int64_t* staged, unsigned thread, unsigned threads,
                                 const Barrier& barrier) {
  using Scratch = ChannelScratch<T>;
  constexpr int kFirstDigits = Scratch::kFormat.first.digits;
  constexpr int kSecondDigits = Scratch::kFormat.second.digits;
  const Scratch scratch(a.workspace, c0);
  for (unsigned i = thread; i < channels * Scratch::kWords; i += threads) {
    staged[i] = device::load_fresh(scratch.words + i);
    scratch.words[i] = 0;
  }
  barrier();  // the slots are staged
  for (unsigned i = thread; i < 2 * channels; i += threads) {
    const std::int64_t c = c0 + i / 2;
    const std::int64_t* const slots = staged + i / 2 * Scratch::kWords;
    std::int64_t* const words = a.message + kHeaderWords + c * Scratch::kMessageWords;
    if (i % 2 == 0) {
      slots_to_digits(slots, Scratch::kFirstSlots, words, kFirstDigits);
      copy_words(a, words, kFirstDigits);
      if (c == 0) {
        a.header.write(a.message, a.counts == nullptr ? a.header.count : slots[Scratch::kCount]);
        copy_words(a, a.message, kHeaderWords);
      }
    } else {
      slots_to_digits(slots + Scratch::kFirstSlots, Scratch::kSecondSlots, words + kFirstDigits,
                      kSecondDigits);
      words[kFirstDigits + kSecondDigits] = slots[Scratch::kFlags];
      copy_words(a, words + kFirstDigits, kSecondDigits + 1);
    }
  }
}

/// Channels that a block packs at a time, and what it needs for it of shared memory, which is 48
/// KB.
template <class T>
inline constexpr unsigned kPackedAtOnce = sizeof(T) == 8 ? 8 : 64;
template <class T>
inline constexpr std::size_t kPackingBytes =
    kPackedAtOnce<T> * ChannelScratch<T>::kWords * sizeof(std::int64_t);

/// Every thread of the block: who is last to be done with the block's channels packs them, and then
/// calls packed(first channel, channels). Shared memory: kPackingBytes. kShares: what comes after
/// writes to that memory without a barrier.
template <class T, unsigned kWidth, bool kShares, class Packed>
SYNCBN_DEVICE void finish_channels(const SumsArguments& a, std::int64_t c0, const Packed& packed) {
  using Scratch = ChannelScratch<T>;
  auto* const staged = device::shared<std::int64_t>();
  device::block_barrier();  // the whole block's additions are done
  if (device::thread_index() == 0) {
    staged[0] = device::atomic_hand_over(Scratch(a.workspace, c0).words + Scratch::kDone, 1) + 1;
  }
  device::block_barrier();  // the count is there
  const bool last = staged[0] == a.jobs_per_channel.value();
  device::block_barrier();  // and read
  if (last) {
    const std::int64_t left = a.channels - c0;
    const unsigned count = left < kWidth ? static_cast<unsigned>(left) : kWidth;
    for (unsigned i = 0; i < count; i += kPackedAtOnce<T>) {
      const unsigned rest = count - i;
      pack_channels<T>(a, c0 + i, rest < kPackedAtOnce<T> ? rest : kPackedAtOnce<T>, staged,
                       device::thread_index(), device::block_size(),
                       [] { device::block_barrier(); });
      if constexpr (kShares || kWidth > kPackedAtOnce<T>) {
        device::block_barrier();  // the staging area is free again
      }
    }
    packed(c0, count);
  }
}
template <class T, unsigned kWidth, bool kShares>
SYNCBN_DEVICE void finish_channels(const SumsArguments& a, std::int64_t c0) {
  finish_channels<T, kWidth, kShares>(a, c0, [](std::int64_t, unsigned) {});
}

}  // namespace syncbn::cuda
