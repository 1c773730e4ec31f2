// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "statistics/scalar.hpp"
#include "support.hpp"

namespace syncbn {
namespace {

using testing::Random;
using testing::same_bits;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Sign, exponent and fraction of a 16-bit float with `fraction_bits`, by IEEE 754's definition.
double decoded(std::uint16_t bits, int fraction_bits) {
  const int exponent_bits = 15 - fraction_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  double magnitude;
  if (exponent == (1 << exponent_bits) - 1) {
    magnitude = fraction == 0 ? kInf : kNan;
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, 1 - bias - fraction_bits);
  } else {
    magnitude = std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <class T>
struct Type16;
template <>
struct Type16<Half> {
  static constexpr int kFractionBits = 10;
  static constexpr std::uint16_t kInfinity = 0x7c00;
};
template <>
struct Type16<BFloat16> {
  static constexpr int kFractionBits = 7;
  static constexpr std::uint16_t kInfinity = 0x7f80;
};

/// The pattern nearest to v, ties to even, by search; v finite and not negative.
template <class T>
std::uint16_t nearest(double v) {
  std::uint16_t below = 0;
  for (int bit = 14; bit >= 0; --bit) {
    const auto candidate = static_cast<std::uint16_t>(below | 1 << bit);
    if (candidate < Type16<T>::kInfinity && decoded(candidate, Type16<T>::kFractionBits) <= v) {
      below = candidate;
    }
  }
  const auto above = static_cast<std::uint16_t>(below + 1);
  const double low = decoded(below, Type16<T>::kFractionBits);
  // What the next pattern would stand for if exponents went on: infinity rounds as 2^(max + 1).
  const double high =
      above == Type16<T>::kInfinity
          ? 2 * low - decoded(static_cast<std::uint16_t>(below - 1), Type16<T>::kFractionBits)
          : decoded(above, Type16<T>::kFractionBits);
  const double to_low = v - low;
  const double to_high = high - v;
  return to_low < to_high || (to_low == to_high && below % 2 == 0) ? below : above;
}

template <class T>
class Float16Types : public ::testing::Test {};
using Types16 = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(Float16Types, Types16);

TYPED_TEST(Float16Types, AllPatternsDecodeAndComeBackExact) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const TypeParam v{static_cast<std::uint16_t>(bits)};
    const double expected = decoded(v.bits, Type16<TypeParam>::kFractionBits);
    ASSERT_TRUE(same_bits(to_double(v), expected)) << bits;
    ASSERT_TRUE(same_bits(static_cast<double>(to_float(v)), expected)) << bits;
    TypeParam from_f;
    TypeParam from_d;
    from_float(to_float(v), from_f);
    from_double(expected, from_d);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(to_float(from_f))) << bits;
      ASSERT_TRUE(std::isnan(to_float(from_d))) << bits;
    } else {
      ASSERT_EQ(from_f.bits, bits);
      ASSERT_EQ(from_d.bits, bits);
    }
  }
}

TYPED_TEST(Float16Types, BetweenNeighboursRoundsToNearestEvenExact) {
  constexpr int kFractionBits = Type16<TypeParam>::kFractionBits;
  for (std::uint16_t bits = 0; bits + 1 < Type16<TypeParam>::kInfinity; ++bits) {
    const double low = decoded(bits, kFractionBits);
    const double tie = (low + decoded(static_cast<std::uint16_t>(bits + 1), kFractionBits)) / 2;
    const auto even = static_cast<std::uint16_t>(bits % 2 == 0 ? bits : bits + 1);
    for (const double sign : {1.0, -1.0}) {
      const auto sign_bit = static_cast<std::uint16_t>(sign < 0 ? 0x8000 : 0);
      TypeParam v;
      from_double(sign * tie, v);
      ASSERT_EQ(v.bits, even | sign_bit) << tie;
      from_double(sign * std::nextafter(tie, 0.0), v);
      ASSERT_EQ(v.bits, bits | sign_bit) << tie;
      from_double(sign * std::nextafter(tie, kInf), v);
      ASSERT_EQ(v.bits, (bits + 1) | sign_bit) << tie;
      const auto tie_f = static_cast<float>(tie);  // exact, but for bfloat16's smallest ties
      if (static_cast<double>(tie_f) != tie) {
        continue;
      }
      from_float(static_cast<float>(sign) * tie_f, v);
      ASSERT_EQ(v.bits, even | sign_bit) << tie;
      from_float(static_cast<float>(sign) * std::nextafter(tie_f, 0.0f), v);
      ASSERT_EQ(v.bits, bits | sign_bit) << tie;
      from_float(
          static_cast<float>(sign) * std::nextafter(tie_f, std::numeric_limits<float>::infinity()),
          v);
      ASSERT_EQ(v.bits, (bits + 1) | sign_bit) << tie;
    }
  }
}

