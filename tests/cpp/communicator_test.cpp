// SPDX-License-Identifier: Apache-2.0
#include "syncbn/communicator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "groups.hpp"
#include "processes.hpp"
#include "support.hpp"
#include "syncbn/error.hpp"

namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Far below the default of five minutes, far above what a busy machine needs.
constexpr auto kPrompt = std::chrono::seconds(30);

/// What every group of several ranks promises, whatever it exchanges through.
class Groups : public ::testing::TestWithParam<std::tuple<GroupKind, int>> {
 protected:
  GroupKind kind() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(, Groups,
                         ::testing::Combine(::testing::Values(GroupKind::kThreads,
                                                              GroupKind::kSharedMemory,
                                                              GroupKind::kFramed),
                                            ::testing::Values(1, 2, 3, 8, 64)),
                         [](const auto& test) {
                           return name(std::get<0>(test.param)) +
                                  std::to_string(std::get<1>(test.param));
                         });

class GroupKinds : public ::testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(, GroupKinds,
                         ::testing::Values(GroupKind::kThreads, GroupKind::kSharedMemory),
                         [](const auto& test) { return name(test.param); });

TEST_P(Groups, KnowThemselves) {
  const auto group = make_group(kind(), ranks());
  EXPECT_EQ(group->size(), ranks());
  for (int r = 0; r < ranks(); ++r) {
    EXPECT_EQ(group->rank(r).rank(), r);
    EXPECT_EQ(group->rank(r).size(), ranks());
  }
}

TEST_P(Groups, SumExact) {
  const auto group = make_group(kind(), ranks());
  expect_no_errors(run_ranks(ranks(), [&](int r) {
    // Lengths that do not divide evenly among ranks, also shorter than their number.
    for (const std::int64_t length : {0, 1, 2, 19, 63, 1000}) {
      sum(group->rank(r), length, length);
    }
    exchange_with_delays(group->rank(r), ranks() > 8 ? 100 : 1000);
  }));
}

TEST_P(Groups, DisagreementsAreErrorsOnEveryRankAndLeaveTheGroupUsable) {
  if (ranks() == 1) {
    return;
  }
  const auto group = make_group(kind(), ranks());
  expect_no_errors(run_ranks(ranks(), [&](int r) { disagree(group->rank(r), {4, 100}); }));
}

TEST_P(Groups, AbandonReachesAllOthersWithRankAndReason) {
  const int ranks = this->ranks();
  if (ranks == 1) {
    return;
  }
  for (const bool late : {false, true}) {  // leaves while the others wait, or before they come
    const auto group = make_group(kind(), ranks);
    const int leaving = ranks / 2;
    const auto begin = steady_clock::now();
    const auto errors = run_ranks(ranks, [&](int r) {
      if (r == leaving) {
        if (late) {
          std::this_thread::sleep_for(milliseconds(50));
        }
        group->rank(r).abandon("its input was refused");
        return;
      }
      if (!late) {
        std::this_thread::sleep_for(milliseconds(50));
      }
      std::vector<std::int64_t> words(4);
      group->rank(r).all_reduce_sum(words);
    });
    EXPECT_LT(steady_clock::now() - begin, kPrompt);
    for (int r = 0; r < ranks; ++r) {
      if (r == leaving) {
        EXPECT_EQ(errors[static_cast<std::size_t>(r)], nullptr);
        continue;
      }
      const std::string text = text_of<PeerLost>(errors[static_cast<std::size_t>(r)]);
      EXPECT_TRUE(contains(text, "rank " + std::to_string(leaving)));
      EXPECT_TRUE(contains(text, "its input was refused"));
    }
    // Those who come later, to any exchange.
    std::vector<std::int64_t> words(1);
    const int later = leaving == 0 ? 1 : 0;
    EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { group->rank(later).all_reduce_sum(words); }),
                         "refused"));
  }
}

TEST_P(GroupKinds, TheFirstReasonStays) {
  const auto group = make_group(GetParam(), 3);
  group->rank(2).abandon("first");
  group->rank(1).abandon("second");
  std::vector<std::int64_t> words(1);
  const std::string text = thrown_text<PeerLost>([&] { group->rank(0).all_reduce_sum(words); });
  EXPECT_TRUE(contains(text, "rank 2"));
  EXPECT_TRUE(contains(text, "first"));
  // Once more, and the one that left, which knows it already.
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(
        contains(thrown_text<PeerLost>([&] { group->rank(rank).all_reduce_sum(words); }),
                 "the group is broken: rank 2 left the group: first; call reset on every rank"));
  }
}

