// SPDX-License-Identifier: Apache-2.0
#include "syncbn/shared_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
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

namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Lengths with one piece and several, above and below the one from which ranks sum stripes.
const std::vector<std::int64_t> kLengths = {0, 1, 4, 4095, 4096, 9732, 16384, 16385, 100003};

class SharedMemoryProcesses : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, SharedMemoryProcesses, ::testing::Values(1, 2, 3, 8));

TEST_P(SharedMemoryProcesses, SumAndDisagreeOfAllLengthsExact) {
  const int size = GetParam();
  Processes ranks(size, kLong, [&](Processes::Rank rank) {
    for (const std::int64_t length : kLengths) {
      sum(rank.group, length, length);
    }
    exchange_with_delays(rank.group, size > 3 ? 1000 : 10000);  // more than cores take turns
    if (size > 1) {
      disagree(rank.group, kLengths);  // an error on every rank, which leaves the group usable
    }
  });
  ranks.expect_success();
}

TEST(SharedMemory, ErrorsCallRanksByTheNumbersThatTheyHaveInALargerGroup) {
  SharedMemoryRanks ranks(2, milliseconds(50));
  EXPECT_EQ(thrown_text<InvalidArgument>([&] { ranks.rank(0).call_ranks({4}, 8); }),
            "numbers: got 1, expected 2 of 0 to 7");
  EXPECT_EQ(thrown_text<InvalidArgument>([&] { ranks.rank(0).call_ranks({4, 8}, 8); }),
            "numbers: got 2, expected 2 of 0 to 7");
  ranks.rank(0).call_ranks({4, 6}, 8);
  std::vector<std::int64_t> words = {1};
  try {
    ranks.rank(0).all_reduce_sum(words);
    ADD_FAILURE();
  } catch (const ExchangeTimeout& error) {
    EXPECT_STREQ(error.what(), "rank 4 of 8: rank 6 did not come to the exchange within 50 ms");
    EXPECT_EQ(error.ranks(), std::vector<int>{6});
  }
}

std::size_t entries(const char* folder) {
  const std::filesystem::directory_iterator files(folder);
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

std::size_t mappings_of_groups() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:syncbn") != std::string::npos ? 1 : 0;
  }
  return count;
}

TEST(SharedMemory, AForkedChildHasNoPartAndDoesNoHarm) {
  Processes ranks(2, kLong, [](Processes::Rank rank) {
    sum(rank.group, 100, 0);
    const pid_t child = fork();
    if (child == 0) {
      int wrong = static_cast<int>(mappings_of_groups());
      const auto expect_error = [&](const auto& call) {
        try {
          call();
          ++wrong;
        } catch (const Error& e) {
          wrong += std::string(e.what()).find("was forked") == std::string::npos ? 1 : 0;
        }
      };
      std::vector<std::int64_t> words(4);
      expect_error([&] { rank.group.all_reduce_sum(words); });
      expect_error([&] { rank.group.parts()->publish(4); });
      expect_error([&] { rank.group.parts()->wait(4, milliseconds(0)); });
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

/// Names in /dev/shm; other programs of the machine have theirs there.
std::size_t names_of_groups() {
  const std::filesystem::directory_iterator files("/dev/shm");
  return static_cast<std::size_t>(std::count_if(begin(files), end(files), [](const auto& file) {
    return file.path().filename().string().find("syncbn") != std::string::npos;
  }));
}

/// What this process holds of the system.
std::string holdings() {
  return std::to_string(entries("/proc/self/fd")) + " descriptors, " +
         std::to_string(mappings_of_groups()) + " mappings, " + std::to_string(names_of_groups()) +
         " names";
}

TEST(SharedMemory, NothingIsLeftBehind) {
  const std::string before = holdings();
  ASSERT_EQ(mappings_of_groups(), 0u);
  {
    SharedMemoryRanks group(3, kLong);
    EXPECT_EQ(mappings_of_groups(), 3u);
    const auto errors = run_ranks(3, [&](int r) { sum(group.rank(r), 100, 0); });
    expect_no_errors(errors);
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

TEST(SharedMemory, AProcessHoldsOneMappingAndTheOthersEnds) {
  for (const bool in_parts : {false, true}) {
    Processes ranks(3, kLong, [in_parts](Processes::Rank rank) {
      const std::size_t in_use = entries("/proc/self/fd");
      const std::size_t file = rank.group.rank() == 0 ? 1 : 0;
      require(mappings_of_groups() == 1, "mappings");
      if (in_parts) {
        std::vector<std::int64_t> words(100);
        rank.group.parts()->open(words, words);
        rank.group.parts()->publish(words.size());
        require(rank.group.parts()->wait(words.size(), kLong), "the others did not come");
      } else {
        sum(rank.group, 100, 0);
      }
      require(entries("/proc/self/fd") == in_use - file, "the memory's file is still open");
      sum(rank.group, 100, 1);
      rank.owner.reset();
      require(entries("/proc/self/fd") == in_use - file - 2, "descriptors are left");
      require(mappings_of_groups() == 0, "the memory is still mapped");
    });
    ranks.expect_success();
  }
}

}  // namespace
}  // namespace syncbn::testing