TYPED_TEST(Float16Types, RandomDoublesRoundOnceExact) {
  Random random(1);
  for (int i = 0; i < 200000; ++i) {
    const double v = std::ldexp(random.signed_unit(), static_cast<int>(random.between(-160, 140)));
    TypeParam out;
    from_double(v, out);
    const auto expected = static_cast<std::uint16_t>(nearest<TypeParam>(std::fabs(v)) |
                                                     (std::signbit(v) ? 0x8000 : 0));
    const bool overflow =
        (expected & 0x7fff) >= Type16<TypeParam>::kInfinity || std::fabs(v) > 0x1p128;
    const auto infinity =
        static_cast<std::uint16_t>(Type16<TypeParam>::kInfinity | (std::signbit(v) ? 0x8000 : 0));
    ASSERT_EQ(out.bits, overflow ? infinity : expected) << std::hexfloat << v;
  }
}

TYPED_TEST(Float16Types, SpecialValuesExact) {
  TypeParam v;
  from_double(kInf, v);
  EXPECT_EQ(v.bits, Type16<TypeParam>::kInfinity);
  from_double(-kInf, v);
  EXPECT_EQ(v.bits, Type16<TypeParam>::kInfinity | 0x8000);
  from_double(1e300, v);
  EXPECT_EQ(v.bits, Type16<TypeParam>::kInfinity);
  from_double(-1e300, v);
  EXPECT_EQ(v.bits, Type16<TypeParam>::kInfinity | 0x8000);
  from_double(-0.0, v);
  EXPECT_EQ(v.bits, 0x8000);
  from_double(5e-324, v);
  EXPECT_EQ(v.bits, 0);
  from_double(-5e-324, v);
  EXPECT_EQ(v.bits, 0x8000);
  from_double(kNan, v);
  EXPECT_TRUE(std::isnan(to_float(v)));
  from_float(std::numeric_limits<float>::quiet_NaN(), v);
  EXPECT_TRUE(std::isnan(to_float(v)));
  // A NaN whose payload lies in the lowest bit only must not turn into infinity.
  from_float(bit_copy<float>(std::uint32_t{0x7f800001}), v);
  EXPECT_TRUE(std::isnan(to_float(v)));
  from_float(bit_copy<float>(std::uint32_t{0xffffffff}), v);
  EXPECT_TRUE(std::isnan(to_float(v)));
}

TEST(Half, OverflowBeginsAt65520Exact) {
  Half v;
  from_float(65519.996f, v);
  EXPECT_EQ(v.bits, 0x7bff);
  from_float(65520.0f, v);
  EXPECT_EQ(v.bits, 0x7c00);
  from_double(std::nextafter(65520.0, 0.0), v);  // binary32 would make it 65520 first
  EXPECT_EQ(v.bits, 0x7bff);
  from_double(65520.0, v);
  EXPECT_EQ(v.bits, 0x7c00);
}

TEST(Half, RoundingViaBinary32WouldBeDifferentExact) {
  // 1 + 2^-11 is the tie between 1 and 1 + 2^-10; the rest is lost in binary32.
  const double v = 1 + 0x1p-11 + 0x1p-40;
  Half once;
  Half twice;
  from_double(v, once);
  from_float(static_cast<float>(v), twice);
  EXPECT_EQ(once.bits, 0x3c01);
  EXPECT_EQ(twice.bits, 0x3c00);
  from_double(1 + 0x3p-11 - 0x1p-40, once);  // the tie above, from below: 1 + 2^-10, not 1 + 2^-9
  EXPECT_EQ(once.bits, 0x3c01);
  from_double(-(0x1p-25 + 0x1p-60), once);  // subnormal: above half of the smallest
  EXPECT_EQ(once.bits, 0x8001);
  from_double(0x1p-25, once);
  EXPECT_EQ(once.bits, 0);
}

