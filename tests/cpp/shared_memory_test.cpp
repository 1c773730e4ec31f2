#include "syncbn/shared_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "groups.hpp"
#include "processes.hpp"
#include "support.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::contains;
using testing::Processes;
using testing::Random;
using testing::require;
using testing::SharedMemoryRanks;
using testing::thrown_text;

/// Longer than any wait of these tests on a busy machine.
constexpr auto kLong = std::chrono::seconds(50);

/// Lengths with one piece and several, above and below the one from which ranks sum stripes.
const std::vector<std::int64_t> kLengths = {0, 1, 4, 4095, 4096, 9732, 16384, 16385, 100003};

std::vector<std::int64_t> message(std::int64_t length, int rank, std::int64_t exchange) {
  Random random(static_cast<std::uint64_t>(exchange * 100 + rank));
  std::vector<std::int64_t> words(static_cast<std::size_t>(length));
  for (std::int64_t& word : words) {
    word = static_cast<std::int64_t>(random.bits());
  }
  return words;
}

/// An exchange whose every word is checked.
void sum(SharedMemoryGroup& group, std::int64_t length, std::int64_t exchange) {
  std::vector<std::int64_t> words = message(length, group.rank(), exchange);
  std::vector<std::uint64_t> expected(words.size());
  for (int r = 0; r < group.size(); ++r) {
    const auto theirs = message(length, r, exchange);
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      expected[i] += static_cast<std::uint64_t>(theirs[i]);
    }
  }
  group.all_reduce_sum(words);
  for (std::size_t i = 0; i < words.size(); ++i) {
    require(static_cast<std::uint64_t>(words[i]) == expected[i],
            "word " + std::to_string(i) + " of " + std::to_string(length));
  }
}

void gather(SharedMemoryGroup& group, std::int64_t length, std::int64_t exchange) {
  const auto mine = message(length, group.rank(), exchange);
  std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (int r = 0; r < group.size(); ++r) {
    const auto theirs = message(length, r, exchange);
    require(std::equal(theirs.begin(), theirs.end(), all.begin() + r * length),
            "part " + std::to_string(r) + " of " + std::to_string(length));
  }
}

/// How a rank's later call fails once the group is broken.
void require_broken(SharedMemoryGroup& group) {
  const auto begin = steady_clock::now();
  try {
    sum(group, 4, 0);
  } catch (const PeerLost&) {
    require(steady_clock::now() - begin < kLong / 10, "a broken group lets a rank wait");
    return;
  }
  require(false, "a broken group works");
}

class SharedMemoryProcesses : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, SharedMemoryProcesses, ::testing::Values(1, 2, 3, 8));

TEST_P(SharedMemoryProcesses, SumAndGatherAllLengthsExact) {
  Processes ranks(GetParam(), kLong, [](Processes::Rank rank) {
    for (const std::int64_t length : kLengths) {
      sum(rank.group, length, length);
      gather(rank.group, length, length + 1);
    }
  });
  ranks.expect_success();
}

TEST_P(SharedMemoryProcesses, ManyExchangesWithDelaysExact) {
  const int exchanges = GetParam() > 3 ? 1000 : 10000;  // more ranks than cores take turns
  Processes ranks(GetParam(), kLong, [&](Processes::Rank rank) {
    Random mine(static_cast<std::uint64_t>(rank.group.rank()));
    Random common(52);
    for (int i = 0; i < exchanges; ++i) {
      if (mine.one_in(100)) {
        std::this_thread::sleep_for(std::chrono::microseconds(mine.between(1, 300)));
      }
      const std::int64_t length = common.between(0, 50);
      if (common.one_in(4)) {
        gather(rank.group, length, i);
      } else {
        sum(rank.group, length, i);
      }
    }
  });
  ranks.expect_success();
}

TEST_P(SharedMemoryProcesses, DisagreementsAreErrorsOnEveryRankAndLeaveTheGroupUsable) {
  if (GetParam() == 1) {
    return;
  }
  Processes ranks(GetParam(), kLong, [](Processes::Rank rank) {
    const bool odd = rank.group.rank() == rank.group.size() - 1;
    for (const std::int64_t length : kLengths) {
      for (const std::int64_t other : {length + 1, length + 40000}) {
        try {
          sum(rank.group, odd ? other : length, 1);
          require(false, "different lengths are summed");
        } catch (const DivergenceError& e) {
          const std::string text = e.what();
          for (const std::int64_t words : {length, other}) {
            const std::string part = "brought " + std::to_string(8 * words);
            require(text.find(part) != std::string::npos, text);
          }
        }
        sum(rank.group, 7, 2);
      }
      try {
        odd ? gather(rank.group, length, 3) : sum(rank.group, length, 3);
        require(false, "a sum meets a gather");
      } catch (const DivergenceError& e) {
        require(std::string(e.what()).find("another kind") != std::string::npos, e.what());
      }
      gather(rank.group, 7, 4);
    }
  });
  ranks.expect_success();
}

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

