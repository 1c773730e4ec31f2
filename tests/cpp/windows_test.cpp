// SPDX-License-Identifier: Apache-2.0
#include "cpu/windows.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "statistics/scalar.hpp"
#include "statistics/slots.hpp"
#include "support.hpp"

namespace syncbn::cpu {
namespace {

using testing::Random;

/// Merges a partial as the vector code does it: two magic additions, or outside.
void merge(Windows& windows, std::int64_t channel, int sum, double partial) {
  const WindowArrays& w = windows.arrays();
  const double magic_high = w.magic_high[sum][channel];
  const double magic_low = w.magic_low[sum][channel];
  const double high = partial + magic_high;
  const double rest = partial - (high - magic_high);
  const double low = rest + magic_low;
  if (!(std::fabs(partial) < w.bound[sum][channel]) || low - magic_low != rest) {
    windows.add_outside(channel, sum, partial);
    return;
  }
  const auto limb = [](double sum_of, double magic) {
    return bit_copy<std::int64_t>(sum_of) - bit_copy<std::int64_t>(magic);
  };
  w.high[sum][channel] += limb(high, magic_high);
  w.low[sum][channel] += limb(low, magic_low);
}

/// The same sums in plain slots.
class Plain {
 public:
  Plain(const Format& format, std::int64_t channels)
      : format_(format),
        stride_(static_cast<std::size_t>(format.slots() + 1)),
        slots_(stride_ * static_cast<std::size_t>(channels)) {}
  void add(std::int64_t channel, int sum, double partial) {
    std::int64_t* slots = of(channel);
    if (!is_finite(partial)) {
      slots[format_.slots()] |= sum == 0 ? first_sum_flag(partial) : kSecondNonFinite;
      return;
    }
    add_partial(slots + (sum == 0 ? 0 : format_.first.slots), partial,
                sum == 0 ? format_.first.unit : format_.second.unit);
  }
  std::vector<std::int64_t> words(std::int64_t channel) {
    std::vector<std::int64_t> out(static_cast<std::size_t>(format_.words()));
    const std::int64_t* slots = of(channel);
    slots_to_digits(slots, format_.first.slots, out.data(), format_.first.digits);
    slots_to_digits(slots + format_.first.slots, format_.second.slots,
                    out.data() + format_.first.digits, format_.second.digits);
    out.back() = slots[format_.slots()];
    return out;
  }

