// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "statistics/dtype.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "wide_integer.hpp"

// Sections 1 and 2 of docs/numerics.md: the words of a channel, from a program that follows their
// text, with integers of unlimited size.
namespace syncbn {
namespace {

using testing::available_levels;
using testing::kDtypes;
using testing::kMemories;
using testing::LevelScope;
using testing::Random;
using testing::rough_values;
using testing::Tensor;
using testing::Wide;

/// A lane of one sum: (s, r), r for float64 only.
struct Lane {
  double s = 0.0;
  double r = 0.0;
};

/// Knuth's TwoSum.
double two_sum_error(double a, double b) {
  const double sum = a + b;
  const double a_part = sum - b;
  const double b_part = sum - a_part;
  return (a - a_part) + (b - b_part);
}

void add(Lane& lane, double u, bool is_double) {
  lane.r = is_double ? lane.r + two_sum_error(lane.s, u) : 0.0;
  lane.s = lane.s + u;
}

void add_product(Lane& lane, double u, double v, bool is_double) {
  if (!is_double) {
    lane.s = std::fma(u, v, lane.s);
    return;
  }
  const double p = u * v;
  const double q = std::fma(u, v, -p);
  const double d = two_sum_error(lane.s, p);
  lane.s = lane.s + p;
  lane.r = lane.r + (q + d);
}

/// Merges a segment's 16 lanes into `sum`; returns its flag, by kind of sum.
std::int64_t merge(std::vector<Lane> lanes, const SumFormat& format, bool first, bool is_double,
                   Wide& sum) {
  for (std::size_t h : {8u, 4u, 2u, 1u}) {
    for (std::size_t l = 0; l < h; ++l) {
      const double d = two_sum_error(lanes[l].s, lanes[l + h].s);
      lanes[l].s = lanes[l].s + lanes[l + h].s;
      lanes[l].r = is_double ? (lanes[l].r + lanes[l + h].r) + d : 0.0;
    }
  }
  const double s = lanes[0].s;
  if (!std::isfinite(s)) {
    return !first          ? std::int64_t{1} << 45
           : std::isnan(s) ? std::int64_t{1}
           : s > 0         ? std::int64_t{1} << 15
                           : std::int64_t{1} << 30;
  }
  sum += Wide::in_units(s, format.unit);
  if (std::isfinite(lanes[0].r)) {
    sum += Wide::in_units(lanes[0].r, format.unit);
  }
  return 0;
}

/// The words of sums of u and u * v; planes of `plane` elements.
std::vector<std::int64_t> expected_words(DType dtype, const std::vector<double>& u,
                                         const std::vector<double>& v, std::int64_t samples,
                                         std::int64_t channels, std::int64_t plane) {
  const Format& format = format_of(dtype);
  const bool is_double = dtype == DType::kFloat64;
  std::vector<std::int64_t> words;
  for (std::int64_t c = 0; c < channels; ++c) {
    Wide first;
    Wide second;
    std::int64_t flags = 0;
    for (std::int64_t n = 0; n < samples; ++n) {
      const auto base = static_cast<std::size_t>((n * channels + c) * plane);
      for (std::int64_t begin = 0; begin < plane; begin += 512) {
        std::vector<Lane> a(16);
        std::vector<Lane> b(16);
        for (std::int64_t e = begin; e < std::min(plane, begin + 512); ++e) {
          const auto i = base + static_cast<std::size_t>(e);
          add(a[static_cast<std::size_t>(e % 16)], u[i], is_double);
          add_product(b[static_cast<std::size_t>(e % 16)], u[i], v[i], is_double);
        }
        flags |= merge(a, format.first, true, is_double, first);
        flags |= merge(b, format.second, false, is_double, second);
      }
    }
    std::vector<std::int64_t> mine(static_cast<std::size_t>(format.words()));
    first.to_digits(mine.data(), format.first.digits);
    second.to_digits(mine.data() + format.first.digits, format.second.digits);
    mine.back() = flags;
    words.insert(words.end(), mine.begin(), mine.end());
  }
  return words;
}

void expect_words(DType dtype, const std::vector<double>& dy, const std::vector<double>& x,
                  const std::vector<std::int64_t>& sizes, Random& random) {
  const auto moments = expected_words(dtype, x, x, sizes[0], sizes[1], sizes[2]);
  const auto gradients = expected_words(dtype, dy, x, sizes[0], sizes[1], sizes[2]);
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    const auto memory = random.pick(kMemories);
    Tensor x_tensor(dtype, sizes, memory);
    Tensor dy_tensor(dtype, sizes, memory);
    x_tensor.fill(x);
    dy_tensor.fill(dy);
    SCOPED_TRACE(level + ", " + name(dtype) + ", planes of " + std::to_string(sizes[2]));
    std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(dtype, sizes[1])));
    local_moments(x_tensor.view(), {}, message.data(), 9, serial_executor());
    EXPECT_EQ(message[0], sizes[0] * sizes[2]);
    EXPECT_EQ(message[1], 9);
    EXPECT_EQ(message[2], 81);
    EXPECT_TRUE(std::equal(moments.begin(), moments.end(), message.begin() + kHeaderWords))
        << "moments";
    local_gradients({.dy = dy_tensor.view(), .x = x_tensor.view()}, message.data(), 9,
                    serial_executor());
    EXPECT_TRUE(std::equal(gradients.begin(), gradients.end(), message.begin() + kHeaderWords))
        << "gradients";
  }
}

