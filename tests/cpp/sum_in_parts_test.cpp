// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "groups.hpp"
#include "support.hpp"
#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"

namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
constexpr milliseconds kLong = std::chrono::minutes(2);
constexpr milliseconds kLook(0);

/// Sums in parts of ranks whose calls one thread makes.
class Parts : public ::testing::TestWithParam<GroupKind> {
 protected:
  void make(int size, milliseconds timeout = kLong) {
    group_ = make_group(GetParam(), size, timeout);
  }
  SumInParts& of(int rank) { return *group_->rank(rank).parts(); }
  Communicator& rank(int rank) { return group_->rank(rank); }

 private:
  std::unique_ptr<Group> group_;
};

std::vector<std::int64_t> numbers(std::size_t length, std::int64_t first) {
  std::vector<std::int64_t> out(length);
  for (std::size_t i = 0; i < length; ++i) {
    out[i] = first + static_cast<std::int64_t>(i);
  }
  return out;
}

TEST_P(Parts, WhatAllHavePublishedIsThereBeforeTheRest) {
  make(2);
  const auto a = numbers(100, 1);
  const auto b = numbers(100, 1000);
  std::vector<std::int64_t> of_a(100, -1);
  std::vector<std::int64_t> of_b(100, -1);
  of(0).open(a, of_a);
  of(1).open(b, of_b);
  of(0).publish(40);
  EXPECT_FALSE(of(0).wait(1, kLook));
  of(1).publish(30);
  ASSERT_TRUE(of(0).wait(30, kLook));
  ASSERT_TRUE(of(1).wait(30, kLook));
  for (std::size_t i = 0; i < 30; ++i) {
    ASSERT_EQ(of_a[i], a[i] + b[i]);
    ASSERT_EQ(of_b[i], a[i] + b[i]);
  }
  EXPECT_EQ(of_a[40], -1);
  EXPECT_FALSE(of(0).wait(31, kLook));  // rank 1 has not published it
  of(1).publish(100);
  of(0).publish(100);
  for (bool done = false; !done;) {
    const bool first = of(0).wait(100, kLook);
    done = of(1).wait(100, kLook) && first;
  }
  for (std::size_t i = 0; i < 100; ++i) {
    ASSERT_EQ(of_a[i], a[i] + b[i]);
  }
  EXPECT_EQ(of_a, of_b);
}

TEST_P(Parts, AnyPartsInAnyOrderGiveTheSum) {
  Random random(20261123);
  for (int round = 0; round < 150; ++round) {
    const int ranks = static_cast<int>(random.between(1, 5));
    make(ranks);
    // Some pieces of slots, some in stripes.
    const auto length = static_cast<std::size_t>(random.between(0, round % 3 == 0 ? 60000 : 300));
    std::vector<std::vector<std::int64_t>> in;
    std::vector<std::vector<std::int64_t>> out;
    std::vector<std::int64_t> expected(length);
    for (int r = 0; r < ranks; ++r) {
      in.push_back(numbers(length, 7 * r + 1));
      out.emplace_back(length);
      for (std::size_t i = 0; i < length; ++i) {
        expected[i] += in.back()[i];
      }
    }
    const bool in_place = random.between(0, 1) == 0;
    const auto result = [&](int r) -> std::vector<std::int64_t>& {
      return (in_place ? in : out)[static_cast<std::size_t>(r)];
    };
    for (int exchange = 0; exchange < 2; ++exchange) {
      const std::vector<std::vector<std::int64_t>> before = in;
      std::vector<std::size_t> published(static_cast<std::size_t>(ranks));
      for (int r = 0; r < ranks; ++r) {
        of(r).open(in[static_cast<std::size_t>(r)], result(r));
      }
      int done = 0;
      std::vector<bool> is_done(static_cast<std::size_t>(ranks));
      while (done < ranks) {
        const int r = static_cast<int>(random.between(0, ranks - 1));
        std::size_t& ready = published[static_cast<std::size_t>(r)];
        if (ready < length && random.between(0, 2) != 0) {
          ready += static_cast<std::size_t>(
              random.between(1, static_cast<std::int64_t>(length - ready)));
          of(r).publish(ready);
        } else if (ready == length && of(r).wait(length, kLook)) {
          done += is_done[static_cast<std::size_t>(r)] ? 0 : 1;
          is_done[static_cast<std::size_t>(r)] = true;
        }
      }
      for (int r = 0; r < ranks; ++r) {
        ASSERT_EQ(result(r), expected) << ranks << " ranks, " << length << " words";
      }
      in = before;
    }
  }
}

