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

/// Of the message, and of its copy if there is one.
SYNCBN_DEVICE void write_word(const SumsArguments& a, std::int64_t at, std::int64_t word) {
  a.message[at] = word;
  if (a.copy != nullptr) {
    a.copy[at] = word;
  }
}
SYNCBN_DEVICE void write_header(const SumsArguments& a, std::int64_t counted) {
  a.header.write(a.message, a.counts == nullptr ? a.header.count : counted);
  for (int i = 0; a.copy != nullptr && i < kHeaderWords; ++i) {
    a.copy[i] = a.message[i];
  }
}

/// Whether a warp has a thread for each slot of a channel. Otherwise it stages them.
template <class T>
inline constexpr bool kThreadPerSlot = ChannelScratch<T>::kWords <= device::kWarp;

/// What ExactSum::write gives, by a warp: thread i has slot i of both sums (without one, zero), and
/// gets digit i.
template <class T>
SYNCBN_DEVICE std::int64_t digit_of_slots(std::int64_t slot) {
  using Scratch = ChannelScratch<T>;
  constexpr unsigned kFirst = Scratch::kFirstSlots;
  constexpr unsigned kEnd = Scratch::kSlots;
  constexpr unsigned kFirstDigits = Scratch::kFormat.first.digits;
  constexpr unsigned kDigits = kFirstDigits + Scratch::kFormat.second.digits;
  const unsigned me = device::thread_index() % device::kWarp;
  const bool top = me == kFirst - 1 || me >= kEnd - 1;
  // Carries to the nearest multiple of 2^32 leave less than 2^32 in each slot but the top ones.
  const int carry = top ? 0 : static_cast<int>((slot >> kSlotBits) + (slot >> 31 & 1));
  std::int64_t value = slot - static_cast<std::int64_t>(carry) * (std::int64_t{1} << kSlotBits);
  value += device::shuffle_index(carry, (me - 1) % device::kWarp);
  // So the slots below are negative together if the highest of them that is not zero is.
  const unsigned below = ((1u << me) - 1) & (me < kFirst ? ~0u : ~((1u << kFirst) - 1));
  const unsigned nonzero = device::ballot(value != 0) & below;
  const unsigned negative = device::ballot(value < 0);
  value -= nonzero == 0 ? 0 : negative >> (63 - leading_zeros(nonzero)) & 1u;
  const auto low = static_cast<std::uint32_t>(value);
  const std::uint64_t above = device::shuffle_index(low, (me + 1) % device::kWarp);
  // The slot and all above it, as far as 64 bits go.
  const std::int64_t upwards = top ? value : static_cast<std::int64_t>(low | above << kSlotBits);

  const bool first = me < kFirstDigits;
  const unsigned bit = (first ? me : me - kFirstDigits) * kDigitBits;
  const unsigned shift = bit % kSlotBits;
  const unsigned from = bit / kSlotBits + (first ? 0 : kFirst);
  const unsigned last = first ? kFirst - 1 : kEnd - 1;
  const std::uint64_t lowest = device::shuffle_index(low, from % device::kWarp);
  const std::int64_t rest =
      device::shuffle_index(upwards, (from < last ? from + 1 : last) % device::kWarp);
  const std::int64_t digit =
      from < last ? static_cast<std::int64_t>(lowest >> shift | static_cast<std::uint64_t>(rest)
                                                                    << (32 - shift))
                  : rest >> shift;
  return me == kFirstDigits - 1 || me >= kDigits - 1 ? digit : digit & kDigitMask;
}

/// The same by two threads of the warp. staged: kWords words of shared memory.
template <class T>
SYNCBN_DEVICE void pack_staged(const SumsArguments& a, std::int64_t c, std::int64_t* staged) {
  using Scratch = ChannelScratch<T>;
  constexpr int kFirstDigits = Scratch::kFormat.first.digits;
  constexpr int kSecondDigits = Scratch::kFormat.second.digits;
  const Scratch scratch(a.workspace, c);
  const unsigned me = device::thread_index() % device::kWarp;
  for (unsigned i = me; i < Scratch::kWords; i += device::kWarp) {
    staged[i] = device::load_fresh(scratch.words + i);
    scratch.words[i] = 0;
  }
  device::warp_barrier();  // the slots are staged
  if (me < 2) {
    const bool first = me == 0;
    const int digits = first ? kFirstDigits : kSecondDigits;
    const std::int64_t at = kHeaderWords + c * Scratch::kMessageWords + (first ? 0 : kFirstDigits);
    Scratch(staged, 0).slots(first).write(a.message + at);
    for (int i = 0; a.copy != nullptr && i < digits; ++i) {
      a.copy[at + i] = a.message[at + i];
    }
    if (!first) {
      write_word(a, at + kSecondDigits, staged[Scratch::kFlags]);
    } else if (c == 0) {
      write_header(a, staged[Scratch::kCount]);
    }
  }
}

