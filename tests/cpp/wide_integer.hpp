// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plain integer of 4,608 bits, two's complement, to check the library's own against.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace syncbn::testing {

class Wide {
 public:
  Wide() = default;
  Wide(std::int64_t value) {  // NOLINT: integers convert as they do to any other integer
    limbs_.fill(value < 0 ? ~std::uint64_t{0} : 0);
    limbs_[0] = static_cast<std::uint64_t>(value);
  }
  /// value / 2^-unit; value must be a multiple of 2^-unit.
  static Wide in_units(double value, int unit) {
    int exponent = 0;
    const auto mantissa = static_cast<std::int64_t>(std::ldexp(std::frexp(value, &exponent), 53));
    const int shift = exponent - 53 + unit;
    return shift >= 0 ? Wide(mantissa) << shift : Wide(mantissa / (std::int64_t{1} << -shift));
  }
  /// sum of digits[i] * 2^(bits * i).
  static Wide from_digits(const std::int64_t* digits, int count, int bits = 52) {
    Wide sum;
    for (int i = 0; i < count; ++i) {
      sum += Wide(digits[i]) << (bits * i);
    }
    return sum;
  }
  static Wide from_limbs(const std::uint64_t* limbs, int count) {
    Wide out;
    for (int i = 0; i < count; ++i) {
      out.limbs_[static_cast<std::size_t>(i)] = limbs[i];
    }
    return out;
  }

  bool negative() const { return limbs_.back() >> 63 != 0; }
  bool bit(int i) const { return (limbs_[static_cast<std::size_t>(i / 64)] >> (i % 64) & 1) != 0; }
  /// Bits of a value that is not negative.
  int bit_length() const {
    int n = kBits;
    while (n > 0 && !bit(n - 1)) {
      --n;
    }
    return n;
  }

  friend bool operator==(const Wide&, const Wide&) = default;
  Wide& operator+=(const Wide& other) {
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < kLimbs; ++i) {
      const unsigned __int128 t =
          static_cast<unsigned __int128>(limbs_[i]) + other.limbs_[i] + carry;
      limbs_[i] = static_cast<std::uint64_t>(t);
      carry = static_cast<std::uint64_t>(t >> 64);
    }
    return *this;
  }
  friend Wide operator+(Wide a, const Wide& b) { return a += b; }
  Wide operator-() const {
    Wide out;
    for (std::size_t i = 0; i < kLimbs; ++i) {
      out.limbs_[i] = ~limbs_[i];
    }
    return out += Wide(1);
  }
  friend Wide operator-(const Wide& a, const Wide& b) { return a + -b; }
  friend Wide operator<<(const Wide& a, int shift) {
    Wide out;
    const auto limbs = static_cast<std::size_t>(shift / 64);
    const int bits = shift % 64;
    for (std::size_t i = limbs; i < kLimbs; ++i) {
      out.limbs_[i] = a.limbs_[i - limbs] << bits;
      if (bits != 0 && i > limbs) {
        out.limbs_[i] |= a.limbs_[i - limbs - 1] >> (64 - bits);
      }
    }
    return out;
  }
  friend Wide operator*(const Wide& a, const Wide& b) {
    Wide out;
    for (std::size_t i = 0; i < kLimbs; ++i) {
      std::uint64_t carry = 0;
      for (std::size_t j = 0; i + j < kLimbs && a.limbs_[i] != 0; ++j) {
        const unsigned __int128 t =
            static_cast<unsigned __int128>(a.limbs_[i]) * b.limbs_[j] + out.limbs_[i + j] + carry;
        out.limbs_[i + j] = static_cast<std::uint64_t>(t);
        carry = static_cast<std::uint64_t>(t >> 64);
      }
    }
    return out;
  }

  /// As `count` digits of 52 bits, all but the top one in [0, 2^52), the top one signed.
  void to_digits(std::int64_t* digits, int count) const {
    for (int i = 0; i < count; ++i) {
      const int position = 52 * i;
      const auto limb = static_cast<std::size_t>(position / 64);
      const int shift = position % 64;
      std::uint64_t word = limbs_[limb] >> shift;
      if (shift != 0) {
        word |= limbs_[limb + 1] << (64 - shift);
      }
      digits[i] = static_cast<std::int64_t>(i < count - 1 ? word & ((1ULL << 52) - 1) : word);
    }
  }

 private:
  static constexpr std::size_t kLimbs = 72;
  static constexpr int kBits = 64 * static_cast<int>(kLimbs);
  std::array<std::uint64_t, kLimbs> limbs_{};
};

}  // namespace syncbn::testing
