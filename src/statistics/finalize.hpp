// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "statistics/big_uint.hpp"
#include "statistics/dtype.hpp"
#include "statistics/host_device.hpp"
#include "statistics/scalar.hpp"

// docs/numerics.md, sections 3, 5 and 6: from exact sums to statistics and gradients' coefficients.
namespace syncbn {

/// Sizes of an element type's format, so that the integers are no larger than they need to be.
template <class T>
struct FormatTraits {
  static constexpr Format kFormat = ElementTraits<T>::kFormat;
  static constexpr int kWords = kFormat.words();
  static constexpr int kFirstLimbs = (kFormat.first.digits * kDigitBits + 12 + 63) / 64;
  static constexpr int kSecondLimbs = (kFormat.second.digits * kDigitBits + 12 + 63) / 64;
  /// S^2 has the unit 2^-(2 * first.unit), N*Q is shifted to it.
  static constexpr int kShift = 2 * kFormat.first.unit - kFormat.second.unit;
  static constexpr int kVarianceLimbs = kSecondLimbs + (kShift + 63) / 64 + 2 > 2 * kFirstLimbs
                                            ? kSecondLimbs + (kShift + 63) / 64 + 2
                                            : 2 * kFirstLimbs;
};

/// Merged flags of one channel.
struct Flags {
  std::int64_t word;
  SYNCBN_HD_IN_PLACE bool nan() const { return (word & (kFlagCounter * kFirstNan)) != 0; }
  SYNCBN_HD_IN_PLACE bool plus_inf() const { return (word & (kFlagCounter * kFirstPlusInf)) != 0; }
  SYNCBN_HD_IN_PLACE bool minus_inf() const {
    return (word & (kFlagCounter * kFirstMinusInf)) != 0;
  }
  SYNCBN_HD_IN_PLACE bool second() const { return (word & (kFlagCounter * kSecondNonFinite)) != 0; }
  SYNCBN_HD_IN_PLACE bool first() const { return nan() || plus_inf() || minus_inf(); }
  /// What the first sum became: NaN or an infinity. Only if first().
  SYNCBN_HD_IN_PLACE double first_value() const {
    if (nan() || (plus_inf() && minus_inf())) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    const double inf = std::numeric_limits<double>::infinity();
    return plus_inf() ? inf : -inf;
  }
};

/// Brings digits that were summed over ranks back to canonical form.
SYNCBN_HD inline void propagate_carries(const std::int64_t* digits, std::int64_t* out, int count) {
  std::int64_t carry = 0;
  SYNCBN_NO_UNROLL
  for (int i = 0; i < count - 1; ++i) {
    const std::int64_t digit = digits[i] + carry;
    out[i] = digit & kDigitMask;
    carry = digit >> kDigitBits;
  }
  out[count - 1] = digits[count - 1] + carry;
}

SYNCBN_HD inline double rstd_of(double var, double eps) { return 1.0 / std::sqrt(var + eps); }

struct ChannelMoments {
  double mean;
  double var;
  double rstd;
};

/// A rounded integer in the unit 2^-unit.
SYNCBN_HD_IN_PLACE double value_of(bool negative, const Rounded53& v, int unit) {
  return scale(negative ? -v.d : v.d, v.exponent - unit);
}

/// Section 3, from |S| and max(0, N*Q - S^2).
template <class T>
SYNCBN_HD inline ChannelMoments channel_moments(bool negative, const Rounded53& sum,
                                                const Rounded53& difference, std::int64_t count,
                                                Flags flags, double eps) {
  constexpr int kUnit = FormatTraits<T>::kFormat.first.unit;
  const double n = static_cast<double>(count);
  ChannelMoments out;
  out.mean = scale((negative ? -sum.d : sum.d) / n, sum.exponent - kUnit);
  out.var = scale(difference.d / n / n, difference.exponent - 2 * kUnit);
  if (flags.first()) {
    out.mean = flags.first_value();
    out.var = std::numeric_limits<double>::quiet_NaN();
  } else if (flags.second()) {
    out.var = std::numeric_limits<double>::infinity();
  }
  out.rstd = rstd_of(out.var, eps);
  return out;
}

/// Section 3. words: one channel's, summed over ranks. count >= 1.
template <class T>
SYNCBN_HD inline ChannelMoments finalize_channel(const std::int64_t* words, std::int64_t count,
                                                 double eps) {
  using Traits = FormatTraits<T>;
  constexpr Format kFormat = Traits::kFormat;
  std::int64_t digits[kFormat.second.digits];

  propagate_carries(words, digits, kFormat.first.digits);
  BigUint<Traits::kFirstLimbs> sum;
  const bool negative = magnitude_of(digits, kFormat.first.digits, sum);

  propagate_carries(words + kFormat.first.digits, digits, kFormat.second.digits);
  BigUint<Traits::kSecondLimbs> squares;
  magnitude_of(digits, kFormat.second.digits, squares);
  BigUint<Traits::kVarianceLimbs> difference;
  multiply_and_shift(squares, static_cast<std::uint64_t>(count), Traits::kShift, difference);
  subtract_square(difference, sum);
  return channel_moments<T>(negative, round53(sum), round53(difference), count,
                            {words[Traits::kWords - 1]}, eps);
}

/// Section 6. The merged (or one rank's own) sums of u and u*x of a channel, and what follows.
struct ChannelGradients {
  double sum;  ///< A64
  double g;    ///< G
  double dweight;
  double dbias;
  bool flagged;
};

SYNCBN_HD_IN_PLACE ChannelGradients channel_gradients(double sum, double product_sum, Flags flags,
                                                      double mean, double rstd) {
  ChannelGradients out;
  out.sum = sum;
  out.g = std::fma(-mean, sum, product_sum);
  out.dweight = rstd * out.g;
  out.dbias = sum;
  out.flagged = flags.word != 0;
  if (out.flagged) {
    out.dweight = std::numeric_limits<double>::quiet_NaN();
    if (flags.first()) {
      out.dbias = flags.first_value();
    }
  }
  return out;
}

template <class T>
SYNCBN_HD inline ChannelGradients finalize_channel_gradients(const std::int64_t* words, double mean,
                                                             double rstd) {
  using Traits = FormatTraits<T>;
  constexpr Format kFormat = Traits::kFormat;
  std::int64_t digits[kFormat.second.digits];

  propagate_carries(words, digits, kFormat.first.digits);
  BigUint<Traits::kFirstLimbs> first;
  bool negative = magnitude_of(digits, kFormat.first.digits, first);
  const double sum = value_of(negative, round53(first), kFormat.first.unit);

  propagate_carries(words + kFormat.first.digits, digits, kFormat.second.digits);
  BigUint<Traits::kSecondLimbs> second;
  negative = magnitude_of(digits, kFormat.second.digits, second);
  const double product_sum = value_of(negative, round53(second), kFormat.second.unit);

  return channel_gradients(sum, product_sum, {words[Traits::kWords - 1]}, mean, rstd);
}

struct Coefficients {
  double c1;
  double c2;
  double c3;
};

SYNCBN_HD_IN_PLACE Coefficients coefficients_of(const ChannelGradients& gradients, double weight,
                                                double rstd, std::int64_t count) {
  if (count == 0) {
    return {0.0, 0.0, 0.0};
  }
  if (gradients.flagged) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    return {nan, nan, nan};
  }
  const double n = static_cast<double>(count);
  const double w = weight * rstd;
  return {w, -((w * rstd * rstd) * (gradients.g / n)), -(w * (gradients.sum / n))};
}

