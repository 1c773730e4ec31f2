// SPDX-License-Identifier: Apache-2.0
// How ranks find each other's memory, and every reason not to.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/shared_segment.hpp"
#include "groups.hpp"
#include "support.hpp"
#include "syncbn/error.hpp"
#include "syncbn/shared_memory.hpp"

namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;

std::vector<std::byte> gathered(const std::vector<const SharedMemoryOffer*>& offers) {
  std::vector<std::byte> all;
  for (const SharedMemoryOffer* offer : offers) {
    all.insert(all.end(), offer->bytes().begin(), offer->bytes().end());
  }
  return all;
}

/// What the first of these offers says.
OfferContent content_of(std::span<const std::byte> offers) {
  OfferContent content;
  std::memcpy(&content, offers.data(), sizeof(content));
  return content;
}

/// Why rank 1 of 2 does not form a group with a rank 0 of that offer.
std::string refusal_of(std::span<const std::byte> zero) {
  SharedMemoryOffer one(1, 2);
  std::vector<std::byte> all(zero.begin(), zero.end());
  all.insert(all.end(), one.bytes().begin(), one.bytes().end());
  const auto opened = SharedMemoryGroup::open(std::move(one), all);
  EXPECT_EQ(opened.group == nullptr, !opened.why.empty());
  return opened.why;
}

/// The same where the offer was changed on the way.
std::string refusal(const std::function<void(OfferContent&)>& change) {
  const SharedMemoryOffer zero(0, 2);
  OfferContent content = content_of(zero.bytes());
  change(content);
  std::array<std::byte, SharedMemoryOffer::kBytes> bytes{};
  std::memcpy(bytes.data(), &content, sizeof(content));
  return refusal_of(bytes);
}

