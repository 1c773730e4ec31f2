// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "cuda/views.cuh"
#include "statistics/format.hpp"
#include "statistics/header.hpp"
#include "statistics/lanes.hpp"
#include "statistics/slots.hpp"

// The exact sums of a channel. Partials are gathered by threads, each in a window of its registers,
// and from there in the channel's slots in global memory by integer atomics: which thread adds
// what, and when, never changes a bit. Whoever is the last to be done with a channel packs it.
namespace syncbn::cuda {

/// A part of a sum in registers: an integer of 128 bits.
class Window {
 public:
  /// Adds a finite partial exactly.
  SYNCBN_DEVICE void add(double partial, const ExactSum& to) {
    const auto bits = bit_copy<std::int64_t>(partial);
    const int exponent = static_cast<int>(bits >> 52) & 0x7ff;
    const std::int64_t sign = bits >> 63;
    std::int64_t mantissa = bits & 0xfffffffffffff;
    mantissa |= static_cast<std::int64_t>(exponent != 0) << 52;
    int position = (exponent != 0 ? exponent : 1) - 1075 + to.format.unit;
    if (position < 0) {  // bits below the unit are zero: every partial is a multiple of it
      mantissa = position <= -64 ? 0 : mantissa >> -position;
      position = 0;
    }
    if (mantissa == 0) {
      return;
    }
    int shift = position - base_;
    if (static_cast<unsigned>(shift) >= kRange) {
      flush(to);
      base_ = position < kPlace ? 0 : position / kPlace * kPlace - kPlace;
      shift = position - base_;
    }
    mantissa = (mantissa ^ sign) - sign;
    const std::int64_t above = mantissa >> (64 - kRange) >> (kRange - shift);
    sum_ += static_cast<__int128>(above) << 64 | static_cast<std::uint64_t>(mantissa) << shift;
  }

  /// Empties the window into the slots, each of which takes less than 2^32, however many partials
  /// there were.
  SYNCBN_DEVICE void flush(const ExactSum& to) {
    if (base_ == kNowhere) {
      return;
    }
    const int shift = base_ % kSlotBits;
    std::int64_t* slot = to.slots + base_ / kSlotBits;
    add_chunk(slot, static_cast<std::uint32_t>(static_cast<std::uint64_t>(sum_) << shift));
    __int128 rest = sum_ >> (kSlotBits - shift);
    for (++slot; rest != 0; ++slot) {
      // What is left is the highest chunk if it fits one, and has to fit the highest slot.
      const auto low = static_cast<std::int64_t>(rest);
      if (rest == static_cast<std::int32_t>(low) || slot == to.slots + to.format.slots - 1) {
        add_chunk(slot, low);
        break;
      }
      add_chunk(slot, low & 0xffffffff);
      rest >>= kSlotBits;
    }
    clear();
  }

  /// Gathers the windows of the threads whose numbers in the warp differ in bits `from` and above
  /// in the lowest of them, as far as they lie in the same place; flushes those that do not.
  SYNCBN_DEVICE void gather(unsigned from, const ExactSum& to) {
    for (unsigned bit = from; bit < device::kWarp; bit *= 2) {
      const bool same = device::shuffle_xor(base_, bit) == base_;
      const bool lower = (device::thread_index() & bit) == 0;
      const std::uint64_t low = device::shuffle_xor(static_cast<std::uint64_t>(sum_), bit);
      const std::int64_t high = device::shuffle_xor(static_cast<std::int64_t>(sum_ >> 64), bit);
      if (same && lower) {
        sum_ += static_cast<__int128>(high) << 64 | low;
      } else if (same) {
        clear();
      } else if (!lower) {
        flush(to);
      }
    }
  }

 private:
  /// Where lowest bits of partials may lie above the window's, so that 2^26 of 53 bits fit. Windows
  /// lie at multiples of kPlace, so that those of a warp mostly lie in one place.
  static constexpr int kRange = 48;
  static constexpr int kPlace = 16;
  static constexpr int kNowhere = -kRange;  // no position is so close to it

  SYNCBN_DEVICE static void add_chunk(std::int64_t* slot, std::int64_t chunk) {
    if (chunk != 0) {
      device::atomic_add(slot, chunk);
    }
  }
  SYNCBN_DEVICE void clear() {
    sum_ = 0;
    base_ = kNowhere;
  }

