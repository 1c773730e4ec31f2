// SPDX-License-Identifier: Apache-2.0
// Ranks of a SharedMemoryGroup that die, stall or leave.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "groups.hpp"
#include "processes.hpp"
#include "support.hpp"
#include "syncbn/error.hpp"

namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The exchanges that a survivor completed must be those that the other survivor completed.
TEST(SharedMemory, AKilledRankIsNamedByEverySurvivorWithinASecond) {
  Random random(53);
  for (int round = 0; round < 50; ++round) {
    Processes ranks(3, kLong, [&](Processes::Rank rank) {
      try {
        for (std::int64_t i = 0;; ++i) {
          const std::vector<std::int64_t> lengths = {4, 9732, 40000};
          sum(rank.group, lengths[static_cast<std::size_t>((round + i) % 3)], i);
          ++rank.progress;
        }
      } catch (const PeerLost&) {
        require_broken(rank.group);
        throw;
      }
    });
    const int victim = static_cast<int>(random.between(0, 2));
    ranks.wait_for(victim, random.between(0, 3));
    std::this_thread::sleep_for(std::chrono::microseconds(random.between(0, 2000)));
    ranks.send(victim, SIGKILL);
    EXPECT_EQ(ranks.join(victim).signal, SIGKILL);
    const auto killed = steady_clock::now();
    for (const int r : {(victim + 1) % 3, (victim + 2) % 3}) {
      const auto& outcome = ranks.join(r);
      EXPECT_EQ(outcome.error, "PeerLost");
      EXPECT_TRUE(contains(outcome.text, "rank " + std::to_string(victim) + " is gone"));
    }
    EXPECT_LT(steady_clock::now() - killed, std::chrono::seconds(1));
    EXPECT_EQ(ranks.progress((victim + 1) % 3), ranks.progress((victim + 2) % 3));
  }
}

TEST(SharedMemory, AStoppedRankIsNamedAtTheTimeLimit) {
  for (const std::int64_t length : {4, 100003}) {
    Processes ranks(3, milliseconds(1500), [&](Processes::Rank rank) {
      try {
        for (std::int64_t i = 0;; ++i) {
          sum(rank.group, length, i);
          ++rank.progress;
        }
      } catch (const ExchangeTimeout&) {
        require_broken(rank.group);
        throw;
      }
    });
    ranks.wait_for(1, 3);
    ranks.send(1, SIGSTOP);
    for (const int r : {0, 2}) {
      const auto& outcome = ranks.join(r);
      EXPECT_EQ(outcome.error, "ExchangeTimeout");
      EXPECT_TRUE(contains(outcome.text, "rank 1 did not come to the exchange within 1500 ms"));
    }
    EXPECT_EQ(ranks.progress(0), ranks.progress(2));
    ranks.send(1, SIGCONT);
    const auto& late = ranks.join(1);
    // By where it was stopped: on its way to an exchange, or inside a long one.
    EXPECT_TRUE(late.error == "PeerLost" || (length > 4 && late.error == "ExchangeTimeout"))
        << late.error;
    EXPECT_TRUE(contains(late.text, "rank 1 did not come"));
  }
}

TEST(SharedMemory, ATimeoutThatIsSetCountsFromThenOn) {
  SharedMemoryRanks ranks(2, kLong);
  EXPECT_THROW(ranks.rank(0).set_timeout(milliseconds(0)), InvalidArgument);
  ranks.rank(0).set_timeout(milliseconds(50));
  std::vector<std::int64_t> words(4, 1);
  const std::string text =
      thrown_text<ExchangeTimeout>([&] { ranks.rank(0).all_reduce_sum(words); });
  EXPECT_TRUE(contains(text, "rank 1 did not come to the exchange within 50 ms")) << text;
}

TEST(SharedMemory, ARankStoppedWithinTheTimeLimitIsNoError) {
  Processes ranks(2, kLong, [](Processes::Rank rank) {
    for (std::int64_t i = 0; i < 100; ++i) {
      sum(rank.group, 9732, i);
      ++rank.progress;
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  ranks.wait_for(1, 10);
  ranks.send(1, SIGSTOP);
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_LE(ranks.progress(0), ranks.progress(1) + 1);
  ranks.send(1, SIGCONT);
  ranks.expect_success();
}

TEST(SharedMemory, ARankThatEndsIsNamed) {
  Processes ranks(3, kLong, [](Processes::Rank rank) {
    sum(rank.group, 9732, 0);
    if (rank.group.rank() == 2) {
      return;  // destroys its end
    }
    sum(rank.group, 9732, 1);
  });
  EXPECT_EQ(ranks.join(2).error, "");
  for (const int r : {0, 1}) {
    EXPECT_EQ(ranks.join(r).error, "PeerLost");
    EXPECT_TRUE(contains(ranks.join(r).text, "rank 2 left the group"));
    EXPECT_TRUE(contains(ranks.join(r).text, "destroyed"));
  }
}

TEST(SharedMemory, AbandonReachesOtherProcessesAndCutsLongReasons) {
  std::string reason = "its input was refused: ";
  for (int i = 0; i < 300; ++i) {
    reason += "\u00e9";
  }
  Processes ranks(2, kLong, [&](Processes::Rank rank) {
    if (rank.group.rank() == 0) {
      rank.group.abandon(reason);
      require_broken(rank.group);
      return;
    }
    sum(rank.group, 4, 0);
  });
  EXPECT_EQ(ranks.join(0).error + ranks.join(0).text, "");
  EXPECT_EQ(ranks.join(1).error, "PeerLost");
  const std::string& text = ranks.join(1).text;
  const std::string before = "rank 1 of 2: rank 0 left the group: ";
  ASSERT_TRUE(contains(text, before + "its input was refused: "));
  const std::string got = text.substr(before.size());
  EXPECT_EQ(reason.compare(0, got.size(), got), 0);
  EXPECT_GE(got.size(), 400u);
  EXPECT_EQ(got.size() % 2, 23u % 2);  // whole characters of two bytes behind 23 of one
}

}  // namespace
}  // namespace syncbn::testing