/// Section 5. By what the batch variance is multiplied before the running statistics take it.
SYNCBN_HD inline double unbiased_factor(std::int64_t count) {
  const double n = static_cast<double>(count);
  return count <= 1 ? 1.0 : n / (n - 1.0);
}
SYNCBN_HD inline double unbiased(double var, std::int64_t count) {
  return var * unbiased_factor(count);
}

SYNCBN_HD_IN_PLACE double running_update(double running, double value, double factor) {
  return std::fma(factor, value, (1.0 - factor) * running);
}

/// Section 4, per channel, for inputs of at most 32 bits: y = fma(a, (x - mean_high) - mean_low,
/// b).
struct AffineF32 {
  float mean_high;
  float mean_low;
  float a;
  float b;
};

SYNCBN_HD_IN_PLACE void split_mean(double mean, float& high, float& low) {
  high = static_cast<float>(mean);
  const auto rest = static_cast<float>(mean - static_cast<double>(high));
  low = is_finite(high) ? rest : 0.0f;
}

SYNCBN_HD_IN_PLACE AffineF32 affine_f32(double mean, double rstd, double weight, double bias) {
  AffineF32 out;
  split_mean(mean, out.mean_high, out.mean_low);
  out.a = static_cast<float>(weight * rstd);
  out.b = static_cast<float>(bias);
  return out;
}

/// Section 6, per channel, for inputs of at most 32 bits:
/// dx = fma(c1, u, fma(c2, t * power, c3)), t = (x - mean_high) - mean_low.
struct GradientF32 {
  float mean_high;
  float mean_low;
  float c1;
  float c2;
  float c3;
  float power;
};

/// floor(log2 v) clamped to the exponents of normal binary32 numbers; 0 for 0, infinities and NaN.
SYNCBN_HD_IN_PLACE int clamped_exponent(double v) {
  // Infinities have the exponent 1024. Without branches, so that compilers can make vectors of it.
  const int exponent = static_cast<int>(bit_copy<std::uint64_t>(v) >> 52 & 0x7ff) - 1023;
  const int clamped = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
  return (static_cast<int>(v > 0) & static_cast<int>(exponent < 1024)) != 0 ? clamped : 0;
}

SYNCBN_HD_IN_PLACE GradientF32 gradient_f32(double mean, double rstd, const Coefficients& c) {
  GradientF32 out;
  split_mean(mean, out.mean_high, out.mean_low);
  const int exponent = clamped_exponent(rstd);
  out.c1 = static_cast<float>(c.c1);
  out.c2 = static_cast<float>(c.c2 * power_of_two(-exponent));
  out.c3 = static_cast<float>(c.c3);
  out.power = static_cast<float>(power_of_two(exponent));
  return out;
}

}  // namespace syncbn
