// SPDX-License-Identifier: Apache-2.0
#include "comm/shared_barrier.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "support.hpp"
#include "syncbn/error.hpp"

// The word that says whether a barrier is met, when another process writes to it.
namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 3;
constexpr milliseconds kLimit(400);
constexpr std::size_t kStateAt = 64;  ///< behind the nonce, on a cache line of its own

struct Pages {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{4096}); }
};

TEST(SharedBarrier, EachWrongBitOfItsStateEndsTheWait) {
  for (int bit = 0; bit < 64; ++bit) {
    for (const bool late : {false, true}) {  // the others sleep when it goes wrong
      SCOPED_TRACE("bit " + std::to_string(bit));
      const std::size_t bytes = SharedBarrier::memory_bytes(kRanks);
      const std::unique_ptr<std::byte[], Pages> memory(new (std::align_val_t{4096})
                                                           std::byte[bytes]());
      auto& state = *reinterpret_cast<std::atomic<std::uint64_t>*>(memory.get() + kStateAt);
      const auto begin = std::chrono::steady_clock::now();
      const auto errors = run_ranks(kRanks, [&](int rank) {
        SharedBarrier barrier(memory.get(), {}, rank, kRanks, kLimit, 0);
        const auto pass = [&] {
          barrier.check_usable();
          barrier.begin_waits();
          barrier.arrive();
          while (!barrier.wait(milliseconds(50))) {
          }
        };
        for (int i = 0; i < 5; ++i) {
          pass();
        }
        if (rank == 0) {
          std::this_thread::sleep_for(milliseconds(late ? 60 : 0));
          state ^= std::uint64_t{1} << bit;
        }
        for (int i = 0; i < 5; ++i) {
          pass();
        }
      });
      EXPECT_LT(std::chrono::steady_clock::now() - begin, 20 * kLimit);
      int failed = 0;
      for (const auto& error : errors) {
        if (error != nullptr) {
          ++failed;
          EXPECT_THROW(std::rethrow_exception(error), PeerLost);
        }
      }
      // One bit can also say that a barrier is met which all are about to meet.
      EXPECT_TRUE(failed == kRanks || failed == 0) << failed;
      EXPECT_TRUE(failed == kRanks || bit == 16) << bit;
    }
  }
}

}  // namespace
}  // namespace syncbn::testing
