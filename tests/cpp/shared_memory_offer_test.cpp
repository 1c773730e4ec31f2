// How ranks find each other's memory, and every reason not to.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/shared_segment.hpp"
#include "support.hpp"
#include "syncbn/error.hpp"
#include "syncbn/shared_memory.hpp"

namespace syncbn {
namespace {

using std::chrono::milliseconds;
using testing::contains;
using testing::thrown_text;

std::vector<std::byte> gathered(const std::vector<const SharedMemoryOffer*>& offers) {
  std::vector<std::byte> all;
  for (const SharedMemoryOffer* offer : offers) {
    all.insert(all.end(), offer->bytes().begin(), offer->bytes().end());
  }
  return all;
}

/// Why rank 1 of 2 does not form a group with a rank 0 whose offer was changed on the way.
std::string refusal(const std::function<void(OfferContent&)>& change) {
  SharedMemoryOffer zero(0, 2);
  SharedMemoryOffer one(1, 2);
  std::vector<std::byte> all = gathered({&zero, &one});
  OfferContent content;
  std::memcpy(&content, all.data(), sizeof(content));
  change(content);
  std::memcpy(all.data(), &content, sizeof(content));
  const auto opened = SharedMemoryGroup::open(std::move(one), all);
  EXPECT_EQ(opened.group, nullptr);
  return opened.why;
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

std::string refusal_of(const std::array<std::byte, SharedMemoryOffer::kBytes>& zero) {
  SharedMemoryOffer one(1, 2);
  std::vector<std::byte> all(zero.begin(), zero.end());
  all.insert(all.end(), one.bytes().begin(), one.bytes().end());
  const auto opened = SharedMemoryGroup::open(std::move(one), all);
  EXPECT_EQ(opened.group, nullptr);
  return opened.why;
}

TEST(SharedMemoryOffer, OtherNodesContainersAndVersionsAreRefused) {
  EXPECT_EQ(refusal([](OfferContent& zero) { zero.boot_id[3] ^= 1; }), "rank 0 is on another node");
  EXPECT_TRUE(contains(refusal([](OfferContent& zero) { ++zero.pid_namespace; }),
                       "rank 0 is in another container"));
  EXPECT_EQ(refusal([](OfferContent& zero) { ++zero.format; }),
            "rank 0 has another version of the exchange");
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
  EXPECT_TRUE(contains(refusal([](OfferContent& zero) { zero.memory_bytes += 4096; }),
                       "is not its memory"));
  EXPECT_TRUE(contains(refusal([](OfferContent& zero) { zero.descriptor = 1000000; }),
                       "/fd/1000000 cannot be opened: No such file or directory"));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_TRUE(contains(refusal([&](OfferContent& zero) { zero.descriptor = ends[0]; }),
                       "is not its memory"));
  close(ends[0]);
  close(ends[1]);
}

TEST(SharedMemoryOffer, AProcessThatHasEndedIsRefused) {
  const auto dead = offer_of_the_dead([] {});
  OfferContent content;
  std::memcpy(&content, dead.data(), sizeof(content));
  EXPECT_TRUE(contains(refusal_of(dead), "rank 0: process " + std::to_string(content.process) +
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

TEST(SharedMemoryOffer, RanksAndSizesOutsideTheLimitsAreRefused) {
  for (const int size : {0, -1, 2049}) {
    EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { SharedMemoryOffer(0, size); }),
                         std::to_string(size)));
  }
  for (const int rank : {-1, 3}) {
    const std::string text = thrown_text<InvalidArgument>([&] { SharedMemoryOffer(rank, 3); });
    EXPECT_EQ(text, "rank: got " + std::to_string(rank) + ", expected 0 to 2");
  }
}

TEST(SharedMemoryOffer, WrongArgumentsOfOpenAreRefused) {
  const auto open = [](std::size_t bytes, milliseconds timeout, std::byte change) {
    SharedMemoryOffer offer(0, 1);
    std::vector<std::byte> all = gathered({&offer});
    all[0] ^= change;
    all.resize(bytes);
    return thrown_text<InvalidArgument>(
        [&] { SharedMemoryGroup::open(std::move(offer), all, timeout); });
  };
  constexpr std::byte kNone{0};
  EXPECT_EQ(open(255, milliseconds(1), kNone), "offers: got 255 bytes, expected 256");
  EXPECT_EQ(open(256, milliseconds(0), kNone), "timeout: got 0 ms, expected 1 ms to 2^40 ms");
  EXPECT_TRUE(contains(open(256, milliseconds(1), std::byte{1}), "expected this rank's offer"));

  SharedMemoryOffer offer(0, 1);
  SharedMemoryOffer& used = offer;
  const std::vector<std::byte> all = gathered({&offer});
  EXPECT_NE(SharedMemoryGroup::open(std::move(offer), all).group, nullptr);
  EXPECT_TRUE(
      contains(thrown_text<InvalidArgument>([&] { SharedMemoryGroup::open(std::move(used), all); }),
               "offer: got one that was used"));
}

TEST(SharedMemoryOffer, AForkedChildCannotUseItsParentsOffer) {
  SharedMemoryOffer offer(0, 1);
  const pid_t child = fork();
  if (child == 0) {
    const std::vector<std::byte> all = gathered({&offer});
    const std::string text =
        thrown_text<InvalidArgument>([&] { SharedMemoryGroup::open(std::move(offer), all); });
    _exit(text.find("offer: got that of process") == 0 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const std::vector<std::byte> all = gathered({&offer});
  EXPECT_NE(SharedMemoryGroup::open(std::move(offer), all).group, nullptr);
}

}  // namespace
}  // namespace syncbn
