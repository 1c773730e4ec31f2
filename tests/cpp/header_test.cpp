// SPDX-License-Identifier: Apache-2.0
#include "statistics/header.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/error.hpp"
#include "syncbn/step.hpp"

namespace syncbn::testing {
namespace {

constexpr std::uint32_t kLargest = (1u << 20) - 1;

struct Message {
  std::int64_t words[kHeaderWords] = {};
  void add(std::int64_t count, std::uint32_t fingerprint, std::int64_t flags) {
    std::int64_t one[kHeaderWords];
    write_header(one, count, fingerprint, flags);
    for (int i = 0; i < kHeaderWords; ++i) {
      words[i] += one[i];
    }
  }
};

TEST(Fingerprint, TwentyBitsThatDependOnEveryInput) {
  const auto of = [](std::uint64_t layer, std::uint64_t call, Direction direction,
                     std::int64_t channels, double eps) {
    const std::uint32_t h = fingerprint(layer, call, direction, channels, eps);
    EXPECT_LE(h, kLargest);
    EXPECT_EQ(h, fingerprint(layer, call, direction, channels, eps));
    return h;
  };
  const std::uint32_t base = of(3, 7, Direction::kForward, 64, 1e-5);
  EXPECT_NE(of(4, 7, Direction::kForward, 64, 1e-5), base);
  EXPECT_NE(of(3, 8, Direction::kForward, 64, 1e-5), base);
  EXPECT_NE(of(3, 7, Direction::kBackward, 64, 1e-5), base);
  EXPECT_NE(of(3, 7, Direction::kForward, 65, 1e-5), base);
  EXPECT_NE(of(3, 7, Direction::kForward, 64, 1e-6), base);
  EXPECT_NE(of(3, 7, Direction::kForward, 64, std::nextafter(1e-5, 1.0)), base);
  EXPECT_NE(of(7, 3, Direction::kForward, 64, 1e-5), base);
  EXPECT_NE(of(std::uint64_t{1} << 63 | 3, 7, Direction::kForward, 64, 1e-5), base);
  EXPECT_NE(backward_fingerprint(base), base);
  EXPECT_LE(backward_fingerprint(kLargest), kLargest);
}

// Neighbouring layers and calls collide about as seldom as random 20-bit numbers do: 10,000 of them
// have 10000^2 / 2 / 2^20 = 48 colliding pairs on average, and more than 120 would be over ten
// standard deviations away.
TEST(Fingerprint, SpreadsNeighbours) {
  std::set<std::uint32_t> forward, backward;
  for (std::uint64_t layer = 0; layer < 100; ++layer) {
    for (std::uint64_t call = 0; call < 100; ++call) {
      forward.insert(fingerprint(layer, call, Direction::kForward, 64, 1e-5));
    }
  }
  for (std::uint32_t h = 0; h < 10000; ++h) {
    backward.insert(backward_fingerprint(h));
  }
  EXPECT_GE(forward.size(), 10000u - 120);
  EXPECT_GE(backward.size(), 10000u - 120);
}

TEST(Header, RanksAgreeExactlyWhenAllFingerprintsAreEqual) {
  Random random(40);
  for (const int ranks : {1, 2, 3, 8, 2047, 2048}) {
    for (int round = 0; round < 200; ++round) {
      const auto h = static_cast<std::uint32_t>(round == 0   ? 0
                                                : round == 1 ? kLargest
                                                             : random.between(0, kLargest));
      Message equal, one_differs;
      // By the smallest difference there is, or any.
      const std::uint32_t other =
          random.one_in(2) ? h ^ 1u : h ^ static_cast<std::uint32_t>(random.between(1, kLargest));
      const auto odd = static_cast<int>(random.between(0, ranks - 1));
      for (int r = 0; r < ranks; ++r) {
        equal.add(5, h, dtype_flag(DType::kFloat32));
        one_differs.add(5, r == odd ? other : h, dtype_flag(DType::kFloat32));
      }
      const MessageInfo info = read_header(equal.words, ranks);
      ASSERT_TRUE(info.agree) << ranks;
      ASSERT_EQ(info.count, 5 * ranks);
      ASSERT_EQ(info.dtype, DType::kFloat32);
      ASSERT_TRUE(info.any_data);
      ASSERT_FALSE(info.any_rejected);
      ASSERT_NO_THROW(check_header(info));
      ASSERT_EQ(read_header(one_differs.words, ranks).agree, ranks == 1) << ranks;
    }
  }
}

TEST(Header, DtypesOfRanksWithSamplesMustBeEqual) {
  for (const DType a : kDtypes) {
    for (const DType b : kDtypes) {
      Message message;
      for (int r = 0; r < 2048; ++r) {
        message.add(1, 77, dtype_flag(r == 1000 ? b : a));
      }
      const MessageInfo info = read_header(message.words, 2048);
      EXPECT_EQ(info.agree, a == b) << name(a) << " and " << name(b);
      EXPECT_FALSE(info.any_rejected);
      EXPECT_TRUE(info.any_data);
      if (a == b) {
        EXPECT_EQ(info.dtype, a);
      }
    }
  }
}

TEST(Header, RejectionReachesEveryone) {
  std::int64_t rejection[kHeaderWords];
  rejection_header(rejection);
  for (const int refusing : {1, 2, 2047}) {
    Message message;
    for (int r = 0; r < 2048; ++r) {
      if (r < refusing) {
        for (int i = 0; i < kHeaderWords; ++i) {
          message.words[i] += rejection[i];
        }
      } else {
        message.add(3, 77, dtype_flag(DType::kFloat64));
      }
    }
    const MessageInfo info = read_header(message.words, 2048);
    EXPECT_TRUE(info.any_rejected);
    EXPECT_EQ(info.dtype, DType::kFloat64);
    EXPECT_EQ(info.count, 3 * (2048 - refusing));
    EXPECT_THROW(check_header(info), DivergenceError);
  }
}

// Sums that no ranks can bring, but another program's memory can hold.
TEST(Header, WordsMayBeAny) {
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  const std::int64_t words[kHeaderWords] = {least, least, -1, 0};
  EXPECT_FALSE(read_header(words, 2048).agree);
  const MessageInfo info = {.count = -1, .agree = true, .any_data = true};
  std::vector<std::int64_t> sums(19, 1);
  sums.back() = 0;  // no flags
  double mean = 0, var = 0, rstd = 0;
  finalize_moments(info, sums.data(), &mean, &var, &rstd, 1, 1e-5, serial_executor());
  EXPECT_TRUE(std::isnan(mean) && std::isnan(var) && std::isnan(rstd));
}

TEST(Doors, FinishWritesAllThatBackwardNeedsOfTheForward) {
  const Tensor x(DType::kFloat32, {2, 1, 3}, {1, 2, 3, 4, 5, 6});
  const std::int64_t call = 5;
  std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(DType::kFloat32, 1)));
  std::vector<std::int64_t> back = message;
  const ForwardStep begin{.pass = {.x = x.view()}, .layer = 3, .call = &call};
  forward_begin(begin, message.data(), {});  // in a framework that shares no memory with finish
  double mean = 0, var = 0, rstd = 0;
  std::int64_t info[kInfoWords] = {-9, -9};
  const ForwardStep finish{.pass = {.x = x.view(), .mean = &mean, .var = &var, .rstd = &rstd},
                           .info = info};
  forward_finish(finish, {message.data(), message.data() + kHeaderWords, DType::kFloat32, 1}, {});
  EXPECT_EQ(info[0], 6);
  EXPECT_EQ(info[1], fingerprint(3, 5, Direction::kForward, 1, 1e-5));
  const BackwardStep backward{{.dy = x.view(), .x = x.view(), .mean = &mean, .rstd = &rstd}, info};
  backward_begin(backward, back.data(), nullptr, {});
  EXPECT_EQ(back[kHeaderFingerprint], backward_fingerprint(static_cast<std::uint32_t>(info[1])));
}

}  // namespace
}  // namespace syncbn::testing