TEST(SharedMemory, AForkedChildHasNoPartAndDoesNoHarm) {
  Processes ranks(2, kLong, [](Processes::Rank rank) {
    sum(rank.group, 100, 0);
    const pid_t child = fork();
    if (child == 0) {
      int wrong = 0;
      const auto expect_error = [&](const auto& call) {
        try {
          call();
          ++wrong;
        } catch (const Error& e) {
          wrong += std::string(e.what()).find("was forked") == std::string::npos ? 1 : 0;
        }
      };
      std::vector<std::int64_t> words(4);
      std::vector<std::int64_t> all(8);
      expect_error([&] { rank.group.all_reduce_sum(words); });
      expect_error([&] {
        rank.group.all_gather(std::as_bytes(std::span(words)),
                              std::as_writable_bytes(std::span(all)));
      });
      expect_error([&] { rank.group.finish(milliseconds(0)); });
      expect_error([&] { rank.group.abandon("it is a child"); });
      rank.group.~SharedMemoryGroup();
      _exit(wrong);
    }
    int status = -1;
    require(child > 0 && waitpid(child, &status, 0) == child, "no child");
    require(status == 0, "the child ended with " + std::to_string(status));
    sum(rank.group, 100, 1);
  });
  ranks.expect_success();
}

TEST(SharedMemory, TheSplitFormComesBack) {
  SharedMemoryRanks group(2, kLong);
  for (const std::int64_t length : {0, 4, 100003}) {
    std::vector<std::int64_t> first(static_cast<std::size_t>(length), 1);
    std::vector<std::int64_t> second(static_cast<std::size_t>(length), 2);
    EXPECT_TRUE(group.rank(0).finish(milliseconds(0)));
    group.rank(0).begin_all_reduce_sum(first);
    EXPECT_FALSE(group.rank(0).finish(milliseconds(0)));
    const auto begin = steady_clock::now();
    EXPECT_FALSE(group.rank(0).finish(milliseconds(60)));
    EXPECT_GE(steady_clock::now() - begin, milliseconds(60));
    EXPECT_TRUE(contains(thrown_text<Error>([&] { group.rank(0).begin_all_reduce_sum(first); }),
                         "under way"));
    group.rank(1).begin_all_reduce_sum(second);
    while (!(group.rank(0).finish(milliseconds(0)) & group.rank(1).finish(milliseconds(0)))) {
    }
    const std::vector<std::int64_t> expected(static_cast<std::size_t>(length), 3);
    EXPECT_TRUE(first == expected);
    EXPECT_TRUE(second == expected);

    std::vector<std::int64_t> all(2 * first.size());
    std::vector<std::int64_t> other(2 * first.size());
    group.rank(1).begin_all_gather(std::as_bytes(std::span(first)),
                                   std::as_writable_bytes(std::span(all)));
    EXPECT_FALSE(group.rank(1).finish(milliseconds(0)));
    group.rank(0).begin_all_gather(std::as_bytes(std::span(second)),
                                   std::as_writable_bytes(std::span(other)));
    while (!(group.rank(0).finish(milliseconds(0)) & group.rank(1).finish(milliseconds(0)))) {
    }
    EXPECT_TRUE(all == std::vector<std::int64_t>(all.size(), 3));
    EXPECT_TRUE(other == all);
  }
}

TEST(SharedMemory, AnExchangeGivenUpIsAnErrorOfTheOthers) {
  SharedMemoryRanks group(3, kLong);
  std::vector<std::int64_t> first(4);
  std::vector<std::int64_t> second(4);
  group.rank(0).begin_all_reduce_sum(first);
  group.rank(1).begin_all_reduce_sum(second);
  group.rank(0).abandon("interrupted");
  EXPECT_TRUE(group.rank(0).finish(milliseconds(0)));  // nothing is under way
  EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { group.rank(1).finish(kLong); }), "interrupted"));
  EXPECT_TRUE(group.rank(1).finish(milliseconds(0)));
}

TEST(SharedMemory, FinishKeepsTheTimeLimitWhenOnlyPolled) {
  SharedMemoryRanks group(2, milliseconds(50));
  std::vector<std::int64_t> words(4);
  group.rank(0).begin_all_reduce_sum(words);
  const auto begin = steady_clock::now();
  const std::string text = thrown_text<ExchangeTimeout>([&] {
    while (!group.rank(0).finish(milliseconds(0))) {
    }
  });
  EXPECT_GE(steady_clock::now() - begin, milliseconds(50));
  EXPECT_TRUE(contains(text, "rank 1 did not come"));
}

/// Open descriptors, mappings of shared memory, and names in /dev/shm.
std::string holdings() {
  std::string found;
  for (const char* folder : {"/proc/self/fd", "/dev/shm"}) {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      count += entry.path().empty() ? 0 : 1;
    }
    found += std::to_string(count) + " in " + folder + "; ";
  }
  std::ifstream maps("/proc/self/maps");
  std::size_t shared = 0;
  for (std::string line; std::getline(maps, line);) {
    shared += line.find("memfd:syncbn") != std::string::npos ? 1 : 0;
  }
  return found + std::to_string(shared) + " mappings";
}

TEST(SharedMemory, NothingIsLeftBehind) {
  const std::string before = holdings();
  ASSERT_TRUE(contains(before, " 0 mappings"));
  {
    SharedMemoryRanks group(3, kLong);
    EXPECT_NE(holdings(), before);
    const auto errors = testing::run_ranks(3, [&](int r) { sum(group.rank(r), 100, 0); });
    testing::expect_no_errors(errors);
    group.rank(1).abandon("enough");
  }
  {
    SharedMemoryOffer unused(0, 4);
  }
  {
    SharedMemoryOffer offer(0, 1);
    const auto bytes = offer.bytes();
    const std::vector<std::byte> offers(bytes.begin(), bytes.end());
    EXPECT_NE(SharedMemoryGroup::open(std::move(offer), offers).group, nullptr);
  }
  EXPECT_EQ(holdings(), before);
}

}  // namespace
}  // namespace syncbn
