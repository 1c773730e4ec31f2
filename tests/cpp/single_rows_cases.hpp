// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support.hpp"

// 2-D inputs whose rows are added in floating point wherever that is exact, at the edges of where
// it is. Each function calls check(dtype, samples, channels, values of x, values of dy, mask or
// empty).
namespace syncbn::testing {

constexpr DType kTypesOfSingleRows[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

/// Exponents around the window.
template <class Check>
void rows_of_many_exponents(const Check& check) {
  Random random(80);
  for (int round = 0; round < 150 && !::testing::Test::HasFailure(); ++round) {
    const DType dtype = kTypesOfSingleRows[random.between(0, 2)];
    const std::int64_t samples = random.between(1, 200);
    const std::int64_t channels = random.between(1, 40);
    std::vector<double> values[2];
    std::vector<int> lowest(static_cast<std::size_t>(channels));
    std::vector<int> highest(static_cast<std::size_t>(channels));
    for (auto& v : values) {
      for (std::int64_t c = 0; c < channels; ++c) {
        const auto i = static_cast<std::size_t>(c);
        // One of these, and an element is no multiple of a limb's unit, or beyond the bound.
        lowest[i] = static_cast<int>(random.one_in(3) ? 2 : random.between(10, 30));
        highest[i] = static_cast<int>(random.one_in(3) ? random.between(0, 8) : 0);
      }
      for (std::int64_t n = 0; n < samples; ++n) {
        for (std::int64_t c = 0; c < channels; ++c) {
          const auto i = static_cast<std::size_t>(c);
          const int exponent = n < 6 ? 0 : static_cast<int>(random.between(-lowest[i], highest[i]));
          // All bits of the significand, among them the last.
          v.push_back(round_to(dtype, std::ldexp(1 + std::fabs(random.signed_unit()), exponent) *
                                          (random.one_in(2) ? 1 : -1)));
        }
      }
    }
    std::vector<std::uint8_t> counts;
    for (std::int64_t n = 0; random.one_in(2) && n < samples; ++n) {
      counts.push_back(random.one_in(3) ? 0 : 1);
    }
    counts.resize(counts.empty() ? 0 : static_cast<std::size_t>(samples), 1);
    check(dtype, samples, channels, values[0], values[1], counts);
  }
}

/// Channels of zeros, of -0, of one kind of special value, or with one of them somewhere.
template <class Check>
void rows_of_special_values(const Check& check) {
  Random random(81);
  const double specials[] = {0.0,
                             -0.0,
                             std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN(),
                             0x1p-149,
                             -0x1.fffffep-127,
                             0x1p-24,
                             0x1.fffffep127,
                             0x1p-75};
  for (const DType dtype : kTypesOfSingleRows) {
    for (const std::int64_t samples : {1, 8, 63, 64, 65, 130}) {
      constexpr std::int64_t kChannels = 44;
      std::vector<double> values[2];
      for (auto& v : values) {
        const std::int64_t offset = random.between(0, 9);
        for (std::int64_t n = 0; n < samples; ++n) {
          for (std::int64_t c = 0; c < kChannels; ++c) {
            const double special = specials[(c + offset) % 10];
            const bool here = c < 20 || (c < 40 && n == (c * 7) % samples);
            v.push_back(round_to(dtype, here ? special : 1 + random.signed_unit()));
          }
        }
      }
      check(dtype, samples, kChannels, values[0], values[1], {});
    }
  }
}

/// 64 rows that fill the accumulators: all just below the bound, with lower limbs of one sign.
template <class Check>
void rows_that_fill_accumulators(int samples, int channels, const Check& check) {
  for (const double largest : {0x1.fffffep0, 0x1.fffffep1, 0x1.fffffep2, 0x1.fffffep3, 0x1.fffffep4,
                               0x1.fffffep5, 0x1.fffd6ap4, 0x1.6a09e6p3}) {
    for (const double sign : {1.0, -1.0}) {
      std::vector<double> values;
      for (int n = 0; n < samples; ++n) {
        for (int c = 0; c < channels; ++c) {
          values.push_back(n < 6 ? 1.0 : sign * std::ldexp(largest, -(c % 4)));
        }
      }
      check(DType::kFloat32, samples, channels, values, values, {});
    }
  }
}

}  // namespace syncbn::testing
