// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/format.hpp"
#include "statistics/host_device.hpp"
#include "statistics/scalar.hpp"

// Local exact accumulators (docs/numerics.md, section 2): radix-2^32 slots in int64, which take
// 2^31 additions each before they could overflow, and the cut into radix-2^52 digits.
namespace syncbn {

inline constexpr int kSlotBits = 32;
inline constexpr int kDigitBits = 52;
inline constexpr std::int64_t kDigitMask = (std::int64_t{1} << kDigitBits) - 1;

/// A sum on this rank, an integer multiple of 2^-format.unit in format.slots slots: a view of them.
struct ExactSum {
  std::int64_t* slots;
  SumFormat format;

  /// Adds magnitude * 2^position units, negated if `negative`. magnitude < 2^96.
  SYNCBN_HD void add(unsigned __int128 magnitude, int position, bool negative) const {
    if (position < 0) {  // bits below the unit are zero: every partial is a multiple of it
      magnitude = position <= -128 ? 0 : magnitude >> -position;
      position = 0;
    }
    std::int64_t* slot = slots + position / kSlotBits;
    const int shift = position % kSlotBits;
    // The lowest chunk first, so that the shifted rest still fits 128 bits.
    std::uint64_t chunk = static_cast<std::uint64_t>(magnitude << shift) & 0xffffffffu;
    magnitude >>= kSlotBits - shift;
    while (true) {
      if (chunk != 0) {
        *slot += negative ? -static_cast<std::int64_t>(chunk) : static_cast<std::int64_t>(chunk);
      }
      if (magnitude == 0) {
        return;
      }
      chunk = static_cast<std::uint64_t>(magnitude) & 0xffffffffu;
      magnitude >>= kSlotBits;
      ++slot;
    }
  }

  /// Adds a finite partial exactly.
  SYNCBN_HD void add(double partial) const {
    const std::uint64_t b = bit_copy<std::uint64_t>(partial);
    const int exponent = static_cast<int>(b >> 52 & 0x7ff);
    std::uint64_t mantissa = b & 0xfffffffffffffu;
    if (exponent != 0) {
      mantissa |= std::uint64_t{1} << 52;
    }
    if (mantissa == 0) {
      return;
    }
    add(mantissa, (exponent != 0 ? exponent : 1) - 1075 + format.unit, (b >> 63) != 0);
  }

  /// Writes all digits: all but the top one in [0, 2^52), the top one signed.
  SYNCBN_HD void write(std::int64_t* digits) const {
    __int128 rest = 0;
    int bits = 0;  // rest stands for value * 2^-(digits already cut), with `bits` bits taken in
    int digit = 0;
    SYNCBN_NO_UNROLL
    for (int slot = 0; slot < format.slots; ++slot) {
      rest += static_cast<__int128>(slots[slot]) << bits;
      bits += kSlotBits;
      while (bits >= kDigitBits && digit < format.digits - 1) {
        digits[digit++] = static_cast<std::int64_t>(rest) & kDigitMask;
        rest >>= kDigitBits;
        bits -= kDigitBits;
      }
    }
    while (digit < format.digits - 1) {
      digits[digit++] = static_cast<std::int64_t>(rest) & kDigitMask;
      rest >>= kDigitBits;
    }
    digits[digit] = static_cast<std::int64_t>(rest);
  }
};

/// One of the two sums whose slots lie one after the other.
SYNCBN_HD inline ExactSum exact_sum(std::int64_t* slots, const Format& format, bool first) {
  return {first ? slots : slots + format.first.slots, first ? format.first : format.second};
}

}  // namespace syncbn
