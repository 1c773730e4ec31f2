// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

// 16-bit floating-point types as PTX has them: values in binary64, rounded once, to nearest even.
namespace syncbn::ptx {

/// kDigits of the significand with the hidden one, kLowest the exponent of the smallest subnormal.
template <int kDigits, int kLowest, int kExponentBits>
struct Narrow {
  static constexpr std::uint16_t kNan = 0x7fff;

  static double widen(std::uint16_t bits) {
    constexpr unsigned kFraction = kDigits - 1;
    const unsigned fraction = bits & ((1u << kFraction) - 1);
    const unsigned exponent = bits >> kFraction & ((1u << kExponentBits) - 1);
    double value = 0;
    if (exponent == (1u << kExponentBits) - 1) {
      value = fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                            : std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
      value = std::ldexp(fraction, kLowest);
    } else {
      value = std::ldexp((1u << kFraction) + fraction, static_cast<int>(exponent) - 1 + kLowest);
    }
    return (bits & 0x8000) != 0 ? -value : value;
  }
  static std::uint16_t round(double value) {
    if (value != value) {
      return kNan;
    }
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    constexpr unsigned kFraction = kDigits - 1;
    constexpr unsigned kInfinity = ((1u << kExponentBits) - 1) << kFraction;
    const double size = std::fabs(value);
    if (size == 0) {
      return sign;
    }
    if (std::isinf(size)) {
      return static_cast<std::uint16_t>(sign | kInfinity);
    }
    int unit = std::ilogb(size) - (kDigits - 1);  // the exponent of the last place
    unit = unit < kLowest ? kLowest : unit;
    const double scaled = std::nearbyint(std::ldexp(size, -unit));  // exact but for the rounding
    // Counting up from the first number with this exponent carries into the next by itself.
    const auto places = static_cast<std::uint64_t>(scaled);
    const std::uint64_t bits = places + (static_cast<std::uint64_t>(unit - kLowest) << kFraction);
    return static_cast<std::uint16_t>(sign | (bits >= kInfinity ? kInfinity : bits));
  }
};
using HalfFormat = Narrow<11, -24, 5>;
using BfloatFormat = Narrow<8, -133, 8>;

}  // namespace syncbn::ptx
