// SPDX-License-Identifier: Apache-2.0
#include "cuda/packing.cuh"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/launch.cuh"
#include "emulator.hpp"
#include "random.hpp"
#include "statistics/slots.hpp"

// The digits of a channel, cut by a warp, against the loop over slots.
namespace syncbn::cuda {
namespace {

using Words = std::vector<std::int64_t>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

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
    slots_to_digits(scratch, kFormat.first.slots, words, kFormat.first.digits);
    slots_to_digits(scratch + kFormat.first.slots, kFormat.second.slots,
                    words + kFormat.first.digits, kFormat.second.digits);
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

}  // namespace
}  // namespace syncbn::cuda