TEST(Sums, WordsFollowTheContractExact) {
  Random random(110);
  for (int round = 0; round < 60; ++round) {
    const DType dtype = kDtypes[round % 4];
    const std::int64_t planes[] = {1, 5, 16, 33, 300, 512, 700, 1537};
    const std::int64_t plane = planes[random.between(0, 7)];
    const std::vector<std::int64_t> sizes = {random.between(1, 6), random.between(1, 20), plane};
    const std::int64_t per_sample = sizes[1] * plane;
    std::vector<double> x = rough_values(random, dtype, sizes[0], per_sample);
    std::vector<double> dy = rough_values(random, dtype, sizes[0], per_sample);
    if (dtype == DType::kFloat64 && random.one_in(2)) {  // to the ends of binary64's range
      for (std::vector<double>* values : {&x, &dy}) {
        for (double& v : *values) {
          v = std::ldexp(v, static_cast<int>(random.between(-1060, 400)));
        }
      }
    }
    expect_words(dtype, dy, x, sizes, random);
    if (HasFailure()) {
      return;
    }
  }
}

TEST(Sums, FlagsExact) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Random random(111);
  for (const DType dtype : kDtypes) {
    for (const double bad : {inf, -inf, nan}) {
      for (const double other : {1.0, inf, -inf, 0.0}) {
        const std::vector<std::int64_t> sizes = {2, 5, 600};
        std::vector<double> x = rough_values(random, dtype, 2, 3000);
        std::vector<double> dy = rough_values(random, dtype, 2, 3000);
        x[10] = bad;            // channel 0
        x[11] = other;          // in another lane of that segment
        x[1210] = bad;          // channel 2
        x[1200 + 520] = other;  // in another segment
        dy[2410] = bad;         // channel 4
        dy[3000 + 601] = 0;     // 0 * infinity in channel 1
        x[3000 + 601] = bad;
        expect_words(dtype, dy, x, sizes, random);
      }
    }
  }
  // float64 only: finite elements whose sums overflow.
  std::vector<double> large(64, 1e308);
  expect_words(DType::kFloat64, large, large, {2, 2, 16}, random);
  large.assign(64, -1e200);
  expect_words(DType::kFloat64, large, large, {2, 2, 16}, random);
}

}  // namespace
}  // namespace syncbn
