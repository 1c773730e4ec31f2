// SPDX-License-Identifier: Apache-2.0
#include "statistics/slots.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "statistics/big_uint.hpp"
#include "statistics/dtype.hpp"
#include "statistics/finalize.hpp"
#include "support.hpp"
#include "wide_integer.hpp"

namespace syncbn {
namespace {

using testing::Random;
using testing::Wide;

struct NamedFormat {
  const char* name;
  SumFormat format;
  double smallest;  ///< the unit
  double largest;   ///< a partial's largest magnitude: 512 elements, or the type's own limit
};
const NamedFormat kFormats[] = {
    {"half, first", kHalfFormat.first, 0x1p-24, 512 * 65504.0},
    {"half, second", kHalfFormat.second, 0x1p-48, 512 * 65504.0 * 65504.0},
    {"single, first", kSingleFormat.first, 0x1p-149, 512 * 0x1.fffffep127},
    {"single, second", kSingleFormat.second, 0x1p-298, 512 * 0x1.fffffep127 * 0x1.fffffep127},
    {"double", kDoubleFormat.first, 0x0.0000000000001p-1022, 0x1.fffffffffffffp1023},
};

/// A multiple of the format's unit, of any size that fits.
double random_partial(Random& random, const NamedFormat& f) {
  const int high = std::ilogb(f.largest);
  const auto exponent = static_cast<int>(random.between(-f.format.unit, high));
  const double v = std::ldexp(random.signed_unit(), exponent);
  // Cut what lies below the unit.
  const double cut =
      exponent + f.format.unit < 53
          ? std::ldexp(std::trunc(std::ldexp(v, f.format.unit / 2) *
                                  std::ldexp(1.0, f.format.unit - f.format.unit / 2)),
                       -f.format.unit)
          : v;
  return std::fabs(cut) <= f.largest ? cut : f.largest;
}

void expect_digits(const std::vector<std::int64_t>& slots, const SumFormat& format,
                   const Wide& expected) {
  std::vector<std::int64_t> digits(static_cast<std::size_t>(format.digits));
  slots_to_digits(slots.data(), format.slots, digits.data(), format.digits);
  for (int i = 0; i < format.digits - 1; ++i) {
    ASSERT_GE(digits[static_cast<std::size_t>(i)], 0);
    ASSERT_LT(digits[static_cast<std::size_t>(i)], std::int64_t{1} << 52);
  }
  ASSERT_TRUE(Wide::from_digits(digits.data(), format.digits) == expected);
}

TEST(Slots, FormatsAreTheContracts) {
  EXPECT_EQ(kHalfFormat.words(), 6);
  EXPECT_EQ(kSingleFormat.words(), 19);
  EXPECT_EQ(kDoubleFormat.words(), 83);
  EXPECT_EQ(&format_of(DType::kFloat16), &kHalfFormat);
  EXPECT_EQ(&format_of(DType::kBFloat16), &kSingleFormat);
  EXPECT_EQ(&format_of(DType::kFloat32), &kSingleFormat);
  EXPECT_EQ(&format_of(DType::kFloat64), &kDoubleFormat);
  EXPECT_EQ(kSegment, 512);
  EXPECT_EQ(kLanes, 16);
}

TEST(Slots, RandomPartialsExact) {
  for (const NamedFormat& f : kFormats) {
    SCOPED_TRACE(f.name);
    Random random(4);
    for (int round = 0; round < 50; ++round) {
      std::vector<std::int64_t> slots(static_cast<std::size_t>(f.format.slots));
      Wide expected;
      const auto count = random.between(1, 100);
      for (int i = 0; i < count; ++i) {
        const double partial = random_partial(random, f);
        add_partial(slots.data(), partial, f.format.unit);
        expected += Wide::in_units(partial, f.format.unit);
      }
      expect_digits(slots, f.format, expected);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

TEST(Slots, SmallestLargestAndZeroExact) {
  for (const NamedFormat& f : kFormats) {
    SCOPED_TRACE(f.name);
    for (const double sign : {1.0, -1.0}) {
      for (const double magnitude : {0.0, f.smallest, 3 * f.smallest, 0x1p-20, 1.0, f.largest}) {
        std::vector<std::int64_t> slots(static_cast<std::size_t>(f.format.slots));
        add_partial(slots.data(), sign * magnitude, f.format.unit);
        expect_digits(slots, f.format, Wide::in_units(sign * magnitude, f.format.unit));
      }
    }
  }
}

TEST(Slots, CancellingPartialsLeaveNothingExact) {
  for (const NamedFormat& f : kFormats) {
    Random random(5);
    std::vector<double> partials;
    for (int i = 0; i < 200; ++i) {
      partials.push_back(random_partial(random, f));
      partials.push_back(-partials.back());
    }
    random.shuffle(partials);
    std::vector<std::int64_t> slots(static_cast<std::size_t>(f.format.slots));
    for (const double partial : partials) {
      add_partial(slots.data(), partial, f.format.unit);
    }
    expect_digits(slots, f.format, Wide());
  }
}

// The same partial 2^20 times, one that fills its slots with ones.
TEST(Slots, ManyLargeAdditionsDoNotOverflowExact) {
  constexpr int kTimes = 20;
  for (const NamedFormat& f : kFormats) {
    SCOPED_TRACE(f.name);
    // The double format's largest sum of 2^20 partials stays below 2^1044.
    for (const double partial : {f.largest, -f.largest, f.smallest, -f.smallest}) {
      std::vector<std::int64_t> slots(static_cast<std::size_t>(f.format.slots));
      for (int i = 0; i < 1 << kTimes; ++i) {
        add_partial(slots.data(), partial, f.format.unit);
      }
      expect_digits(slots, f.format, Wide::in_units(partial, f.format.unit) << kTimes);
    }
  }
}

// A slot takes 2^31 additions of at most 2^32 - 1.
TEST(Slots, SlotsAtTheirLimitBecomeDigitsExact) {
  constexpr std::int64_t kMost = ((std::int64_t{1} << 32) - 1) << 31;
  for (const NamedFormat& f : kFormats) {
    SCOPED_TRACE(f.name);
    Random random(6);
    for (int round = 0; round < 20; ++round) {
      std::vector<std::int64_t> slots(static_cast<std::size_t>(f.format.slots));
      // The top two slots hold what the format can count: 2^36 elements per channel.
      for (std::size_t i = 0; i + 2 < slots.size(); ++i) {
        slots[i] = round == 0 ? kMost : round == 1 ? -kMost : random.between(-kMost, kMost);
      }
      expect_digits(slots, f.format, Wide::from_digits(slots.data(), f.format.slots, 32));
    }
  }
}

TEST(Slots, AddToSlotsIgnoresZeroBitsBelowTheUnitExact) {
  std::int64_t slots[4] = {};
  add_to_slots(slots, static_cast<unsigned __int128>(5) << 40, -40, false);
  EXPECT_EQ(Wide::from_digits(slots, 4, 32), Wide(5));
  add_to_slots(slots, static_cast<unsigned __int128>(5) << 90, -90, true);
  EXPECT_EQ(Wide::from_digits(slots, 4, 32), Wide());
  add_to_slots(slots, 0, -1000, true);
  add_to_slots(slots, (static_cast<unsigned __int128>(1) << 96) - 1, 31, false);
  EXPECT_EQ(Wide::from_digits(slots, 4, 32), ((Wide(1) << 96) - Wide(1)) << 31);
}

TEST(Digits, CarriesOf2048ExtremeRanksExact) {
  constexpr std::int64_t kRanks = 2048;
  constexpr std::int64_t kDigit = (std::int64_t{1} << 52) - 1;
  Random random(7);
  for (const int count : {2, 3, 6, 12, 41}) {
    const auto n = static_cast<std::size_t>(count);
    for (int round = 0; round < 40; ++round) {
      // Digits of one rank: all at their limit, or random; ranks alternate between two of them.
      std::vector<std::int64_t> a(n);
      std::vector<std::int64_t> b(n);
      for (std::size_t i = 0; i < n; ++i) {
        a[i] = round < 2 ? kDigit : random.between(0, kDigit);
        b[i] = round < 4 ? kDigit : random.between(0, kDigit);
      }
      a.back() = round % 2 == 0 ? kDigit : -kDigit - 1;
      b.back() = random.between(-kDigit - 1, kDigit);
      std::vector<std::int64_t> sums(n);
      std::vector<std::int64_t> canonical(n);
      for (std::size_t i = 0; i < n; ++i) {
        sums[i] = kRanks / 2 * (a[i] + b[i]);
      }
      propagate_carries(sums.data(), canonical.data(), count);
      for (std::size_t i = 0; i + 1 < n; ++i) {
        ASSERT_GE(canonical[i], 0);
        ASSERT_LE(canonical[i], kDigit);
      }
      const Wide expected =
          (Wide::from_digits(a.data(), count) + Wide::from_digits(b.data(), count)) << 10;
      ASSERT_TRUE(Wide::from_digits(canonical.data(), count) == expected);
    }
  }
}

TEST(Digits, MagnitudeAndSignExact) {
  Random random(8);
  for (const int count : {2, 3, 6, 12}) {
    const auto n = static_cast<std::size_t>(count);
    for (int round = 0; round < 2000; ++round) {
      std::vector<std::int64_t> digits(n);
      for (std::int64_t& digit : digits) {
        digit = random.one_in(3)   ? 0
                : random.one_in(3) ? kDigitMask
                                   : random.between(0, kDigitMask);
      }
      digits.back() = random.one_in(4)   ? random.between(-1, 1)
                      : random.one_in(4) ? std::numeric_limits<std::int64_t>::max()
                      : random.one_in(4) ? std::numeric_limits<std::int64_t>::min() + 1
                                         : random.between(-(1LL << 62), 1LL << 62);
      const Wide value = Wide::from_digits(digits.data(), count);
      BigUint<11> magnitude;
      const bool negative = magnitude_of(digits.data(), count, magnitude);
      ASSERT_EQ(negative, value.negative());
      ASSERT_TRUE(Wide::from_limbs(magnitude.limb, 11) == (negative ? -value : value));
    }
  }
}

}  // namespace
}  // namespace syncbn
