// SPDX-License-Identifier: Apache-2.0
#include "statistics/finalize.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "statistics/dtype.hpp"
#include "support.hpp"
#include "wide_integer.hpp"

// Sections 3, 5 and 6 of docs/numerics.md on cases whose sums are known as integers.
namespace syncbn {
namespace {

using testing::ElementOf;
using testing::Random;
using testing::same_bits;
using testing::Wide;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <DType kDtype>
std::vector<std::int64_t> words_of(const Wide& first, const Wide& second, std::int64_t flags = 0) {
  const Format& format = format_of(kDtype);
  std::vector<std::int64_t> words(static_cast<std::size_t>(format.words()));
  first.to_digits(words.data(), format.first.digits);
  second.to_digits(words.data() + format.first.digits, format.second.digits);
  words.back() = flags;
  return words;
}

/// Words of a channel with these elements; their sums must fit binary64 exactly.
template <DType kDtype>
std::vector<std::int64_t> moments_of(const std::vector<double>& values) {
  Wide first;
  Wide second;
  for (const double v : values) {
    first += Wide::in_units(v, format_of(kDtype).first.unit);
    second += Wide::in_units(v * v, format_of(kDtype).second.unit);
  }
  return words_of<kDtype>(first, second);
}

template <DType kDtype>
ChannelMoments finalized(const std::vector<double>& values, double eps = 0.0) {
  return finalize_channel<ElementOf<kDtype>>(moments_of<kDtype>(values).data(),
                                             static_cast<std::int64_t>(values.size()), eps);
}

template <class Tag>
class Finalize : public ::testing::Test {};
template <DType kDtype>
struct Tag {
  static constexpr DType kValue = kDtype;
};
using Tags = ::testing::Types<Tag<DType::kFloat16>, Tag<DType::kFloat32>, Tag<DType::kFloat64>>;
TYPED_TEST_SUITE(Finalize, Tags);

TYPED_TEST(Finalize, SmallRationalsExact) {
  constexpr DType kDtype = TypeParam::kValue;
  ChannelMoments m = finalized<kDtype>({1, 2, 3, 4}, 0.75);
  EXPECT_EQ(m.mean, 2.5);
  EXPECT_EQ(m.var, 1.25);
  EXPECT_EQ(m.rstd, 1 / std::sqrt(2.0));
  m = finalized<kDtype>({0, 0, 1});
  EXPECT_EQ(m.mean, 1.0 / 3);
  EXPECT_EQ(m.var, 2.0 / 3 / 3);
  EXPECT_EQ(m.rstd, 1 / std::sqrt(2.0 / 3 / 3));
  m = finalized<kDtype>({-1.5, 0, 0, 0, 0.25, 0.25, 0.5});
  EXPECT_EQ(m.mean, -0.5 / 7);
  EXPECT_EQ(m.var, (7 * 2.625 - 0.25) / 7 / 7);
  m = finalized<kDtype>({-3, 3});
  EXPECT_TRUE(same_bits(m.mean, 0.0));
  EXPECT_EQ(m.var, 9.0);
}

TYPED_TEST(Finalize, OffsetsDoNotLoseTheVarianceExact) {
  constexpr DType kDtype = TypeParam::kValue;
  // 1e4 and neighbours at distance 8, float16's last place there.
  const ChannelMoments m = finalized<kDtype>({10000, 10008, 9992, 10000, 10008, 9992});
  EXPECT_EQ(m.mean, 10000.0);
  EXPECT_EQ(m.var, 256.0 / 6);
}

TYPED_TEST(Finalize, ConstantChannelHasNoVarianceExact) {
  constexpr DType kDtype = TypeParam::kValue;
  for (const double v : {0x1p-14, 0x1p-24, 1.0, -0x1.ffcp15, 0x1.554p-2}) {
    for (const std::size_t n : {1u, 2u, 3u, 7u, 1000u}) {
      const ChannelMoments m = finalized<kDtype>(std::vector<double>(n, v), 1e-5);
      ASSERT_EQ(m.mean, v);
      ASSERT_TRUE(same_bits(m.var, 0.0));
      ASSERT_EQ(m.rstd, 1 / std::sqrt(1e-5));
    }
  }
  EXPECT_EQ(finalized<kDtype>({2, 2}).rstd, kInf);  // eps = 0
}

TYPED_TEST(Finalize, NegativeVarianceIsZeroExact) {
  constexpr DType kDtype = TypeParam::kValue;
  // Sums of partials that were rounded upwards can give N * Q < S^2.
  const auto words = words_of<kDtype>(Wide::in_units(2, format_of(kDtype).first.unit),
                                      Wide::in_units(3, format_of(kDtype).second.unit));
  const ChannelMoments m = finalize_channel<ElementOf<kDtype>>(words.data(), 1, 1e-5);
  EXPECT_EQ(m.mean, 2.0);
  EXPECT_TRUE(same_bits(m.var, 0.0));
}

TYPED_TEST(Finalize, ManyRanksWithTheSameWordsExact) {
  constexpr DType kDtype = TypeParam::kValue;
  const std::vector<double> values = {-1.5, 0.125, 3, 100, -2048.25, 0.75, 1};
  const ChannelMoments one = finalized<kDtype>(values, 1e-5);
  for (const std::int64_t ranks : {2, 64, 2048}) {  // powers of two scale every step exactly
    std::vector<std::int64_t> words = moments_of<kDtype>(values);
    for (std::int64_t& word : words) {
      word *= ranks;
    }
    const ChannelMoments all = finalize_channel<ElementOf<kDtype>>(words.data(), 7 * ranks, 1e-5);
    EXPECT_EQ(all.mean, one.mean);
    EXPECT_EQ(all.var, one.var);
    EXPECT_EQ(all.rstd, one.rstd);
  }
}

TYPED_TEST(Finalize, LargestCountExact) {
  constexpr DType kDtype = TypeParam::kValue;
  // 2^35 elements 3 and 2^35 elements -1.
  const Wide first = Wide::in_units(0x1p36, format_of(kDtype).first.unit);
  const Wide second = Wide::in_units(10 * 0x1p35, format_of(kDtype).second.unit);
  const auto words = words_of<kDtype>(first, second);
  const ChannelMoments m =
      finalize_channel<ElementOf<kDtype>>(words.data(), std::int64_t{1} << 36, 0);
  EXPECT_EQ(m.mean, 1.0);
  EXPECT_EQ(m.var, 4.0);
}

TYPED_TEST(Finalize, FlagRulesExact) {
  constexpr DType kDtype = TypeParam::kValue;
  const struct {
    std::int64_t flags;
    double mean;
    double var;
  } cases[] = {
      {0, 1.0, 2.0 / 3},
      {kFirstNan, kNan, kNan},
      {kFirstPlusInf, kInf, kNan},
      {kFirstMinusInf, -kInf, kNan},
      {kFirstPlusInf + kFirstMinusInf, kNan, kNan},
      {kFirstPlusInf + kFirstNan, kNan, kNan},
      {kFirstMinusInf + kFirstNan + kSecondNonFinite, kNan, kNan},
      {kFirstPlusInf + kSecondNonFinite, kInf, kNan},
      {kSecondNonFinite, 1.0, kInf},
      // Counters of 2048 ranks.
      {2048 * kFirstNan, kNan, kNan},
      {2048 * kFirstPlusInf, kInf, kNan},
      {2048 * kFirstMinusInf, -kInf, kNan},
      {2048 * kSecondNonFinite, 1.0, kInf},
      {2048 * (kFirstPlusInf + kSecondNonFinite) + 3 * kFirstMinusInf, kNan, kNan},
  };
  for (const auto& one : cases) {
    auto words = moments_of<kDtype>({0, 1, 2});
    words.back() = one.flags;
    const ChannelMoments m = finalize_channel<ElementOf<kDtype>>(words.data(), 3, 1e-5);
    EXPECT_TRUE(same_bits(m.mean, one.mean)) << one.flags;
    EXPECT_TRUE(same_bits(m.var, one.var)) << one.flags;
    const double rstd = one.var == kInf ? 0.0 : 1 / std::sqrt(one.var + 1e-5);
    EXPECT_TRUE(same_bits(m.rstd, rstd)) << one.flags;

    const ChannelGradients g =
        finalize_channel_gradients<ElementOf<kDtype>>(words.data(), 0.5, 2.0);
    const bool first = one.flags != 0 && !same_bits(one.mean, 1.0);
    EXPECT_TRUE(same_bits(g.dweight, one.flags == 0 ? 2 * (-0.5 * 3 + 5) : kNan)) << one.flags;
    EXPECT_TRUE(same_bits(g.dbias, first ? one.mean : 3.0)) << one.flags;
    const Coefficients k = coefficients_of(g, 1.0, 2.0, 3);
    EXPECT_EQ(std::isnan(k.c1), one.flags != 0);
    EXPECT_EQ(std::isnan(k.c2), one.flags != 0);
    EXPECT_EQ(std::isnan(k.c3), one.flags != 0);
  }
}

/// An integer of at most 126 bits rounded to 53 bits, as a double times 2^exponent.
double rounded53(unsigned __int128 v, int& exponent) {
  exponent = 0;
  unsigned __int128 kept = v;
  while (kept >> 53 != 0) {
    kept >>= 1;
    ++exponent;
  }
  const unsigned __int128 rest = v - (kept << exponent);
  const unsigned __int128 half =
      exponent == 0 ? 1 : static_cast<unsigned __int128>(1) << (exponent - 1);
  kept += static_cast<unsigned>(rest > half || (rest == half && (kept & 1) != 0));
  return static_cast<double>(static_cast<std::uint64_t>(kept));
}

TEST(FinalizeHalf, RandomSumsAgainst128BitIntegersExact) {
  Random random(30);
  for (int i = 0; i < 100000; ++i) {
    const auto count = random.between(1, std::int64_t{1} << random.between(0, 20));
    const std::int64_t sum = random.between(-(1LL << 56), 1LL << 56) >> random.between(0, 56);
    // Q at least S^2 / N, sometimes barely, sometimes too small.
    const auto square = static_cast<unsigned __int128>(static_cast<__int128>(sum) * sum);
    auto squares = square / static_cast<std::uint64_t>(count);
    if (random.one_in(2)) {
      squares += static_cast<unsigned __int128>(random.bits() >> random.between(0, 63)) << 30;
    } else {
      squares += static_cast<unsigned __int128>(random.between(0, 3));
    }
    if (squares >> 100 != 0) {
      continue;
    }
    const Wide wide_squares =
        (Wide(static_cast<std::int64_t>(squares >> 62)) << 62) +
        Wide(static_cast<std::int64_t>(squares & ((static_cast<unsigned __int128>(1) << 62) - 1)));
    const auto words = words_of<DType::kFloat16>(Wide(sum), wide_squares);
    const ChannelMoments m =
        finalize_channel<ElementOf<DType::kFloat16>>(words.data(), count, 1e-3);

    const auto n = static_cast<double>(count);
    int k = 0;
    const double s = rounded53(static_cast<unsigned __int128>(sum < 0 ? -sum : sum), k);
    ASSERT_EQ(m.mean, std::ldexp((sum < 0 ? -s : s) / n, k - 24));
    const auto product = squares * static_cast<std::uint64_t>(count);
    const double d = rounded53(product > square ? product - square : 0, k);
    ASSERT_EQ(m.var, std::ldexp(d / n / n, k - 48));
    ASSERT_EQ(m.rstd, 1 / std::sqrt(m.var + 1e-3));
  }
}

TEST(FinalizeSingle, ExtremesExact) {
  constexpr DType kDtype = DType::kFloat32;
  constexpr double kMax = 0x1.fffffep127;
  ChannelMoments m = finalized<kDtype>({kMax, -kMax});
  EXPECT_EQ(m.mean, 0.0);
  EXPECT_EQ(m.var, kMax * kMax);
  m = finalized<kDtype>({kMax, kMax, kMax, -kMax});
  EXPECT_EQ(m.mean, kMax / 2);
  EXPECT_EQ(m.var, 0.75 * kMax * kMax);
  m = finalized<kDtype>({0x1p-149, 0, 0, -0x3p-149});
  EXPECT_EQ(m.mean, -0x1p-150);
  EXPECT_EQ(m.var, 9.0 / 4 * 0x1p-298);
}

TEST(FinalizeDouble, ExtremesExact) {
  constexpr DType kDtype = DType::kFloat64;
  // mean subnormal, rounded once: 3 units of 2^-1074 over 2 elements, a tie that goes to even.
  ChannelMoments m = finalized<kDtype>({0x3p-1074, 0});
  EXPECT_EQ(m.mean, 0x2p-1074);
  m = finalized<kDtype>({0x1p-1074, 0, 0});
  EXPECT_TRUE(same_bits(m.mean, 0.0));
  m = finalized<kDtype>({-0x1p-1074, 0, 0});
  EXPECT_TRUE(same_bits(m.mean, -0.0));
  m = finalized<kDtype>({0x1p1023, 0x1p1023});
  EXPECT_EQ(m.mean, 0x1p1023);
  // Squares of small values are below the unit: Q as a lane would have it, N * Q < S^2.
  m = finalized<kDtype>({0x1p-600, 0x1p-600});
  EXPECT_EQ(m.mean, 0x1p-600);
  EXPECT_TRUE(same_bits(m.var, 0.0));
  m = finalized<kDtype>({0x1p500, -0x1p500, 0x1p500, -0x1p500});
  EXPECT_EQ(m.mean, 0.0);
  EXPECT_EQ(m.var, 0x1p1000);
}

TYPED_TEST(Finalize, GradientsExact) {
  constexpr DType kDtype = TypeParam::kValue;
  // A = -2.5, B = 10.25
  const auto words = words_of<kDtype>(Wide::in_units(-2.5, format_of(kDtype).first.unit),
                                      Wide::in_units(10.25, format_of(kDtype).second.unit));
  const double mean = 1.0 / 3;
  const double rstd = 0.7;
  const ChannelGradients g =
      finalize_channel_gradients<ElementOf<kDtype>>(words.data(), mean, rstd);
  EXPECT_EQ(g.sum, -2.5);
  EXPECT_EQ(g.g, std::fma(-mean, -2.5, 10.25));
  EXPECT_EQ(g.dweight, rstd * g.g);
  EXPECT_EQ(g.dbias, -2.5);
  EXPECT_FALSE(g.flagged);
  const double weight = 1.1;
  const Coefficients k = coefficients_of(g, weight, rstd, 3);
  const double w = weight * rstd;
  EXPECT_EQ(k.c1, w);
  EXPECT_EQ(k.c2, -(((w * rstd) * rstd) * (g.g / 3)));
  EXPECT_EQ(k.c3, -(w * (-2.5 / 3)));
  const Coefficients none = coefficients_of(g, weight, rstd, 0);
  EXPECT_TRUE(same_bits(none.c1, 0.0) && same_bits(none.c2, 0.0) && same_bits(none.c3, 0.0));

  const auto zero = words_of<kDtype>(Wide(), Wide());
  const ChannelGradients empty =
      finalize_channel_gradients<ElementOf<kDtype>>(zero.data(), mean, rstd);
  EXPECT_TRUE(same_bits(empty.dweight, 0.0));
  EXPECT_TRUE(same_bits(empty.dbias, 0.0));
}

TEST(FinalizeSingle, GradientSumsAreRoundedOnceExact) {
  // A = 2^53 + 1 units: a tie, to even; B = -(2^53 + 3) units: a tie, to even.
  const auto words =
      words_of<DType::kFloat32>((Wide(1) << 53) + Wide(1), -((Wide(1) << 53) + Wide(3)));
  const ChannelGradients g =
      finalize_channel_gradients<ElementOf<DType::kFloat32>>(words.data(), 0.0, 1.0);
  EXPECT_EQ(g.dbias, std::ldexp(0x1p53, -149));
  EXPECT_EQ(g.dweight, std::ldexp(-0x1p53 - 4, -298));
}

TEST(Coefficients, ClampedExponentExact) {
  for (int e = -1022; e <= 1023; ++e) {
    const int clamped = e < -126 ? -126 : e > 127 ? 127 : e;
    const double power = std::ldexp(1.0, e);
    ASSERT_EQ(clamped_exponent(power), clamped);
    ASSERT_EQ(clamped_exponent(std::nextafter(2 * power, 0.0)), clamped);
  }
  EXPECT_EQ(clamped_exponent(5e-324), -126);
  EXPECT_EQ(clamped_exponent(0.0), 0);
  EXPECT_EQ(clamped_exponent(kInf), 0);
  EXPECT_EQ(clamped_exponent(kNan), 0);
}

TEST(Coefficients, Binary32FormExact) {
  const GradientF32 p = gradient_f32(1.0 / 3, 0x1.8p20, {0.1, 0x1.2p70, -0.3});
  EXPECT_EQ(p.mean_high, 1.0f / 3);
  EXPECT_EQ(p.mean_low, static_cast<float>(1.0 / 3 - static_cast<double>(1.0f / 3)));
  EXPECT_EQ(p.c1, 0.1f);
  EXPECT_EQ(p.c2, 0x1.2p50f);
  EXPECT_EQ(p.c3, -0.3f);
  EXPECT_EQ(p.power, 0x1p20f);
  const AffineF32 a = affine_f32(1e39, 0.1, 3.0, 0.7);  // the mean does not fit binary32
  EXPECT_EQ(a.mean_high, std::numeric_limits<float>::infinity());
  EXPECT_EQ(a.mean_low, 0.0f);
  EXPECT_EQ(a.a, static_cast<float>(3.0 * 0.1));
  EXPECT_EQ(a.b, 0.7f);
  EXPECT_EQ(affine_f32(kNan, 1, 1, 0).mean_low, 0.0f);
}

TEST(Running, UpdateExact) {
  Random random(31);
  for (int i = 0; i < 1000; ++i) {
    const double running = 100 * random.signed_unit();
    const double value = 100 * random.signed_unit();
    const double f = std::fabs(random.signed_unit());
    ASSERT_EQ(running_update(running, value, f), std::fma(f, value, (1 - f) * running));
    ASSERT_EQ(running_update(running, value, 0), running);
    ASSERT_EQ(running_update(running, value, 1), value);
  }
  EXPECT_EQ(unbiased(0.7, 1), 0.7);
  EXPECT_EQ(unbiased(0.7, 2), 1.4);
  EXPECT_EQ(unbiased(0.7, 7), 0.7 * (7.0 / 6.0));
}

}  // namespace
}  // namespace syncbn
