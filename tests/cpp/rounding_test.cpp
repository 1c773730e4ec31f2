// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/finalize.hpp"
#include "cpu/kernels.hpp"
#include "statistics/dtype.hpp"
#include "statistics/finalize.hpp"
#include "statistics/float_environment.hpp"
#include "support.hpp"
#include "wide_integer.hpp"

// Rounding merged sums in vectors gives the bits of the integers, whatever the sums.
namespace syncbn::testing {
namespace {

/// Up to `length` bits in runs of zeros and ones, where carries and ties live, from `position` on.
Wide random_bits(Random& random, std::int64_t length, std::int64_t position) {
  Wide out;
  bool one = true;
  for (std::int64_t i = 0; i < length;) {
    const std::int64_t run = random.one_in(2) ? 1 : random.between(1, 60);
    for (std::int64_t k = 0; k < run && i < length; ++k, ++i) {
      if (one) {
        out += Wide(1) << static_cast<int>(position + i);
      }
    }
    one = !one;
  }
  return out;
}

/// Sums of one channel as the words of a few ranks, added up.
struct Channel {
  Wide first;
  Wide second;
  std::int64_t flags = 0;
};

void append_words(Random& random, const Format& format, const Channel& channel,
                  std::vector<std::int64_t>& words) {
  const std::size_t begin = words.size();
  words.resize(begin + static_cast<std::size_t>(format.words()));
  // A rank that brings the sum and others that bring numbers whose total is 0: words whose digits
  // are far from canonical.
  const std::int64_t others = random.one_in(2) ? 0 : random.between(1, 5) * 2;
  std::vector<std::int64_t> digits(64);
  const auto add = [&](const Wide& value, int offset, int count) {
    value.to_digits(digits.data(), count);
    for (int i = 0; i < count; ++i) {
      words[begin + static_cast<std::size_t>(offset + i)] += digits[static_cast<std::size_t>(i)];
    }
  };
  const int first = format.first.digits;
  add(channel.first, 0, first);
  add(channel.second, first, format.second.digits);
  for (std::int64_t i = 0; i < others; i += 2) {
    const Wide a = random_bits(random, random.between(0, 60), random.between(0, 20));
    add(a, 0, first);
    add(-a, 0, first);
    add(a, first, format.second.digits);
    add(-a, first, format.second.digits);
  }
  words.back() = channel.flags;
}

Channel random_channel(Random& random, const Format& format, std::int64_t count) {
  Channel c;
  const bool half = format.first.unit == 24;
  const std::int64_t most = half ? 70 : 270;
  const std::int64_t length =
      random.one_in(4) ? random.between(0, most) : random.between(0, half ? 60 : 110);
  c.first = random_bits(random, length, random.between(0, most - length));
  switch (random.between(0, 5)) {
    case 0: {  // N*Q just above or below S^2
      const std::int64_t s = random.between(0, std::int64_t{1} << random.between(0, 20));
      const int shift = static_cast<int>(random.between(0, half ? 20 : 130));
      c.first = Wide(s * count) << shift;
      c.second = (Wide(s) * Wide(s) * Wide(count)) << (2 * shift);
      if (random.one_in(2)) {
        c.second += Wide(random.one_in(2) ? 1 : -1) << static_cast<int>(random.between(0, shift));
      }
      break;
    }
    case 1:  // a tie of 53 bits, or one far bit beside it
      c.first = (Wide(1) << 60) + (Wide(random.between(0, 3)) << 7);
      c.second = (Wide(1) << 110) + (Wide(random.between(0, 3)) << 57);
      if (random.one_in(2)) {
        c.second += Wide(1) << static_cast<int>(random.between(0, 50));
        c.first += Wide(random.one_in(2) ? 1 : -1);
      }
      break;
    case 2:  // digits of ones
      c.first = Wide(1) << static_cast<int>(random.pick<std::int64_t>({0, 62}));
      c.second = (Wide(1) << (half ? 100 : 200)) - Wide(1);
      break;
    default:
      c.second = random_bits(random, random.between(0, half ? 100 : 200),
                             random.between(0, half ? 20 : 300));
  }
  if (random.one_in(2)) {
    c.first = -c.first;
  }
  if (c.second.negative()) {
    c.second = -c.second;
  }
  if (random.one_in(20)) {
    c.flags = random.one_in(2) ? kFirstNan : 3 * kSecondNonFinite;
  }
  return c;
}

template <DType kDtype>
void expect_bits_of_integers(Random& random, const std::string& level, bool gradients) {
  const Format& format = format_of(kDtype);
  const std::int64_t channels = random.between(1, 70);
  const std::int64_t count = random.between(1, std::int64_t{1} << random.between(0, 36));
  const double eps = random.one_in(3) ? 0.0 : 1e-5;
  std::vector<std::int64_t> words;
  for (std::int64_t c = 0; c < channels; ++c) {
    Channel channel = random_channel(random, format, random.one_in(2) ? count : 7);
    if (gradients && random.one_in(2)) {
      channel.second = -channel.second;
    }
    append_words(random, format, channel, words);
  }
  // 2,048 ranks that bring the same: the full headroom of the digits.
  if (kDtype != DType::kFloat16 && random.one_in(4)) {
    for (std::int64_t& word : words) {
      word *= 2048;
    }
  }
  const auto n = static_cast<std::size_t>(channels);
  const auto per_channel = static_cast<std::size_t>(format.words());
  if (gradients) {
    std::vector<double> mean(n);
    std::vector<double> rstd(n);
    for (std::size_t c = 0; c < n; ++c) {
      mean[c] = random.signed_unit();
      rstd[c] = 1 + random.signed_unit();
    }
    std::vector<double> actual(5 * n);  // c1, c2, c3, dweight, dbias
    const auto place = [&](std::size_t i) {
      return MutableTensorView(actual.data() + i * n, DType::kFloat64, {channels});
    };
    const std::int64_t* from = words.data();
    cpu::finalize(
        kDtype, from, 0, channels,
        {count, mean.data(), rstd.data(), {}, actual.data(), place(3), place(4), channels});
    for (std::size_t c = 0; c < n; ++c) {
      const ChannelGradients expected = finalize_channel_gradients<ElementOf<kDtype>>(
          words.data() + c * per_channel, mean[c], rstd[c]);
      const Coefficients k = coefficients_of(expected, 1.0, rstd[c], count);
      ASSERT_TRUE(same_bits(actual[c], k.c1)) << level << ", channel " << c;
      ASSERT_TRUE(same_bits(actual[n + c], k.c2)) << level << ", channel " << c;
      ASSERT_TRUE(same_bits(actual[2 * n + c], k.c3)) << level << ", channel " << c;
      ASSERT_TRUE(same_bits(actual[3 * n + c], expected.dweight)) << level << ", channel " << c;
      ASSERT_TRUE(same_bits(actual[4 * n + c], expected.dbias)) << level << ", channel " << c;
    }
    return;
  }
  std::vector<double> mean(n, -1);
  std::vector<double> var(n, -1);
  std::vector<double> rstd(n, -1);
  const std::int64_t* from = words.data();
  cpu::finalize(kDtype, from, 0, channels, {count, eps, mean.data(), var.data(), rstd.data()});
  for (std::size_t c = 0; c < n; ++c) {
    const ChannelMoments expected =
        finalize_channel<ElementOf<kDtype>>(words.data() + c * per_channel, count, eps);
    ASSERT_TRUE(same_bits(mean[c], expected.mean)) << level << ", channel " << c;
    ASSERT_TRUE(same_bits(var[c], expected.var)) << level << ", channel " << c;
    ASSERT_TRUE(same_bits(rstd[c], expected.rstd)) << level << ", channel " << c;
  }
}

TEST(Rounding, RandomSumsHaveTheBitsOfIntegersExact) {
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    const cpu::FloatEnvironment environment;
    Random random(70);
    for (int round = 0; round < 200; ++round) {
      ASSERT_NO_FATAL_FAILURE(
          expect_bits_of_integers<DType::kFloat16>(random, level, round % 2 == 0));
      ASSERT_NO_FATAL_FAILURE(
          expect_bits_of_integers<DType::kFloat32>(random, level, round % 2 == 0));
    }
    for (int round = 0; round < 4; ++round) {
      ASSERT_NO_FATAL_FAILURE(
          expect_bits_of_integers<DType::kFloat64>(random, level, round % 2 == 0));
    }
  }
}

// Otherwise the comparisons above might compare the integers with themselves.
TEST(Rounding, VectorsServeOrdinarySums) {
  const cpu::FloatEnvironment environment;
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    const cpu::Kernels* kernels = cpu::active_kernels();
    if (kernels == nullptr) {
      continue;
    }
    Random random(71);
    std::vector<std::int64_t> words;
    for (int c = 0; c < 64; ++c) {
      Channel channel;
      for (int i = 0; i < 50; ++i) {
        const auto x = static_cast<double>(static_cast<float>(random.signed_unit()));
        channel.first += Wide::in_units(x, kSingleFormat.first.unit);
        channel.second += Wide::in_units(x * x, kSingleFormat.second.unit);
      }
      append_words(random, kSingleFormat, channel, words);
    }
    double out[3][64];
    bool done[64] = {};
    const cpu::SumsAt at{&kSingleFormat, words.data(), nullptr, 0};
    kernels->round_moments(at, 64, 50.0, 1e-5, out[0], out[1], out[2], done);
    bool sums_done[64] = {};
    kernels->round_sums(at, 64, out[0], out[1], sums_done);
    for (int c = 0; c < 64; ++c) {
      EXPECT_TRUE(done[c]) << level << ", channel " << c;
      EXPECT_TRUE(sums_done[c]) << level << ", channel " << c;
    }
  }
}

}  // namespace
}  // namespace syncbn::testing
