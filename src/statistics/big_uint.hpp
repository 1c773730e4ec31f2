// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/host_device.hpp"
#include "statistics/scalar.hpp"
#include "statistics/slots.hpp"

// Unsigned integers of fixed width, just large enough for the exact steps of finalize.
namespace syncbn {

template <int kLimbs>
struct BigUint {
  std::uint64_t limb[kLimbs] = {};

  SYNCBN_HD int used() const {
    int n = kLimbs;
    SYNCBN_NO_UNROLL
    while (n > 0 && limb[n - 1] == 0) {
      --n;
    }
    return n;
  }
};

/// |digits| and its sign. digits: canonical (all but the top one in [0, 2^52), the top one signed).
template <int kLimbs>
SYNCBN_HD inline bool magnitude_of(const std::int64_t* digits, int count, BigUint<kLimbs>& out) {
  const bool negative = digits[count - 1] < 0;
  unsigned __int128 bits = 0;
  int held = 0;
  int limb = 0;
  std::int64_t borrow = 0;
  SYNCBN_NO_UNROLL
  for (int i = 0; i < count; ++i) {
    std::int64_t digit = digits[i];
    if (negative) {
      digit = borrow - digit;
      borrow = 0;
      if (i < count - 1 && digit < 0) {
        digit += kDigitMask + 1;
        borrow = -1;
      }
    }
    bits |= static_cast<unsigned __int128>(static_cast<std::uint64_t>(digit)) << held;
    held += kDigitBits;
    if (held >= 64) {
      out.limb[limb++] = static_cast<std::uint64_t>(bits);
      bits >>= 64;
      held -= 64;
    }
  }
  SYNCBN_NO_UNROLL
  for (; bits != 0; bits >>= 64) {
    out.limb[limb++] = static_cast<std::uint64_t>(bits);
  }
  return negative;
}

/// The number rounded to 53 significant bits, ties to even: d * 2^exponent with 2^52 <= d <= 2^53,
/// or d = 0.
struct Rounded53 {
  double d;
  int exponent;
};

template <int kLimbs>
SYNCBN_HD inline Rounded53 round53(const BigUint<kLimbs>& v) {
  const int n = v.used();
  if (n == 0) {
    return {0.0, 0};
  }
  // The top 64 significant bits, with everything below folded into the lowest one.
  const int zeros = leading_zeros(v.limb[n - 1]);
  std::uint64_t top = v.limb[n - 1] << zeros;
  std::uint64_t rest = 0;
  if (n > 1) {
    if (zeros > 0) {
      top |= v.limb[n - 2] >> (64 - zeros);
      rest = v.limb[n - 2] << zeros;
    } else {
      rest = v.limb[n - 2];
    }
    SYNCBN_NO_UNROLL
    for (int i = 0; i < n - 2; ++i) {
      rest |= v.limb[i];
    }
  }
  const std::uint64_t kept = top >> 11;
  const std::uint64_t dropped = top & 0x7ffu;
  const bool up = dropped > 0x400u || (dropped == 0x400u && (rest != 0 || (kept & 1u) != 0));
  return {static_cast<double>(kept + (up ? 1u : 0u)), 64 * (n - 1) - zeros + 11};
}

/// out = a * factor * 2^shift. out: 0. (As a result it would be copied on GPUs.)
template <int kOut, int kLimbs>
SYNCBN_HD inline void multiply_and_shift(const BigUint<kLimbs>& a, std::uint64_t factor, int shift,
                                         BigUint<kOut>& out) {
  const int limbs = shift / 64;
  const int bits = shift % 64;
  unsigned __int128 carry = 0;
  const int n = a.used();
  int i = 0;
  std::uint64_t below = 0;
  SYNCBN_NO_UNROLL
  for (; i < n || carry != 0; ++i) {
    if (i < n) {
      carry += static_cast<unsigned __int128>(a.limb[i]) * factor;
    }
    const std::uint64_t word = static_cast<std::uint64_t>(carry);
    carry >>= 64;
    out.limb[i + limbs] = bits == 0 ? word : (word << bits | below >> (64 - bits));
    below = word;
  }
  if (bits != 0 && i > 0 && below >> (64 - bits) != 0) {
    out.limb[i + limbs] = below >> (64 - bits);
  }
}

/// a = max(0, a - b * b). In place, a row of products at a time: GPUs have little stack memory.
template <int kA, int kB>
SYNCBN_HD inline void subtract_square(BigUint<kA>& a, const BigUint<kB>& b) {
  static_assert(kA >= 2 * kB);
  const int n = b.used();
  bool negative = false;
  SYNCBN_NO_UNROLL
  for (int i = 0; i < n && !negative; ++i) {
    std::uint64_t carry = 0;  // of products and borrows
    if (b.limb[i] == 0) {
      continue;
    }
    SYNCBN_NO_UNROLL
    for (int j = 0; j < n; ++j) {
      const unsigned __int128 t = static_cast<unsigned __int128>(b.limb[i]) * b.limb[j] + carry;
      const auto low = static_cast<std::uint64_t>(t);
      carry = static_cast<std::uint64_t>(t >> 64) + (a.limb[i + j] < low ? 1 : 0);
      a.limb[i + j] -= low;
    }
    SYNCBN_NO_UNROLL
    for (int k = i + n; k < kA && carry != 0; ++k) {
      const bool borrow = a.limb[k] < carry;
      a.limb[k] -= carry;
      carry = borrow ? 1 : 0;
    }
    negative = carry != 0;
  }
  SYNCBN_NO_UNROLL
  for (int k = 0; k < kA && negative; ++k) {
    a.limb[k] = 0;
  }
}

}  // namespace syncbn
