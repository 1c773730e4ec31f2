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
#include "support.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::contains;
using testing::expect_no_errors;
using testing::Group;
using testing::GroupKind;
using testing::make_group;
using testing::Random;
using testing::run_ranks;
using testing::text_of;
using testing::thrown_text;

/// Far below the default of five minutes, far above what a busy machine needs.
constexpr auto kPrompt = std::chrono::seconds(30);

std::span<const std::byte> bytes_of(const std::vector<std::int64_t>& words) {
  return std::as_bytes(std::span<const std::int64_t>(words));
}

/// One exchange of each kind works.
void expect_usable(Group& group) {
  expect_no_errors(run_ranks(group.size(), [&](int r) {
    std::vector<std::int64_t> words = {r, 1};
    group.rank(r).all_reduce_sum(words);
    EXPECT_EQ(words[0], group.size() * (group.size() - 1) / 2);
    EXPECT_EQ(words[1], group.size());
    std::vector<std::int64_t> all(static_cast<std::size_t>(group.size()));
    const std::vector<std::int64_t> mine = {10 * r};
    group.rank(r).all_gather(bytes_of(mine), std::as_writable_bytes(std::span(all)));
    for (int i = 0; i < group.size(); ++i) {
      EXPECT_EQ(all[static_cast<std::size_t>(i)], 10 * i);
    }
  }));
}

/// What every group of several ranks promises, whatever it exchanges through.
class Groups : public ::testing::TestWithParam<std::tuple<GroupKind, int>> {
 protected:
  GroupKind kind() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(, Groups,
                         ::testing::Combine(::testing::Values(GroupKind::kThreads,
                                                              GroupKind::kSharedMemory),
                                            ::testing::Values(1, 2, 3, 8, 64)),
                         [](const auto& test) {
                           return testing::name(std::get<0>(test.param)) +
                                  std::to_string(std::get<1>(test.param));
                         });

class GroupKinds : public ::testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(, GroupKinds,
                         ::testing::Values(GroupKind::kThreads, GroupKind::kSharedMemory),
                         [](const auto& test) { return testing::name(test.param); });

TEST_P(Groups, KnowThemselves) {
  const auto group = make_group(kind(), ranks());
  EXPECT_EQ(group->size(), ranks());
  for (int r = 0; r < ranks(); ++r) {
    EXPECT_EQ(group->rank(r).rank(), r);
    EXPECT_EQ(group->rank(r).size(), ranks());
  }
}

TEST_P(Groups, SumsWrapAroundExact) {
  const int ranks = this->ranks();
  const auto group = make_group(kind(), ranks);
  // Lengths that do not divide evenly among ranks, also shorter than their number.
  for (const std::size_t length : {0u, 1u, 2u, 19u, 63u, 1000u}) {
    Random random(50);
    std::vector<std::vector<std::int64_t>> words(static_cast<std::size_t>(ranks));
    std::vector<std::uint64_t> expected(length);
    for (auto& mine : words) {
      for (std::size_t i = 0; i < length; ++i) {
        mine.push_back(i == 0 ? std::numeric_limits<std::int64_t>::max()
                              : static_cast<std::int64_t>(random.bits()));
        expected[i] += static_cast<std::uint64_t>(mine[i]);
      }
    }
    expect_no_errors(run_ranks(
        ranks, [&](int r) { group->rank(r).all_reduce_sum(words[static_cast<std::size_t>(r)]); }));
    for (const auto& mine : words) {
      for (std::size_t i = 0; i < length; ++i) {
        ASSERT_EQ(static_cast<std::uint64_t>(mine[i]), expected[i]);
      }
    }
  }
}

TEST_P(Groups, GatherInRankOrderExact) {
  const int ranks = this->ranks();
  const auto group = make_group(kind(), ranks);
  for (const std::size_t length : {0u, 1u, 7u, 300u}) {
    expect_no_errors(run_ranks(ranks, [&](int r) {
      const std::vector<std::byte> mine(length, static_cast<std::byte>(r + 1));
      std::vector<std::byte> all(length * static_cast<std::size_t>(ranks));
      group->rank(r).all_gather(mine, all);
      for (std::size_t i = 0; i < all.size(); ++i) {
        ASSERT_EQ(all[i], static_cast<std::byte>(i / length + 1));
      }
    }));
  }
}

TEST_P(Groups, ManyExchangesWithDelaysExact) {
  const int ranks = this->ranks();
  const int exchanges = ranks > 8 ? 100 : 1000;
  const auto group = make_group(kind(), ranks);
  expect_no_errors(run_ranks(ranks, [&](int r) {
    Random mine(static_cast<std::uint64_t>(r));
    Random common(51);
    for (int i = 0; i < exchanges; ++i) {
      if (mine.one_in(50)) {
        std::this_thread::sleep_for(std::chrono::microseconds(mine.between(1, 300)));
      } else if (mine.one_in(5)) {
        std::this_thread::yield();
      }
      const auto length = static_cast<std::size_t>(common.between(1, 100));
      std::vector<std::int64_t> words(length);
      for (std::size_t k = 0; k < length; ++k) {
        words[k] = i * 1000 + r + static_cast<std::int64_t>(k);
      }
      if (common.one_in(4)) {
        std::vector<std::int64_t> all(length * static_cast<std::size_t>(ranks));
        group->rank(r).all_gather(bytes_of(words), std::as_writable_bytes(std::span(all)));
        for (std::size_t k = 0; k < all.size(); ++k) {
          ASSERT_EQ(all[k], i * 1000 + static_cast<std::int64_t>(k / length + k % length));
        }
      } else {
        group->rank(r).all_reduce_sum(words);
        for (std::size_t k = 0; k < length; ++k) {
          ASSERT_EQ(words[k],
                    ranks * (i * 1000 + static_cast<std::int64_t>(k)) + ranks * (ranks - 1) / 2);
        }
      }
    }
  }));
}

TEST_P(Groups, DifferentLengthsThrowOnEveryRankAndLeaveTheGroupUsable) {
  const int ranks = this->ranks();
  if (ranks == 1) {
    return;
  }
  const auto group = make_group(kind(), ranks);
  for (int odd : {0, 1, ranks - 1}) {
    const auto errors = run_ranks(ranks, [&](int r) {
      std::vector<std::int64_t> words(r == odd ? 5 : 4, 7);
      group->rank(r).all_reduce_sum(words);
    });
    for (const auto& error : errors) {
      const std::string text = text_of<DivergenceError>(error);
      EXPECT_TRUE(contains(text, "32"));
      EXPECT_TRUE(contains(text, "40"));
    }
    expect_usable(*group);
    const auto mixed = run_ranks(ranks, [&](int r) {
      std::vector<std::int64_t> words(4);
      if (r == odd) {
        std::vector<std::byte> all(32 * static_cast<std::size_t>(ranks));
        group->rank(r).all_gather(bytes_of(words), all);
      } else {
        group->rank(r).all_reduce_sum(words);
      }
    });
    for (const auto& error : mixed) {
      text_of<DivergenceError>(error);
    }
    expect_usable(*group);
  }
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
    std::vector<std::byte> all(static_cast<std::size_t>(ranks));
    const std::vector<std::byte> mine(1);
    const int later = leaving == 0 ? 1 : 0;
    EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { group->rank(later).all_gather(mine, all); }),
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
  EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { group->rank(3).all_reduce_sum(words); }),
                       "rank 3 did not come"));
}