TEST(BFloat16, RoundingViaBinary32WouldBeDifferentExact) {
  BFloat16 once;
  from_double(1 + 0x1p-8 + 0x1p-40, once);
  EXPECT_EQ(once.bits, 0x3f81);
  from_double(1 + 0x1p-8, once);
  EXPECT_EQ(once.bits, 0x3f80);
  from_double(0x1p-134 + 0x1p-180, once);  // above half of the smallest subnormal, 2^-133
  EXPECT_EQ(once.bits, 0x0001);
  from_double(0x1p-134, once);
  EXPECT_EQ(once.bits, 0);
  from_double(std::nextafter(0x1.ffp127, 0.0), once);  // just below the tie with infinity
  EXPECT_EQ(once.bits, 0x7f7f);
  from_double(0x1.ffp127, once);
  EXPECT_EQ(once.bits, 0x7f80);
}

TEST(Scalar, ScaleRoundsOnceExact) {
  // std::ldexp rounds once (IEEE 754 scaleB).
  Random random(2);
  for (int i = 0; i < 200000; ++i) {
    const double v =
        std::ldexp(random.one_in(2) ? 1.0 + std::fabs(random.signed_unit()) : random.signed_unit(),
                   static_cast<int>(random.between(-40, 55)));
    if (std::fabs(v) < 0x1p-60) {
      continue;
    }
    const int exponent = static_cast<int>(random.one_in(3) ? random.between(-1140, -1000)
                                                           : random.between(-2300, 2300));
    ASSERT_TRUE(same_bits(scale(v, exponent), std::ldexp(v, exponent)))
        << std::hexfloat << v << " * 2^" << exponent;
  }
}

TEST(Scalar, ScaleAtItsLimitsExact) {
  for (const double magnitude : {0x1p-60, 0x1.fffffffffffffp-60, 1.0, 0x1.8p0, 0x1.fffffffffffffp0,
                                 0x1.0000000000001p52, 0x1p53, 0x1p60}) {
    for (const double v : {magnitude, -magnitude}) {
      for (int exponent = -2400; exponent <= 2400; ++exponent) {
        ASSERT_TRUE(same_bits(scale(v, exponent), std::ldexp(v, exponent)))
            << std::hexfloat << v << " * 2^" << exponent;
      }
    }
  }
  for (const int exponent : {-2147483647, -3000, -901, 0, 961, 3000, 2147483647}) {
    EXPECT_TRUE(same_bits(scale(0.0, exponent), 0.0));
    EXPECT_TRUE(same_bits(scale(-0.0, exponent), -0.0));
    if (exponent > 2000) {
      EXPECT_EQ(scale(0x1p-60, exponent), kInf);
      EXPECT_EQ(scale(-0x1p-60, exponent), -kInf);
    } else if (exponent < -2000) {
      EXPECT_TRUE(same_bits(scale(0x1p60, exponent), 0.0));
    }
  }
}

TEST(Scalar, PowerOfTwoExact) {
  for (int exponent = -1022; exponent <= 1023; ++exponent) {
    ASSERT_EQ(power_of_two(exponent), std::ldexp(1.0, exponent));
  }
}

TEST(Scalar, TwoSumKeepsTheErrorExact) {
  Random random(3);
  for (int i = 0; i < 100000; ++i) {
    // 60-bit integers: their sum in __int128 is exact.
    const int shift = static_cast<int>(random.between(0, 60));
    const auto a = static_cast<double>(random.between(-(1LL << 53), 1LL << 53));
    const double b =
        std::ldexp(static_cast<double>(random.between(-(1LL << 53), 1LL << 53)), shift);
    const TwoSumResult t = two_sum(a, b);
    ASSERT_EQ(t.sum, a + b);
    const auto exact = static_cast<__int128>(a) + static_cast<__int128>(b);
    ASSERT_TRUE(static_cast<__int128>(t.sum) + static_cast<__int128>(t.error) == exact) << a << b;
    const TwoSumResult swapped = two_sum(b, a);
    ASSERT_EQ(swapped.sum, t.sum);
    ASSERT_EQ(swapped.error, t.error);
  }
  EXPECT_EQ(two_sum(1.0, 0x1p-60).error, 0x1p-60);
  EXPECT_EQ(two_sum(5e-324, 1.0).error, 5e-324);
  EXPECT_EQ(two_sum(1e308, -1e308).sum, 0.0);
}

TEST(Scalar, FiniteExact) {
  EXPECT_TRUE(is_finite(1.7e308));
  EXPECT_TRUE(is_finite(5e-324));
  EXPECT_FALSE(is_finite(kInf));
  EXPECT_FALSE(is_finite(-kInf));
  EXPECT_FALSE(is_finite(kNan));
  EXPECT_FALSE(is_finite(std::numeric_limits<float>::infinity()));
}

}  // namespace
}  // namespace syncbn