/// A process that has ended, and its offer as rank 0 of 2.
std::array<std::byte, SharedMemoryOffer::kBytes> offer_of_the_dead(
    const std::function<void()>& prepare) {
  std::array<std::byte, SharedMemoryOffer::kBytes> bytes{};
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    prepare();
    const SharedMemoryOffer offer(0, 2);
    const ssize_t written = write(ends[1], offer.bytes().data(), offer.kBytes);
    _exit(written == static_cast<ssize_t>(offer.kBytes) ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read(ends[0], bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  close(ends[0]);
  close(ends[1]);
  return bytes;
}

TEST(SharedMemoryOffer, OtherNodesContainersAndVersionsAreRefused) {
  EXPECT_EQ(refusal([](OfferContent& zero) { zero.boot_id[3] ^= 1; }), "rank 0 is on another node");
  EXPECT_TRUE(contains(refusal([](OfferContent& zero) { ++zero.pid_namespace; }),
                       "rank 0 is in another container"));
  EXPECT_EQ(refusal([](OfferContent& zero) { ++zero.format; }),
            "rank 0 has another version of the exchange");
  EXPECT_EQ(refusal([](OfferContent& zero) { zero = {.format = 0}; }),
            "rank 0 brought an offer of zeros; gather puts every rank's bytes in their place");
}

TEST(SharedMemoryOffer, RanksThatCountDifferentlyAreRefused) {
  EXPECT_EQ(refusal([](OfferContent& zero) { zero.size = 3; }),
            "rank 0 made an offer as rank 0 of 3, expected rank 0 of 2");
  EXPECT_EQ(refusal([](OfferContent& zero) { zero.rank = 1; }),
            "rank 0 made an offer as rank 1 of 2, expected rank 0 of 2");
}

TEST(SharedMemoryOffer, MemoryThatIsNotTheOfferedOneIsRefused) {
  EXPECT_TRUE(contains(refusal([](OfferContent& zero) { zero.nonce[5] ^= std::byte{1}; }),
                       "rank 0: its memory does not begin with what the offer says"));
  EXPECT_TRUE(contains(refusal([](OfferContent& zero) { zero.memory_bytes = 4096; }),
                       "rank 0 offers a memory of 4096 bytes, expected "));
  EXPECT_TRUE(contains(refusal([](OfferContent& zero) { zero.descriptor = 1000000; }),
                       "/fd/1000000 cannot be opened: No such file or directory"));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_TRUE(contains(refusal([&](OfferContent& zero) { zero.descriptor = ends[0]; }),
                       "is not its memory"));
  close(ends[0]);
  close(ends[1]);
}

/// As refusal(), for a file of that size and with those seals, which begins as rank 0's memory.
std::string refusal_of_file(std::size_t bytes, int seals) {
  const Descriptor file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  return refusal([&](OfferContent& zero) {
    EXPECT_EQ(ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(pwrite(file.get(), zero.nonce.data(), zero.nonce.size(), 0),
              static_cast<ssize_t>(zero.nonce.size()));
    EXPECT_EQ(fcntl(file.get(), F_ADD_SEALS, seals), 0);
    zero.descriptor = file.get();
  });
}

// Reading behind the end of a mapped file is SIGBUS.
TEST(SharedMemoryOffer, AFileThatIsSmallerThanItsLayoutIsRefused) {
  SharedMemoryOffer zero(0, 2);
  const OfferContent content = content_of(zero.bytes());
  constexpr int kSealed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  EXPECT_EQ(refusal_of_file(content.memory_bytes, kSealed), "");
  EXPECT_TRUE(contains(refusal_of_file(content.memory_bytes - 4096, kSealed), "is not its memory"));
  EXPECT_TRUE(contains(refusal_of_file(content.memory_bytes, F_SEAL_GROW), "is not sealed"));
}

TEST(SharedMemoryOffer, TheMemoryCannotBeResized) {
  SharedMemoryOffer zero(0, 2);
  const OfferContent content = content_of(zero.bytes());
  const auto bytes = static_cast<off_t>(content.memory_bytes);
  for (const off_t size : {off_t{0}, bytes - 1, bytes + 1}) {
    EXPECT_EQ(ftruncate(static_cast<int>(content.descriptor), size), -1);
    EXPECT_EQ(errno, EPERM);
  }
}

// The signal's default action ends the process.
TEST(SharedMemoryOffer, ALimitOnFilesIsWhatTheSystemRefused) {
  const auto poor = offer_of_the_dead([] {
    signal(SIGXFSZ, SIG_DFL);
    const rlimit little = {1 << 16, 1 << 16};
    setrlimit(RLIMIT_FSIZE, &little);
  });
  EXPECT_TRUE(contains(refusal_of(poor),
                       "rank 0 cannot share memory: the limit on the size of files (ulimit -f) is "
                       "65536 bytes, expected at least "));
}

// Any bytes at all: a reason, a group or an error, and no crash.
TEST(SharedMemoryOffer, GarbageIsRefusedOrHarmless) {
  Random random(17);
  int refused = 0;
  for (int round = 0; round < 1000; ++round) {
    SharedMemoryOffer zero(0, 2);
    SharedMemoryOffer one(1, 2);
    std::vector<std::byte> all = gathered({&zero, &one});
    const bool anywhere = round % 2 == 0;
    const auto changes = random.between(1, anywhere ? 256 : 3);
    for (std::int64_t i = 0; i < changes; ++i) {
      // Mostly behind the format and the ranks, which are looked at first.
      const auto at = static_cast<std::size_t>(random.between(anywhere ? 0 : 16, 255));
      all[at] = static_cast<std::byte>(random.between(0, 255));
    }
    const auto opened = SharedMemoryGroup::open(std::move(one), all, milliseconds(1));
    EXPECT_NE(opened.group == nullptr, opened.why.empty());
    refused += opened.group == nullptr ? 1 : 0;
    if (opened.group != nullptr) {
      std::vector<std::int64_t> words(4);
      EXPECT_THROW(opened.group->all_reduce_sum(words), Error);
    }
  }
  EXPECT_GT(refused, 500);
}

// What another process writes to the memory, whenever it likes.
TEST(SharedMemoryOffer, GarbageInTheMemoryIsNoCrash) {
  Random random(29);
  for (int round = 0; round < 300; ++round) {
    SharedMemoryOffer zero(0, 2);
    SharedMemoryOffer one(1, 2);
    const std::vector<std::byte> all = gathered({&zero, &one});
    const Descriptor file(dup(static_cast<int>(content_of(all).descriptor)));
    const auto group = SharedMemoryGroup::open(std::move(one), all, milliseconds(2)).group;
    ASSERT_NE(group, nullptr);
    std::vector<std::byte> garbage(static_cast<std::size_t>(random.between(1, 4096)));
    for (std::byte& byte : garbage) {
      byte = static_cast<std::byte>(round % 3 == 0 ? 0xff : random.between(0, 255));
    }
    const auto write = [&] {
      EXPECT_EQ(pwrite(file.get(), garbage.data(), garbage.size(), 16),
                static_cast<ssize_t>(garbage.size()));
    };
    std::vector<std::int64_t> words(static_cast<std::size_t>(random.between(0, 40000)));
    try {
      if (round % 2 == 0) {
        write();
      }
      group->parts()->open(words, words);
      group->parts()->publish(words.size() / 2);
      write();
      group->parts()->publish(words.size());
      while (!group->parts()->wait(words.size(), milliseconds(1))) {
      }
    } catch (const Error& error) {
      EXPECT_STRNE(error.what(), "");
    }
  }
}

TEST(SharedMemoryOffer, AProcessThatHasEndedIsRefused) {
  const auto dead = offer_of_the_dead([] {});
  EXPECT_TRUE(contains(refusal_of(dead), "rank 0: process " +
                                             std::to_string(content_of(dead).process) +
                                             " cannot be watched: No such process"));
}

// The parent stands for a process that was given the number of a rank that has ended.
TEST(SharedMemoryOffer, AnotherProcessOfThatNumberIsRefused) {
  EXPECT_TRUE(contains(refusal([](OfferContent& zero) {
                         zero.process = getppid();
                         zero.start_time += 1000000;
                       }),
                       "is not the one that made the offer"));
}

TEST(SharedMemoryOffer, WhatTheSystemRefusedToOneRankTheOthersSay) {
  const auto poor = offer_of_the_dead([] {
    const rlimit none = {0, 0};
    setrlimit(RLIMIT_NOFILE, &none);
  });
  EXPECT_TRUE(contains(refusal_of(poor), "rank 0 cannot share memory: "));
}

TEST(SharedMemoryOffer, WrongArgumentsOfOpenAreRefused) {
  const auto open = [](std::size_t bytes, milliseconds timeout, std::byte change) {
    SharedMemoryOffer offer(0, 1);
    std::vector<std::byte> all = gathered({&offer});
    all[0] ^= change;
    all.resize(bytes);
    return thrown_text<InvalidArgument>(
        [&] { (void)SharedMemoryGroup::open(std::move(offer), all, timeout); });
  };
  constexpr std::byte kNone{0};
  EXPECT_EQ(open(255, milliseconds(1), kNone), "offers: got 255 bytes, expected 256");
  EXPECT_EQ(open(256, milliseconds(0), kNone), "timeout: got 0 ms, expected 1 ms to 2^40 ms");
  EXPECT_TRUE(contains(open(256, milliseconds(1), std::byte{1}), "expected this rank's offer"));

  SharedMemoryOffer offer(0, 1);
  SharedMemoryOffer& used = offer;
  const std::vector<std::byte> all = gathered({&offer});
  EXPECT_NE(SharedMemoryGroup::open(std::move(offer), all).group, nullptr);
  EXPECT_TRUE(contains(
      thrown_text<InvalidArgument>([&] { (void)SharedMemoryGroup::open(std::move(used), all); }),
      "offer: got one that was used"));
}

TEST(SharedMemoryOffer, AForkedChildCannotUseItsParentsOffer) {
  SharedMemoryOffer offer(0, 1);
  const pid_t child = fork();
  if (child == 0) {
    const std::vector<std::byte> all = gathered({&offer});
    const std::string text =
        thrown_text<InvalidArgument>([&] { (void)SharedMemoryGroup::open(std::move(offer), all); });
    _exit(text.find("offer: got that of process") == 0 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const std::vector<std::byte> all = gathered({&offer});
  EXPECT_NE(SharedMemoryGroup::open(std::move(offer), all).group, nullptr);
}

/// Makes a group of two threads. spoil: what happens to the offers that rank 1 gets.
std::vector<std::string> created(const std::function<void(std::span<std::byte>)>& spoil) {
  ThreadGroup threads(2);
  std::vector<std::string> why(2);
  expect_no_errors(run_ranks(2, [&](int rank) {
    int calls = 0;
    const auto opened = SharedMemoryGroup::create(
        rank, 2, [&](std::span<const std::byte> mine, std::span<std::byte> all) {
          gather(threads.rank(rank), mine, all);
          if (rank == 1 && calls++ == 0) {
            spoil(all);
          }
        });
    why[static_cast<std::size_t>(rank)] = opened.why;
    EXPECT_EQ(opened.group == nullptr, !opened.why.empty());
    if (opened.group != nullptr) {
      std::vector<std::int64_t> words = {rank, 5};
      opened.group->all_reduce_sum(words);
      EXPECT_EQ(words, (std::vector<std::int64_t>{1, 10}));
      EXPECT_EQ(opened.group->rank(), rank);
      threads.rank(rank).all_reduce_sum(words);  // neither leaves while the other comes
    }
  }));
  return why;
}

TEST(SharedMemoryCreate, GivesEveryRankAGroup) {
  EXPECT_EQ(created([](std::span<std::byte>) {}), std::vector<std::string>(2));
}

TEST(SharedMemoryCreate, TellsEveryRankWhyOneHasNone) {
  const auto other_nonce = [](std::span<std::byte> all) {
    OfferContent content = content_of(all);
    content.nonce[0] ^= std::byte{1};
    std::memcpy(all.data(), &content, sizeof(content));
  };
  const auto refused = [](std::span<std::byte> all) { all.back() ^= std::byte{1}; };
  for (const auto& [spoil, part] :
       {std::pair<std::function<void(std::span<std::byte>)>, std::string>{other_nonce, "rank 1: "},
        {refused, "rank 1: offers: got other bytes at place 1"}}) {
    const std::vector<std::string> why = created(spoil);
    EXPECT_EQ(why[0], why[1]);
    EXPECT_TRUE(contains(why[0], part));
  }
}

TEST(SharedMemoryCreate, RefusesArgumentsBeforeItGathers) {
  const auto never = [](std::span<const std::byte>, std::span<std::byte>) { FAIL(); };
  EXPECT_TRUE(
      contains(thrown_text<InvalidArgument>([&] { (void)SharedMemoryGroup::create(2, 2, never); }),
               "rank: got 2, expected 0 to 1"));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>(
                           [&] { (void)SharedMemoryGroup::create(0, 1, never, milliseconds(0)); }),
                       "timeout: got 0 ms"));
}

}  // namespace
}  // namespace syncbn::testing