TEST_P(GroupKinds, WaitingRanksTimeOutAndNameTheMissingOne) {
  const auto group = make_group(GetParam(), 4, milliseconds(100));
  const auto begin = steady_clock::now();
  const auto errors = run_ranks(3, [&](int r) {  // rank 3 does not come
    std::vector<std::int64_t> words(4);
    group->rank(r).all_reduce_sum(words);
  });
  const auto waited = steady_clock::now() - begin;
  EXPECT_GE(waited, milliseconds(100));
  EXPECT_LT(waited, kPrompt);
  for (const auto& error : errors) {
    const std::string text = text_of<ExchangeTimeout>(error);
    EXPECT_TRUE(contains(text, "rank 3"));
    EXPECT_TRUE(contains(text, "100 ms"));
  }
  std::vector<std::int64_t> words(4);
  // Nobody has left. What broke the group is said to the one that did not come, and again to those
  // that know it.
  for (const int rank : {3, 0, 3}) {
    const std::string text =
        thrown_text<PeerLost>([&] { group->rank(rank).all_reduce_sum(words); });
    EXPECT_EQ(text, "rank " + std::to_string(rank) +
                        " of 4: the group is broken: rank 3 did not come to the exchange within "
                        "100 ms; call reset on every rank, or make a new group if a rank has "
                        "ended");
  }
  const auto lonely = make_group(GetParam(), 4, milliseconds(20));
  const std::string text =
      thrown_text<ExchangeTimeout>([&] { lonely->rank(1).all_reduce_sum(words); });
  EXPECT_TRUE(contains(text, "rank 1 of 4"));
  EXPECT_TRUE(contains(text, "0, 2, 3"));
}

// A rank that leaves because of the time limit must not leave its words behind for others to read,
// and the time that the sum takes is not waiting for somebody who did not come.
TEST_P(GroupKinds, ATimeoutConcernsAllRanksOrNone) {
  for (int round = 0; round < 20; ++round) {
    const auto group = make_group(GetParam(), 2, milliseconds(3));
    std::barrier start(2);
    std::vector<std::vector<std::int64_t>> words(2);
    const auto errors = run_ranks(2, [&](int r) {
      std::vector<std::int64_t> mine(1000000, r + 1);
      start.arrive_and_wait();
      try {
        group->rank(r).all_reduce_sum(mine);
        words[static_cast<std::size_t>(r)] = mine;
      } catch (...) {
        std::fill(mine.begin(), mine.end(), -1);  // others would see it
        throw;
      }
    });
    EXPECT_EQ(errors[0] == nullptr, errors[1] == nullptr);
    for (std::size_t r = 0; r < 2 && errors[0] == nullptr; ++r) {
      EXPECT_TRUE(words[r] == std::vector<std::int64_t>(1000000, 3));
    }
  }
}

TEST(ThreadGroup, SizesOutsideTheLimitsAreRefused) {
  for (const int size : {0, -1, 2049}) {
    const std::string text = thrown_text<InvalidArgument>([&] { ThreadGroup group(size); });
    EXPECT_TRUE(contains(text, std::to_string(size)));
    EXPECT_TRUE(contains(text, "1 to 2048"));
  }
  EXPECT_EQ(ThreadGroup(2048).size(), 2048);
  EXPECT_EQ(ThreadGroup(1).size(), 1);
}

TEST(SelfCommunicator, LeavesWordsAsTheyAreExact) {
  Communicator& self = self_communicator();
  EXPECT_EQ(self.rank(), 0);
  EXPECT_EQ(self.size(), 1);
  std::vector<std::int64_t> words = {1, -2, std::numeric_limits<std::int64_t>::min()};
  const auto before = words;
  self.all_reduce_sum(words);
  EXPECT_EQ(words, before);
  self.abandon("nobody listens");
  self.all_reduce_sum(words);
}

}  // namespace
}  // namespace syncbn::testing