TEST_P(GroupKinds, ALonelyRankTimesOutAndNamesAllOthers) {
  const auto group = make_group(GetParam(), 4, milliseconds(20));
  std::vector<std::int64_t> words(4);
  const std::string text =
      thrown_text<ExchangeTimeout>([&] { group->rank(1).all_reduce_sum(words); });
  EXPECT_TRUE(contains(text, "rank 1 of 4"));
  EXPECT_TRUE(contains(text, "0, 2, 3"));
}

TEST_P(GroupKinds, ADelayWithinTheLimitIsNoError) {
  const auto group = make_group(GetParam(), 2, std::chrono::seconds(60));
  expect_no_errors(run_ranks(2, [&](int r) {
    std::this_thread::sleep_for(milliseconds(150 * r));
    std::vector<std::int64_t> words = {r + 1};
    group->rank(r).all_reduce_sum(words);
    EXPECT_EQ(words[0], 3);
  }));
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

TEST_P(GroupKinds, WrongGatherSizeIsRefusedAndToldToTheOthers) {
  const auto group = make_group(GetParam(), 2);
  const auto begin = steady_clock::now();
  const auto errors = run_ranks(2, [&](int r) {
    const std::vector<std::byte> mine(8);
    std::vector<std::byte> all(r == 0 ? 15 : 16);
    group->rank(r).all_gather(mine, all);
  });
  EXPECT_LT(steady_clock::now() - begin, kPrompt);
  const std::string text = text_of<InvalidArgument>(errors[0]);
  EXPECT_TRUE(contains(text, "out"));
  EXPECT_TRUE(contains(text, "15"));
  EXPECT_TRUE(contains(text, "16"));
  EXPECT_TRUE(contains(text_of<PeerLost>(errors[1]), "rank 0"));
}

TEST(SelfCommunicator, LeavesWordsAsTheyAreExact) {
  Communicator& self = self_communicator();
  EXPECT_EQ(self.rank(), 0);
  EXPECT_EQ(self.size(), 1);
  std::vector<std::int64_t> words = {1, -2, std::numeric_limits<std::int64_t>::min()};
  const auto before = words;
  self.all_reduce_sum(words);
  EXPECT_EQ(words, before);
  std::vector<std::int64_t> all(3);
  self.all_gather(bytes_of(words), std::as_writable_bytes(std::span(all)));
  EXPECT_EQ(all, before);
  std::vector<std::byte> short_out(1);
  const std::string text =
      thrown_text<InvalidArgument>([&] { self.all_gather(bytes_of(words), short_out); });
  EXPECT_TRUE(contains(text, "out"));
  EXPECT_TRUE(contains(text, "24"));
  self.abandon("nobody listens");
  self.all_reduce_sum(words);
}

}  // namespace
}  // namespace syncbn
