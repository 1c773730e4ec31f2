// SPDX-License-Identifier: Apache-2.0
#include "cuda/packing.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/launch.cuh"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "random.hpp"
#include "statistics/slots.hpp"
#include "step/passes.hpp"

// What a warp does to add partials up and to cut slots into digits, against the plain loops.
namespace syncbn::cuda {
namespace {

template <class T>
void pack(const SumsArguments a) {
  const unsigned warp = device::thread_index() / device::kWarp;
  pack_channels<T, 4>(a, warp, a.channels, device::block_size() / device::kWarp,
                      device::shared<std::int64_t>() + warp * packing_bytes<T>(1) / 8);
}

/// A slot's content after at most 2^31 - 1 additions of less than 2^32: often an extreme, zero, or
/// one away from a carry.
std::int64_t slot_of(testing::Random& random) {
  constexpr std::int64_t kCarry = std::int64_t{1} << 32;
  constexpr std::int64_t kMost = ((std::int64_t{1} << 31) - 1) * (kCarry - 1);
  static const Words kValues = {0,      0,          0,          1,     kCarry - 1,
                                kCarry, kCarry + 1, kCarry / 2, kMost, kCarry / 2 - 1};
  const std::int64_t value =
      random.one_in(4) ? random.between(0, kMost) >> random.below(62) : random.pick(kValues);
  return random.one_in(2) ? value : -value;
}

template <class T>
void expect_packed(std::uint64_t seed) {
  using Scratch = ChannelScratch<T>;
  constexpr Format kFormat = Scratch::kFormat;
  constexpr std::int64_t kChannels = 19;
  testing::Random random(seed);
  Words workspace(size(kChannels * Scratch::kWords));
  Words expected(size(kChannels * Scratch::kMessageWords));
  for (std::int64_t c = 0; c < kChannels; ++c) {
    std::int64_t* const scratch = workspace.data() + c * Scratch::kWords;
    std::int64_t* const words = expected.data() + c * Scratch::kMessageWords;
    for (int i = 0; i < Scratch::kSlots; ++i) {
      scratch[i] = slot_of(random);
    }
    // The highest slot of an integer is where its sign is; there is no slot above for a carry.
    for (const int top : {Scratch::kFirstSlots - 1, Scratch::kSlots - 1}) {
      scratch[top] >>= 34;
    }
    scratch[Scratch::kFlags] = random.between(0, kFlagCounter << 45);
    scratch[Scratch::kDone] = 3;
    exact_sum(scratch, kFormat, true).write(words);
    exact_sum(scratch, kFormat, false).write(words + kFormat.first.digits);
    words[Scratch::kMessageWords - 1] = scratch[Scratch::kFlags];
  }
  SumsArguments a;
  Words message(expected.size() + kHeaderWords, -1);
  Words copy = message;
  a.message = message.data();
  a.copy = copy.data();
  a.workspace = workspace.data();
  a.channels = kChannels;
  start("packing", &pack<T>, 1, 2 * device::kWarp, packing_bytes<T>(2), {}, a);
  EXPECT_EQ(Words(message.begin() + kHeaderWords, message.end()), expected);
  EXPECT_EQ(message, copy);
  EXPECT_EQ(workspace, Words(workspace.size(), 0));
}

TEST(CudaPacking, DigitsOfSlotsExact) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_packed<float>(seed);
    expect_packed<BFloat16>(seed);
    expect_packed<Half>(seed);
    expect_packed<double>(seed);
  }
}

/// Thread t of a warp adds the partials t, t + 32, ... in its window.
void add_by_windows(const std::vector<double> partials, const ExactSum to, unsigned from) {
  Window window;
  for (std::size_t i = device::thread_index(); i < partials.size(); i += device::kWarp) {
    window.add(partials[i], to);
  }
  window.gather(from, to);
  window.flush(to);
}

/// Multiples of the unit, mostly of about the same size: with all bits or few, also at the ends of
/// what fits, and zero.
double partial_of(testing::Random& random, const SumFormat& format, int exponent) {
  const int highest = std::min(32 * format.slots - format.unit - 20, 1000);  // a power of two
  if (random.one_in(8)) {
    exponent = static_cast<int>(random.between(-format.unit, highest));
  }
  exponent += static_cast<int>(random.between(-4, 4));
  const std::int64_t mantissa =
      random.between(0, (std::int64_t{1} << 53) - 1) >> (random.one_in(4) ? random.below(54) : 0);
  const int unit = std::max(std::min(exponent, highest) - 53, -format.unit);
  const double value = std::ldexp(static_cast<double>(mantissa), unit);
  return random.one_in(2) ? value : -value;
}

TEST(CudaPacking, WindowsOfAWarpExact) {
  for (const Format& format : {kSingleFormat, kHalfFormat, kDoubleFormat}) {
    for (const SumFormat& sum : {format.first, format.second}) {
      for (std::uint64_t seed = 0; seed < 100; ++seed) {
        SCOPED_TRACE("unit " + std::to_string(sum.unit) + ", seed " + std::to_string(seed));
        testing::Random random(seed);
        const int exponent = static_cast<int>(random.between(-sum.unit, 40));
        std::vector<double> partials(32 * random.below(9) + random.below(32));
        Words expected(size(sum.slots));
        for (double& partial : partials) {
          partial = partial_of(random, sum, exponent);
          ExactSum{expected.data(), sum}.add(partial);
        }
        Words slots(expected.size());
        start("windows", &add_by_windows, 1, device::kWarp, 0, {}, partials,
              ExactSum{slots.data(), sum}, 1u << random.below(6));
        Words digits(size(sum.digits));
        Words expected_digits = digits;
        ExactSum{slots.data(), sum}.write(digits.data());
        ExactSum{expected.data(), sum}.write(expected_digits.data());
        EXPECT_EQ(digits, expected_digits);
      }
    }
  }
}

}  // namespace
}  // namespace syncbn::cuda
