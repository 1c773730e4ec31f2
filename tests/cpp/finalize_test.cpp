// SPDX-License-Identifier: Apache-2.0
#include "statistics/finalize.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

// The coefficients of sections 4 and 6 of docs/numerics.md at the ends of binary32. tests/fuzz has
// the statistics and gradients of any sums.
namespace syncbn {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

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

}  // namespace
}  // namespace syncbn
