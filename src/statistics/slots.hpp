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

/// slots += magnitude * 2^position, negated if `negative`. magnitude < 2^96.
SYNCBN_HD inline void add_to_slots(std::int64_t* slots, unsigned __int128 magnitude, int position,
                                   bool negative) {
  if (position < 0) {  // bits below the unit are zero: every partial is a multiple of it
    magnitude = position <= -128 ? 0 : magnitude >> -position;
    position = 0;
  }
  int slot = position / kSlotBits;
  const int shift = position % kSlotBits;
  // The lowest chunk first, so that the shifted rest still fits 128 bits.
  std::uint64_t chunk = static_cast<std::uint64_t>(magnitude << shift) & 0xffffffffu;
  magnitude >>= kSlotBits - shift;
  while (true) {
    if (chunk != 0) {
      slots[slot] +=
          negative ? -static_cast<std::int64_t>(chunk) : static_cast<std::int64_t>(chunk);
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
SYNCBN_HD inline void add_partial(std::int64_t* slots, double partial, int unit) {
  const std::uint64_t b = bit_copy<std::uint64_t>(partial);
  const int exponent = static_cast<int>(b >> 52 & 0x7ff);
  std::uint64_t mantissa = b & 0xfffffffffffffu;
  if (exponent != 0) {
    mantissa |= std::uint64_t{1} << 52;
  }
  if (mantissa == 0) {
    return;
  }
  add_to_slots(slots, mantissa, (exponent != 0 ? exponent : 1) - 1075 + unit, (b >> 63) != 0);
}

/// slots[0..slot_count) as digits: all but the top one in [0, 2^52), the top one signed.
SYNCBN_HD inline void slots_to_digits(const std::int64_t* slots, int slot_count,
                                      std::int64_t* digits, int digit_count) {
  __int128 rest = 0;
  int bits = 0;  // rest stands for value * 2^-(digits already cut), with `bits` bits taken in
  int digit = 0;
  SYNCBN_NO_UNROLL
  for (int slot = 0; slot < slot_count; ++slot) {
    rest += static_cast<__int128>(slots[slot]) << bits;
    bits += kSlotBits;
    while (bits >= kDigitBits && digit < digit_count - 1) {
      digits[digit++] = static_cast<std::int64_t>(rest) & kDigitMask;
      rest >>= kDigitBits;
      bits -= kDigitBits;
    }
  }
  while (digit < digit_count - 1) {
    digits[digit++] = static_cast<std::int64_t>(rest) & kDigitMask;
    rest >>= kDigitBits;
  }
  digits[digit] = static_cast<std::int64_t>(rest);
}

}  // namespace syncbn