  __int128 sum_ = 0;
  int base_ = kNowhere;  ///< of the sum's lowest bit
};

/// The partials that one segment gives: 2, or 4 for float64 (each sum's, then its compensation).
template <class T>
inline constexpr int kPartials = Lane<T>::kPair ? 4 : 2;

/// The scratch memory of a channel: slots of both sums, flags, and how many are done with it.
template <class T>
struct ChannelScratch {
  static constexpr Format kFormat = ElementTraits<T>::kFormat;
  static constexpr int kMessageWords = kFormat.words();
  static constexpr int kFirstSlots = kFormat.first.slots;
  static constexpr int kSlots = kFormat.slots();
  static constexpr int kFlags = kSlots;
  static constexpr int kDone = kSlots + 1;
  static constexpr int kCount = kSlots + 2;  // the first channel's: elements that a mask lets count
  static constexpr int kWords = kSlots + 3;

  std::int64_t* words;

  SYNCBN_DEVICE ChannelScratch(std::int64_t* workspace, std::int64_t c)
      : words(workspace + c * kWords) {}
  SYNCBN_DEVICE ExactSum slots(bool first) const {
    constexpr Format kHere = kFormat;  // a static member has no address on the device
    return exact_sum(words, kHere, first);
  }
};

/// One thread's share of a channel's sums: partial number `which` of each segment.
template <class T>
class PartialSum {
 public:
  SYNCBN_DEVICE PartialSum(int which, const ChannelScratch<T>& scratch)
      : first_(which < kPartials<T> / 2),
        rest_(Lane<T>::kPair && which % 2 == 1),
        idle_(which >= kPartials<T>),
        to_(scratch.slots(first_)) {}

  SYNCBN_DEVICE void add(const Lane<T>& sums, const Lane<T>& products) {
    const double sum = first_ ? sums.sum : products.sum;
    const double value = !rest_ ? sum : first_ ? sums.rest() : products.rest();
    if (idle_) {
      return;
    }
    if (!is_finite_by_bits(sum)) {
      flags_ |= partial_flag(sum, first_);
    } else if (!Lane<T>::kPair || is_finite_by_bits(value)) {
      window_.add(value, to_);
    }
  }
  /// The whole warp: the threads that hold the same partial are `stride` apart.
  SYNCBN_DEVICE void gather(unsigned stride) { window_.gather(stride, to_); }
  SYNCBN_DEVICE void finish(const ChannelScratch<T>& scratch) {
    window_.flush(to_);
    if (flags_ != 0) {
      device::atomic_or(scratch.words + ChannelScratch<T>::kFlags, flags_);
      flags_ = 0;
    }
  }

 private:
  /// Without binary64 operations.
  SYNCBN_DEVICE static bool is_finite_by_bits(double value) {
    return (bit_copy<std::uint64_t>(value) >> 52 & 0x7ff) != 0x7ff;
  }

  bool first_;
  bool rest_;
  bool idle_;
  ExactSum to_;
  Window window_;
  std::int64_t flags_ = 0;
};

/// The words in front of a message.
struct MessageHeader {
  std::int64_t count = 0;  ///< without a mask
  DType dtype = DType::kFloat32;
  Direction direction = Direction::kForward;
  std::uint64_t layer = 0;
  const std::int64_t* call = nullptr;
  std::int64_t channels = 0;
  double eps = 0;
  const std::int64_t* info = nullptr;  ///< backward: the forward's
  std::int64_t backward = 0;           ///< forward: who takes part in backward

  SYNCBN_DEVICE void write(std::int64_t* message, std::int64_t counted) const {
    std::uint32_t tag = 0;
    if (direction == Direction::kForward) {
      const auto number = static_cast<std::uint64_t>(call == nullptr ? 0 : *call);
      tag = fingerprint(layer, number, direction, channels, eps);
    } else if (info != nullptr) {
      tag = backward_fingerprint(static_cast<std::uint32_t>(info[1]));
    }
    write_header(message, counted, tag, counted == 0 ? 0 : dtype_flag(dtype), backward);
  }
};

}  // namespace syncbn::cuda