TEST_P(Parts, MisuseIsAnError) {
  make(2);
  std::vector<std::int64_t> words(8);
  std::vector<std::int64_t> other(7);
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { of(0).open(words, other); }),
                       "out: got 7 words, expected 8"));
  of(0).open(words, words);
  EXPECT_TRUE(contains(thrown_text<Error>([&] { of(0).open(words, words); }), "under way"));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { of(0).publish(9); }),
                       "publish: got 9 words, expected 0 to 8"));
  EXPECT_TRUE(contains(thrown_text<Error>([&] { of(0).wait(4, kLong); }),
                       "wait: got 32 bytes, expected those published, 0"));
  for (const std::size_t wrong : {std::size_t{9}, std::size_t{1} << 61, ~std::size_t{0}}) {
    EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { of(0).wait(wrong, kLook); }),
                         "wait: got " + std::to_string(wrong) + " words, expected 0 to 8"));
  }
  for (const auto slice : {milliseconds(-1), milliseconds::max()}) {
    EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { of(0).wait(1, slice); }),
                         "slice: got " + std::to_string(slice.count()) + " ms, expected 0 ms to"));
  }
}

TEST_P(Parts, AWaitKeepsItsSliceAndTheTimeLimit) {
  make(2, milliseconds(150));
  std::vector<std::int64_t> words(4);
  of(0).open(words, words);
  of(0).publish(4);
  auto begin = steady_clock::now();
  EXPECT_FALSE(of(0).wait(4, milliseconds(60)));
  EXPECT_GE(steady_clock::now() - begin, milliseconds(60));
  const std::string text = thrown_text<ExchangeTimeout>([&] {
    while (!of(0).wait(4, kLook)) {
    }
  });
  EXPECT_GE(steady_clock::now() - begin, milliseconds(150));
  EXPECT_TRUE(contains(text, "rank 1 did not come"));
}

TEST_P(Parts, AllWaitsOfAnExchangeShareOneLimit) {
  make(2, milliseconds(200));
  std::vector<std::int64_t> first(4);
  std::vector<std::int64_t> second(4);
  of(0).open(first, first);
  of(1).open(second, second);
  const std::string text = thrown_text<ExchangeTimeout>([&] {
    for (std::size_t part = 1; part <= 4; ++part) {  // no wait alone is too long
      of(0).publish(part);
      EXPECT_FALSE(of(0).wait(part, milliseconds(90)));
      of(1).publish(part);
      EXPECT_TRUE(of(0).wait(part, kLook));
      EXPECT_TRUE(of(1).wait(part, kLook));
    }
  });
  EXPECT_TRUE(contains(text, "rank 1 did not come to the exchange within 200 ms"));
}

TEST_P(Parts, AnExchangeGivenUpIsAnErrorOfTheOthers) {
  for (const std::size_t published : {std::size_t{0}, std::size_t{2}, std::size_t{4}}) {
    make(3);
    std::vector<std::vector<std::int64_t>> words(3, std::vector<std::int64_t>(4));
    for (int r = 0; r < 3; ++r) {
      of(r).open(words[static_cast<std::size_t>(r)], words[static_cast<std::size_t>(r)]);
      of(r).publish(r == 0 ? published : r == 1 ? 4 : 1);
    }
    rank(0).abandon("interrupted");
    EXPECT_TRUE(of(0).wait(4, kLook));  // nothing is under way
    EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { of(1).wait(4, kLong); }), "interrupted"));
    EXPECT_TRUE(of(1).wait(4, kLook));
  }
}

TEST_P(Parts, LengthsThatDifferAreNamedAndTheGroupGoesOn) {
  make(2);
  std::vector<std::int64_t> first(4);
  std::vector<std::int64_t> second(5);
  of(0).open(first, first);
  of(1).open(second, second);
  of(0).publish(4);
  of(1).publish(2);
  EXPECT_TRUE(contains(thrown_text<DivergenceError>([&] { of(0).wait(4, kLong); }),
                       "rank 0 of 2 brought 32 bytes to the exchange, rank 1 brought 40"));
  EXPECT_TRUE(contains(thrown_text<DivergenceError>([&] { of(1).publish(5); }), "brought 40"));
  second.resize(4, 1);
  of(0).open(first, first);
  of(1).open(second, second);
  of(0).publish(4);
  of(1).publish(4);
  EXPECT_TRUE(of(0).wait(4, kLook));
  EXPECT_TRUE(of(1).wait(4, kLook));
  EXPECT_EQ(first, second);
}

INSTANTIATE_TEST_SUITE_P(Of, Parts,
                         ::testing::Values(GroupKind::kThreads, GroupKind::kSharedMemory),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace syncbn::testing
