#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support.hpp"
#include "syncbn/passes.hpp"

// Sums of 2-D input, whose rows are added in floating point wherever that is exact: at the edges of
// where it is, every vector code gives the reference's words.
namespace syncbn {
namespace {

using testing::available_levels;
using testing::LevelScope;
using testing::Random;
using testing::round_to;
using testing::Tensor;

using Words = std::vector<std::int64_t>;

struct Sums {
  Words moments;
  Words gradients;
  friend bool operator==(const Sums&, const Sums&) = default;
};

Sums sums_of(const Tensor& x, const Tensor& dy, const MaskView& mask, std::int64_t channels,
             DType dtype) {
  Sums out;
  out.moments.assign(static_cast<std::size_t>(message_words(dtype, channels)), -1);
  out.gradients = out.moments;
  const std::vector<double> zeros(static_cast<std::size_t>(channels));
  local_moments(x.view(), mask, out.moments.data(), 1, serial_executor());
  local_gradients(dy.view(), x.view(), mask, zeros.data(), zeros.data(), {}, {},
                  out.gradients.data(), 1, serial_executor());
  return out;
}

/// Compares all levels with the reference.
void expect_same_words(DType dtype, std::int64_t samples, std::int64_t channels,
                       const std::vector<double>& x_values, const std::vector<double>& dy_values,
                       const std::vector<std::uint8_t>& counts = {}) {
  const Tensor x(dtype, {samples, channels}, x_values);
  const Tensor dy(dtype, {samples, channels}, dy_values);
  const MaskView mask = counts.empty() ? MaskView{} : MaskView{counts.data(), {samples}};
  Sums expected;
  {
    const LevelScope scope("reference");
    expected = sums_of(x, dy, mask, channels, dtype);
  }
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    ASSERT_EQ(sums_of(x, dy, mask, channels, dtype), expected)
        << level << ", " << name(dtype) << " (" << samples << ", " << channels << ")";
  }
}

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

TEST(SingleRows, ExponentsAroundTheWindowExact) {
  Random random(80);
  for (int round = 0; round < 150; ++round) {
    const DType dtype = kTypes[random.between(0, 2)];
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
    ASSERT_NO_FATAL_FAILURE(
        expect_same_words(dtype, samples, channels, values[0], values[1], counts));
  }
}

// Channels of zeros, of -0, of one kind of special value, or with one of them somewhere.
TEST(SingleRows, ZerosAndSpecialValuesExact) {
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
  for (const DType dtype : kTypes) {
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
      ASSERT_NO_FATAL_FAILURE(expect_same_words(dtype, samples, kChannels, values[0], values[1]));
    }
  }
}

// 64 rows that fill the accumulators: all just below the bound, with lower limbs of one sign.
TEST(SingleRows, FullAccumulatorsExact) {
  for (const double largest : {0x1.fffffep0, 0x1.fffffep1, 0x1.fffffep2, 0x1.fffffep3, 0x1.fffffep4,
                               0x1.fffffep5, 0x1.fffd6ap4, 0x1.6a09e6p3}) {
    for (const double sign : {1.0, -1.0}) {
      std::vector<double> values;
      for (int n = 0; n < 128; ++n) {
        for (int c = 0; c < 17; ++c) {
          values.push_back(n < 6 ? 1.0 : sign * std::ldexp(largest, -(c % 4)));
        }
      }
      ASSERT_NO_FATAL_FAILURE(expect_same_words(DType::kFloat32, 128, 17, values, values));
    }
  }
}

}  // namespace
}  // namespace syncbn
