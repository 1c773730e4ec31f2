// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "statistics/host_device.hpp"

// Scalar types and operations of the contract: 16-bit floats, fma, error-free addition, powers
// of 2.
namespace syncbn {

template <class To, class From>
SYNCBN_HD_IN_PLACE To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

/// The bits of an option that ranks compare; -0 is 0. In integers, whatever mode the process is in.
SYNCBN_HD_IN_PLACE std::uint64_t option_bits(double v) {
  const auto bits = bit_copy<std::uint64_t>(v);
  return bits << 1 == 0 ? 0 : bits;
}

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

SYNCBN_HD inline float to_float(float v) { return v; }

SYNCBN_HD inline float to_float(BFloat16 v) {
#if defined(__CUDA_ARCH__)
  float exact;  // one instruction also from the upper half of a register
  asm("mov.b32 %0, {0, %1};" : "=f"(exact) : "h"(v.bits));
  return exact;
#else
  return bit_copy<float>(static_cast<std::uint32_t>(v.bits) << 16);
#endif
}

SYNCBN_HD inline float to_float(Half v) {
#if defined(__CUDA_ARCH__)
  float exact;
  asm("cvt.f32.f16 %0, %1;" : "=f"(exact) : "h"(v.bits));
  return exact;
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(v.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (v.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = v.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in float
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return bit_copy<float>(bit_copy<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return bit_copy<float>(sign | wide << 23 | fraction << 13);
#endif
}

/// Round to nearest even; NaN stays NaN.
SYNCBN_HD inline void from_float(float v, float& out) { out = v; }

SYNCBN_HD inline void from_float(float v, BFloat16& out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(v));
#else
  const std::uint32_t b = bit_copy<std::uint32_t>(v);
  if ((b & 0x7fffffffu) > 0x7f800000u) {
    out.bits = static_cast<std::uint16_t>(b >> 16 | 0x40u);
    return;
  }
  out.bits = static_cast<std::uint16_t>((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
#endif
}

SYNCBN_HD inline void from_float(float v, Half& out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(v));
#else
  const std::uint32_t b = bit_copy<std::uint32_t>(v);
  const std::uint32_t sign = b >> 16 & 0x8000u;
  const std::uint32_t a = b & 0x7fffffffu;
  std::uint32_t h;
  if (a > 0x7f800000u) {
    h = 0x7e00u;
  } else if (a >= 0x477ff000u) {  // 65520 and above round to infinity
    h = 0x7c00u;
  } else if (a < 0x38800000u) {  // below 2^-14: a multiple of 2^-24 after rounding
    // Adding 0.5 puts the unit 2^-24 at the last place, so the addition rounds to nearest even.
    const float shifted = bit_copy<float>(a) + 0.5f;
    h = bit_copy<std::uint32_t>(shifted) - 0x3f000000u;
  } else {
    h = (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13;
  }
  out.bits = static_cast<std::uint16_t>(sign | h);
#endif
}

SYNCBN_HD inline double to_double(float v) { return static_cast<double>(v); }
SYNCBN_HD inline double to_double(double v) { return v; }
SYNCBN_HD inline double to_double(Half v) { return static_cast<double>(to_float(v)); }
SYNCBN_HD inline double to_double(BFloat16 v) { return static_cast<double>(to_float(v)); }

/// One rounding from binary64, also for 16-bit types (via binary32 rounded to odd).
template <class T>
SYNCBN_HD inline void from_double(double v, T& out) {
  float f = static_cast<float>(v);
  const double back = static_cast<double>(f);
  if (back != v && v - v == 0) {  // inexact and finite
    const std::uint32_t b = bit_copy<std::uint32_t>(f);
    if ((b & 1u) == 0) {  // round to odd: step to the neighbour on v's side
      const bool away = (v > back) == (v > 0);
      f = bit_copy<float>(away ? b + 1u : b - 1u);
    }
  }
  from_float(f, out);
}
SYNCBN_HD inline void from_double(double v, float& out) { out = static_cast<float>(v); }
SYNCBN_HD inline void from_double(double v, double& out) { out = v; }

/// 2^exponent, exponent in -1022..1023.
SYNCBN_HD_IN_PLACE double power_of_two(int exponent) {
  return bit_copy<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

/// RN(v * 2^exponent) with one rounding, for 2^-60 <= |v| <= 2^60 or v = 0 and any exponent.
SYNCBN_HD inline double scale(double v, int exponent) {
  if (exponent > 960) {
    v *= 0x1p960;
    exponent -= 960;
    return v * power_of_two(exponent > 1023 ? 1023 : exponent);
  }
  if (exponent < -900) {  // the first product is exact, the second one rounds
    v *= 0x1p-900;
    exponent += 900;
    return v * power_of_two(exponent < -1022 ? -1022 : exponent);
  }
  return v * power_of_two(exponent);
}

/// Leading zero bits of v, which is not 0.
SYNCBN_HD inline int leading_zeros(std::uint64_t v) {
#if defined(__CUDA_ARCH__)
  return __clzll(static_cast<long long>(v));
#else
  return __builtin_clzll(v);
#endif
}

SYNCBN_HD_IN_PLACE bool is_finite(double v) { return v - v == 0; }
SYNCBN_HD_IN_PLACE bool is_finite(float v) { return v - v == 0; }

/// Knuth's TwoSum: sum + error == a + b.
struct TwoSumResult {
  double sum;
  double error;
};
SYNCBN_HD inline TwoSumResult two_sum(double a, double b) {
  const double sum = a + b;
  const double b_part = sum - a;
  const double a_part = sum - b_part;
  return {sum, (a - a_part) + (b - b_part)};
}

}  // namespace syncbn
