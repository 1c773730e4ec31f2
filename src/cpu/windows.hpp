// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "statistics/format.hpp"
#include "statistics/scalar.hpp"
#include "tensors/scratch.hpp"

// The fast passes' exact accumulators: per channel and sum a window of two int64 limbs in fixed
// point, filled by adding magic numbers, with radix-2^32 slots behind it for whatever does not fit.
// The window's place is only a guess; it never changes a bit of the result.
namespace syncbn::cpu {

/// A partial p fits if |p| < 2^top and p is a multiple of 2^(top - kHighBits - kLowBits).
inline constexpr int kHighBits = 43;
inline constexpr int kLowBits = 46;
/// Partials per channel between two flushes; |low limb| <= 2^(kLowBits - 1) each.
inline constexpr std::int64_t kFlushInterval = std::int64_t{1} << 16;

/// What the vector code touches. Index [sum][channel]; arrays are padded to kChannelPadding.
struct WindowArrays {
  double* magic_high[2];  ///< 1.5 * 2^52 units of the high limb
  double* magic_low[2];
  double* bound[2];  ///< 2^top
  std::int64_t* high[2];
  std::int64_t* low[2];
};
inline constexpr std::int64_t kChannelPadding = 16;

/// Numbers of a window for partials below about 2^top, in integers that compilers turn into
/// vectors.
struct WindowPlace {
  SYNCBN_HD_IN_PLACE explicit WindowPlace(std::int32_t top) {
    // They keep every magic number, and the bound, a normal binary64.
    constexpr std::int32_t kLowestTop = -700;
    constexpr std::int32_t kHighestTop = 900;
    constexpr std::uint64_t kHighAbove = 52 - kHighBits;
    constexpr std::uint64_t kLowBelow = kHighBits + kLowBits - 52;
    constexpr std::uint64_t kHalf = std::uint64_t{1} << 51;
    top = top < kLowestTop ? kLowestTop : top;
    top = top > kHighestTop ? kHighestTop : top;
    const auto exponent = static_cast<std::uint64_t>(top + 1023);  // 2^top's bits, but for a shift
    magic_high = bit_copy<double>((exponent + kHighAbove) << 52 | kHalf);
    magic_low = bit_copy<double>((exponent - kLowBelow) << 52 | kHalf);
    bound = bit_copy<double>(exponent << 52);
  }
  double magic_high, magic_low, bound;
};

class Windows {
 public:
  Windows(const Format& format, std::int64_t channels);

  WindowArrays& arrays() { return arrays_; }
  std::int64_t channels() const { return channels_; }

  /// Places the window of a channel's sum. Only while it is empty.
  void place(std::int64_t channel, int sum, std::int32_t top);
  /// Adds a partial that does not fit; may move the window.
  void add_outside(std::int64_t channel, int sum, double partial);
  /// Empties the limbs of channels [begin, end) into the slots.
  void flush(std::int64_t begin, std::int64_t end);
  /// Adds the sums of another object for channels [begin, end).
  void absorb(const Windows& other, std::int64_t begin, std::int64_t end);
  /// Whether the limbs do not hold all of the channel's sums.
  bool has_slots(std::int64_t channel) const { return used_[channel]; }
  /// The channel's words.
  void write_words(std::int64_t channel, std::int64_t* words);

 private:
  void flush_one(std::int64_t channel, int sum);
  void add_limbs(std::int64_t channel, int sum, std::int64_t high, std::int64_t low, int unit);
  std::int64_t* slots(std::int64_t channel);
  int unit(std::int64_t channel, int sum) const;  ///< exponent of the high limb's unit

  Format format_;
  std::int64_t channels_;
  std::int64_t padded_;
  WindowArrays arrays_;
  Scratch storage_;
  std::int32_t* misses_;
  /// Slots of both sums and a flags word per channel, with values when one of its partials missed.
  std::int64_t* outside_;
  bool* used_;
};

/// For the vector code, which must not instantiate anything: Windows::add_outside.
void add_outside_window(Windows& windows, std::int64_t channel, int sum, double partial);

}  // namespace syncbn::cpu