 private:
  std::int64_t* of(std::int64_t channel) {
    return slots_.data() + stride_ * static_cast<std::size_t>(channel);
  }
  Format format_;
  std::size_t stride_;
  std::vector<std::int64_t> slots_;
};

void place_all(Windows& windows, int top) {
  for (std::int64_t c = 0; c < windows.channels(); ++c) {
    windows.place(c, 0, top);
    windows.place(c, 1, top);
  }
}

void expect_same_words(Windows& windows, Plain& plain) {
  for (std::int64_t c = 0; c < windows.channels(); ++c) {
    const std::vector<std::int64_t> expected = plain.words(c);
    std::vector<std::int64_t> words(expected.size(), -1);
    windows.write_words(c, words.data());
    ASSERT_EQ(words, expected) << "channel " << c;
  }
}

/// A partial of the format around 2^exponent, and sometimes anything at all.
double random_partial(Random& random, const Format& format, int sum, int exponent) {
  const bool half = format.first.unit == 24;
  const int unit = sum == 0 ? format.first.unit : format.second.unit;
  const int top = half ? (sum == 0 ? 24 : 40) : (sum == 0 ? 130 : 260);
  exponent += static_cast<int>(random.between(-12, 3));
  if (random.one_in(40)) {
    exponent = static_cast<int>(random.between(-unit, top));
  }
  exponent = std::min(exponent, top);
  const double v = std::ldexp(random.signed_unit(), exponent);
  if (exponent + unit >= 53) {
    return v;
  }
  return std::ldexp(std::trunc(std::ldexp(v, unit)), -unit);
}

const Format* const kFormats[] = {&kHalfFormat, &kSingleFormat};

TEST(Windows, RandomPartialsWithMissesExact) {
  Random random(20);
  for (int round = 0; round < 60; ++round) {
    const Format& format = *kFormats[round % 2];
    const auto channels = random.between(1, 40);
    Windows windows(format, channels);
    Plain plain(format, channels);
    for (std::int64_t c = 0; c < channels; ++c) {
      for (int sum = 0; sum < 2; ++sum) {
        // Guesses from good to absurd.
        const auto exponent = static_cast<int>(random.between(-20, 16));
        windows.place(c, sum,
                      exponent + static_cast<int>(random.one_in(3) ? random.between(-900, 900)
                                                                   : random.between(0, 8)));
        for (auto i = random.between(0, 400); i > 0; --i) {
          const double partial = random_partial(random, format, sum, exponent);
          merge(windows, c, sum, partial);
          plain.add(c, sum, partial);
          if (random.one_in(100)) {
            windows.flush(0, channels);
          }
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_same_words(windows, plain)) << "round " << round;
    // Reading does not disturb: more may be added, and the words be read again.
    merge(windows, 0, 0, 0.5);
    plain.add(0, 0, 0.5);
    ASSERT_NO_FATAL_FAILURE(expect_same_words(windows, plain)) << "round " << round;
  }
}

TEST(Windows, NeverUsedOrOnlyZeroGivesZeroWordsExact) {
  for (const Format* format : kFormats) {
    Windows windows(*format, 3);
    place_all(windows, 5);
    Plain plain(*format, 3);
    merge(windows, 1, 0, 0.0);
    windows.add_outside(2, 1, 0.0);
    expect_same_words(windows, plain);
  }
}

TEST(Windows, FlagsExact) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Windows windows(kSingleFormat, 6);
  place_all(windows, 0);
  Plain plain(kSingleFormat, 6);
  const struct {
    std::int64_t channel;
    int sum;
    double partial;
  } cases[] = {{0, 0, nan},  {1, 0, inf}, {2, 0, -inf}, {3, 1, nan}, {4, 1, inf},
               {4, 1, -inf}, {5, 0, inf}, {5, 0, -inf}, {5, 1, inf}};
  for (const auto& one : cases) {
    for (int times = 0; times < 3; ++times) {  // a rank adds 0 or 1 per flag, however often seen
      merge(windows, one.channel, one.sum, one.partial);
      plain.add(one.channel, one.sum, one.partial);
    }
    merge(windows, one.channel, one.sum, 2.5);
    plain.add(one.channel, one.sum, 2.5);
  }
  expect_same_words(windows, plain);
  std::int64_t words[19];
  windows.write_words(5, words);
  EXPECT_EQ(words[18], kFirstPlusInf | kFirstMinusInf | kSecondNonFinite);
}

TEST(Windows, AbsorbsOthersExact) {
  Random random(21);
  for (int round = 0; round < 40; ++round) {
    const Format& format = *kFormats[round % 2];
    const auto channels = random.between(1, 20);
    Plain plain(format, channels);
    std::vector<std::unique_ptr<Windows>> all;
    for (int i = 0; i < 4; ++i) {
      // In the same places as the first, or elsewhere.
      Random places(i > 0 && random.one_in(2) ? 100u + static_cast<unsigned int>(i) : 100u);
      all.push_back(std::make_unique<Windows>(format, channels));
      const bool miss = random.one_in(2);
      for (std::int64_t c = 0; c < channels; ++c) {
        for (int sum = 0; sum < 2; ++sum) {
          all.back()->place(c, sum, static_cast<int>(places.between(0, 12)));
          for (auto k = random.between(0, 50); k > 0; --k) {
            const double partial =
                miss ? random_partial(random, format, sum, 4)
                     : std::ldexp(static_cast<double>(random.between(-4000, 4000)), -16);
            merge(*all.back(), c, sum, partial);
            plain.add(c, sum, partial);
          }
        }
      }
      if (random.one_in(8)) {
        all.back()->add_outside(0, 0, std::numeric_limits<double>::infinity());
        plain.add(0, 0, std::numeric_limits<double>::infinity());
      }
    }
    for (std::size_t i = 1; i < all.size(); ++i) {
      // In two parts, as two threads would.
      all[0]->absorb(*all[i], 0, channels / 2);
      all[0]->absorb(*all[i], channels / 2, channels);
    }
    ASSERT_NO_FATAL_FAILURE(expect_same_words(*all[0], plain)) << "round " << round;
  }
}

// kFlushInterval partials that fill both limbs, on each of many windows that are merged.
TEST(Windows, FullIntervalsDoNotOverflowExact) {
  for (const double sign : {1.0, -1.0}) {
    // High limb at its limit, low limb at half a unit.
    const double partial = sign * (0x1p10 - 0x1p-34 + 0x1p-35 - 0x1p-42);
    Plain plain(kSingleFormat, 1);
    std::vector<std::unique_ptr<Windows>> all;
    for (int i = 0; i < 6; ++i) {
      all.push_back(std::make_unique<Windows>(kSingleFormat, 1));
      place_all(*all.back(), 10);
      for (std::int64_t k = 0; k < kFlushInterval; ++k) {
        merge(*all.back(), 0, 0, partial);
      }
      if (i == 0) {  // two more intervals after a flush
        for (int interval = 0; interval < 2; ++interval) {
          all[0]->flush(0, 1);
          for (std::int64_t k = 0; k < kFlushInterval; ++k) {
            merge(*all[0], 0, 0, partial);
          }
        }
      }
    }
    for (std::int64_t k = 0; k < (6 + 2) * kFlushInterval; ++k) {
      plain.add(0, 0, partial);
    }
    for (std::size_t i = 1; i < all.size(); ++i) {
      all[0]->absorb(*all[i], 0, 1);
    }
    expect_same_words(*all[0], plain);
  }
}

TEST(Windows, MovesToWherePartialsAre) {
  // A window placed far too low or too high costs a few misses, not one per partial.
  for (const int top : {-300, -50, 90, 300}) {
    Windows windows(kSingleFormat, 1);
    place_all(windows, top);
    for (int i = 0; i < 20; ++i) {
      merge(windows, 0, 0, 1.0 + 0x1p-40);
    }
    EXPECT_GT(windows.arrays().bound[0][0], 1.0) << top;
    EXPECT_LT(windows.arrays().bound[0][0], 0x1p40) << top;
  }
}

}  // namespace
}  // namespace syncbn::cpu
