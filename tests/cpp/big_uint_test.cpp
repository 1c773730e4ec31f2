// SPDX-License-Identifier: Apache-2.0
#include "statistics/big_uint.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "support.hpp"
#include "wide_integer.hpp"

namespace syncbn {
namespace {

using testing::Random;
using testing::Wide;

template <int kLimbs>
Wide wide(const BigUint<kLimbs>& v) {
  return Wide::from_limbs(v.limb, kLimbs);
}

/// A number of at most `bits` bits with runs of zeros and ones, where carries and ties live.
template <int kLimbs>
BigUint<kLimbs> random_integer(Random& random, std::int64_t bits) {
  BigUint<kLimbs> out;
  bool one = true;
  for (auto i = random.between(0, bits) - 1; i >= 0;) {
    for (auto run = random.one_in(2) ? 1 : random.between(1, 90); run > 0 && i >= 0; --run, --i) {
      if (one) {
        out.limb[i / 64] |= std::uint64_t{1} << (i % 64);
      }
    }
    one = !one;
  }
  return out;
}

/// v rounded to 53 significant bits by the definition: truncate, look at what is left.
double rounded(const Wide& v, int& exponent) {
  const int length = v.bit_length();
  exponent = length - 53;
  std::uint64_t kept = 0;
  for (int i = length - 1; i >= length - 53; --i) {
    kept = kept << 1 | static_cast<std::uint64_t>(i >= 0 && v.bit(i));
  }
  if (exponent > 0 && v.bit(exponent - 1)) {
    bool tie = true;
    for (int i = 0; i < exponent - 1; ++i) {
      tie = tie && !v.bit(i);
    }
    kept += static_cast<std::uint64_t>(!tie || (kept & 1) != 0);
  }
  return static_cast<double>(kept);
}

/// d * 2^exponent may be written with d = 2^53 or d = 2^52.
template <int kLimbs>
void expect_rounded(const BigUint<kLimbs>& v) {
  const Rounded53 r = round53(v);
  if (v.used() == 0) {
    ASSERT_EQ(r.d, 0.0);
    return;
  }
  ASSERT_GE(r.d, 0x1p52);
  ASSERT_LE(r.d, 0x1p53);
  int exponent = 0;
  double d = rounded(wide(v), exponent);
  if (r.d == 0x1p52 && d == 0x1p53) {
    d /= 2;
    ++exponent;
  }
  ASSERT_EQ(r.d, d);
  ASSERT_EQ(r.exponent, exponent);
}

TEST(BigUint, Round53RandomExact) {
  Random random(10);
  for (int i = 0; i < 20000; ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_rounded(random_integer<10>(random, 640)));
    ASSERT_NO_FATAL_FAILURE(expect_rounded(random_integer<2>(random, 128)));
    ASSERT_NO_FATAL_FAILURE(expect_rounded(random_integer<1>(random, 64)));
  }
}

TEST(BigUint, Round53TiesAndFarStickyBitsExact) {
  expect_rounded(BigUint<10>{});
  for (int top = 0; top < 640; ++top) {
    BigUint<10> v;
    const auto set = [&](int bit) { v.limb[bit / 64] |= std::uint64_t{1} << (bit % 64); };
    set(top);
    ASSERT_NO_FATAL_FAILURE(expect_rounded(v));
    if (top < 54) {
      continue;
    }
    set(top - 53);  // a tie, the kept part even
    ASSERT_NO_FATAL_FAILURE(expect_rounded(v));
    EXPECT_EQ(round53(v).d, 0x1p52);
    const BigUint<10> even = v;
    set(0);  // above the tie by the lowest bit there is
    ASSERT_NO_FATAL_FAILURE(expect_rounded(v));
    EXPECT_EQ(round53(v).d, 0x1p52 + 1);
    v = even;
    set(top - 52);  // a tie, the kept part odd
    ASSERT_NO_FATAL_FAILURE(expect_rounded(v));
    EXPECT_EQ(round53(v).d, 0x1p52 + 2);
    for (int bit = 0; bit < top; ++bit) {  // all ones: rounds up to the next power of two
      set(bit);
    }
    ASSERT_NO_FATAL_FAILURE(expect_rounded(v));
    const Rounded53 r = round53(v);
    EXPECT_EQ(std::ldexp(r.d, r.exponent), std::ldexp(1.0, top + 1));
  }
}

TEST(BigUint, MultiplyAndShiftExact) {
  Random random(12);
  for (int i = 0; i < 5000; ++i) {
    const auto a = random_integer<4>(random, 256);
    const auto factor = static_cast<std::uint64_t>(
        random.one_in(4) ? std::int64_t{1} << 36 : random.between(1, std::int64_t{1} << 36));
    const auto shift =
        static_cast<int>(random.one_in(3) ? 64 * random.between(0, 16) : random.between(0, 1100));
    BigUint<24> product;
    multiply_and_shift(a, factor, shift, product);
    ASSERT_TRUE(wide(product) == (wide(a) * Wide(static_cast<std::int64_t>(factor))) << shift)
        << shift;
  }
  for (const int shift : {0, 63}) {
    BigUint<4> nothing;
    multiply_and_shift(BigUint<2>{}, 5, shift, nothing);
    EXPECT_EQ(nothing.used(), 0);
  }
}

/// max(0, a - b * b) as the code has it, checked against integers of any size.
template <int kA, int kB>
void expect_difference(BigUint<kA> a, const BigUint<kB>& b) {
  const Wide difference = wide(a) - wide(b) * wide(b);
  subtract_square(a, b);
  ASSERT_TRUE(wide(a) == (difference.negative() ? Wide() : difference));
}

/// b * b + offset, modulo 2^(64 * 2 * kB).
template <int kB>
BigUint<2 * kB> near_square(const BigUint<kB>& b, std::int64_t offset) {
  BigUint<2 * kB> sum;
  const auto add = [&sum](std::uint64_t value, int at) {
    bool carry = false;
    for (int k = at; k < 2 * kB; ++k, value = 0) {
      const auto t = static_cast<unsigned __int128>(sum.limb[k]) + value + (carry ? 1 : 0);
      sum.limb[k] = static_cast<std::uint64_t>(t);
      carry = (t >> 64) != 0;
    }
  };
  for (int i = 0; i < kB; ++i) {
    for (int j = 0; j < kB; ++j) {
      const auto t = static_cast<unsigned __int128>(b.limb[i]) * b.limb[j];
      add(static_cast<std::uint64_t>(t), i + j);
      add(static_cast<std::uint64_t>(t >> 64), i + j + 1);
    }
  }
  add(static_cast<std::uint64_t>(offset), 0);
  for (int k = 1; offset < 0 && k < 2 * kB; ++k) {  // the limbs of its sign
    add(~std::uint64_t{0}, k);
  }
  return sum;
}

TEST(BigUint, SubtractSquareExact) {
  Random random(13);
  for (int i = 0; i < 20000; ++i) {
    const auto b = random_integer<4>(random, 256);
    const int bits = static_cast<int>(random.between(1, 576));
    ASSERT_NO_FATAL_FAILURE(expect_difference(random_integer<9>(random, bits), b));
    if (b.used() > 0) {
      ASSERT_NO_FATAL_FAILURE(expect_difference(near_square(b, random.between(-2, 2)), b));
    }
  }
  BigUint<34> ones;
  for (std::uint64_t& limb : ones.limb) {
    limb = ~std::uint64_t{0};
  }
  BigUint<6> gap;  // zero limbs in between
  gap.limb[0] = ~std::uint64_t{0};
  gap.limb[5] = ~std::uint64_t{0};
  for (const std::int64_t offset : {-1, 0, 1}) {
    ASSERT_NO_FATAL_FAILURE(expect_difference(near_square(ones, offset), ones));
    ASSERT_NO_FATAL_FAILURE(expect_difference(near_square(gap, offset), gap));
  }
  ASSERT_NO_FATAL_FAILURE(expect_difference(BigUint<68>{}, ones));
  ASSERT_NO_FATAL_FAILURE(expect_difference(near_square(ones, 7), BigUint<34>{}));
}

}  // namespace
}  // namespace syncbn
