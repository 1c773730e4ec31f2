// SPDX-License-Identifier: Apache-2.0
#include "cpu/scratch.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

namespace syncbn::cpu {
namespace {

TEST(Scratch, BlocksThatLiveTogetherAreAlignedAndApart) {
  std::unique_ptr<Scratch> blocks[6];
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < 6; ++i) {
      const std::size_t bytes = i * 70'000;  // 0, kept ones, and one that is too large for that
      blocks[i] = std::make_unique<Scratch>(bytes);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(blocks[i]->data()) % 64, 0U);
      std::memset(blocks[i]->data(), static_cast<int>(i), bytes);
    }
    for (std::size_t i = 0; i < 6; ++i) {
      const auto* bytes = static_cast<const unsigned char*>(blocks[i]->data());
      for (std::size_t k = 0; k < i * 70'000; ++k) {
        ASSERT_EQ(bytes[k], i);
      }
      blocks[i].reset();
    }
  }
}

TEST(Scratch, ThreadKeepsABlockForItsNextCall) {
  const auto address = [](std::size_t bytes) { return Scratch(bytes).data(); };
  const void* first = address(100'000);
  EXPECT_EQ(address(100'000), first);
  EXPECT_EQ(address(90'000), first);
  const Scratch held(100'000);
  EXPECT_EQ(held.data(), first);
  EXPECT_NE(address(100'000), first);
}

TEST(Scratch, BlockMayEndOnAnotherThread) {
  auto block = std::make_unique<Scratch>(100'000);
  std::thread([&] { block.reset(); }).join();
  EXPECT_EQ(block, nullptr);  // the address sanitizer has the rest to say
}

}  // namespace
}  // namespace syncbn::cpu