/// By one warp: the words of channels c, c + step, ... below `end` from their scratch memory, which
/// is zero afterwards; the header with those of the first channel. After atomic_hand_over and a
/// barrier. kAtOnce: loads under way. staged: of this warp, for pack_staged.
template <class T, unsigned kAtOnce>
SYNCBN_DEVICE void pack_channels(const SumsArguments& a, std::int64_t c, std::int64_t end,
                                 unsigned step, std::int64_t* staged) {
  using Scratch = ChannelScratch<T>;
  if constexpr (kThreadPerSlot<T>) {
    const unsigned me = device::thread_index() % device::kWarp;
    for (; c < end; c += kAtOnce * step) {
      std::int64_t words[kAtOnce] = {};
      SYNCBN_UNROLL(4)
      for (unsigned i = 0; i < kAtOnce; ++i) {
        if (c + i * step < end && me < Scratch::kWords) {
          std::int64_t* const word = Scratch(a.workspace, c + i * step).words + me;
          words[i] = device::load_fresh(word);
          *word = 0;
        }
      }
      SYNCBN_UNROLL(4)
      for (unsigned i = 0; i < kAtOnce; ++i) {
        const std::int64_t channel = c + i * step;
        if (channel >= end) {
          break;
        }
        const std::int64_t digit = digit_of_slots<T>(me < Scratch::kSlots ? words[i] : 0);
        const std::int64_t flags = device::shuffle_index(words[i], Scratch::kFlags);
        if (me < Scratch::kMessageWords) {
          write_word(a, kHeaderWords + channel * Scratch::kMessageWords + me,
                     me == Scratch::kMessageWords - 1 ? flags : digit);
        }
        if (channel == 0 && me == Scratch::kCount) {
          write_header(a, words[i]);
        }
      }
    }
  } else {
    for (; c < end; c += step) {
      pack_staged<T>(a, c, staged);
      if (c + step < end) {
        device::warp_barrier();  // the staging area is free again
      }
    }
  }
}

/// Shared memory with which `warps` warps pack: at least a word, for finish_channels.
template <class T>
inline constexpr std::size_t packing_bytes(unsigned warps) {
  return (kThreadPerSlot<T> ? 1 : warps * ChannelScratch<T>::kWords) * sizeof(std::int64_t);
}

/// Every thread of the block: who is last to be done with the block's channels packs them. Shared
/// memory: packing_bytes. kShares: what comes after writes to that memory without a barrier.
template <class T, unsigned kWidth, bool kShares>
SYNCBN_DEVICE void finish_channels(const SumsArguments& a, std::int64_t c0) {
  using Scratch = ChannelScratch<T>;
  auto* const staged = device::shared<std::int64_t>();
  device::block_barrier();  // the whole block's additions are done
  if (device::thread_index() == 0) {
    staged[0] = device::atomic_hand_over(Scratch(a.workspace, c0).words + Scratch::kDone, 1) + 1;
  }
  device::block_barrier();  // the count is there
  const bool last = staged[0] == a.jobs_per_channel.value();
  if (kShares || !kThreadPerSlot<T>) {
    device::block_barrier();  // and read
  }
  if (last) {
    const std::int64_t left = a.channels - c0;
    const unsigned count = left < kWidth ? static_cast<unsigned>(left) : kWidth;
    const unsigned warp = device::thread_index() / device::kWarp;
    pack_channels<T, 4>(a, c0 + warp, c0 + count, device::block_size() / device::kWarp,
                        staged + (kThreadPerSlot<T> ? 0 : warp * Scratch::kWords));
    if (kShares && !kThreadPerSlot<T>) {
      device::block_barrier();  // the staging area is free again
    }
  }
}

}  // namespace syncbn::cuda
