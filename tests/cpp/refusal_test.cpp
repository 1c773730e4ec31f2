// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "groups.hpp"
#include "small_step.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// A group goes on after an argument that a rank refused, and begins again after it broke.
namespace syncbn::testing {
namespace {

constexpr std::chrono::seconds kLong(20);
constexpr int kRanks = 3;

class Refusals : public ::testing::TestWithParam<GroupKind> {};

/// What a rank's call throws: InvalidArgument where it is the one that refuses.
template <class Call>
void expect_refused(bool refuses, const Call& call, const std::vector<int>& refusing) {
  if (refuses) {
    EXPECT_TRUE(error_of_call<InvalidArgument>(call).ranks().empty());
    return;
  }
  const auto error = error_of_call<PeerLost>(call);
  EXPECT_EQ(error.ranks(), refusing);
  EXPECT_EQ(error.layer(), "layer");
  for (const int rank : refusing) {
    EXPECT_TRUE(
        contains(error.what(), "rank " + std::to_string(rank) + " refused its call: layer"));
  }
}

/// The bits of a step after `before` calls.
std::vector<double> step_of(BatchNorm& layer, SmallStep& step, Saved& saved) {
  step.forward(layer, saved);
  step.backward(layer, saved);
  return step.dx.values();
}

TEST_P(Refusals, OfAnArgumentLeaveTheGroupUsableExact) {
  for (const Statistics statistics : {Statistics::kReproducible, Statistics::kWelford}) {
    const auto group = make_group(GetParam(), kRanks, kLong);
    expect_no_errors(run_ranks(kRanks, [&](int r) {
      BatchNorm layer({.channels = 3, .name = "layer", .statistics = statistics}, group->rank(r));
      Saved saved, good;
      SmallStep step({2, 3, 4}), other({2, 4, 3});
      const std::vector<double> expected = step_of(layer, step, good);
      for (const std::vector<int>& refusing :
           std::vector<std::vector<int>>{{1}, {0}, {0, 2}, {1}, {0, 1, 2}}) {
        const bool refuses = std::find(refusing.begin(), refusing.end(), r) != refusing.end();
        expect_refused(refuses, [&] { (refuses ? other : step).forward(layer, saved); }, refusing);
        expect_refused(  // twice in a row, and of both directions
            refuses, [&] { step.backward(layer, refuses ? saved : good); }, refusing);
        expect_refused(
            refuses,
            [&] {
              if (refuses) {
                layer.abandon_forward("layer: no data");
                throw InvalidArgument("no data");
              }
              step.forward(layer, saved);
            },
            refusing);
        EXPECT_TRUE(same_bits(step_of(layer, step, good), expected));
      }
    }));
  }
}

/// The others come later than the rank that refuses goes on.
TEST_P(Refusals, WaitForNobody) {
  const auto group = make_group(GetParam(), 2, kLong);
  std::promise<void> refused;
  auto done = refused.get_future().share();
  expect_no_errors(run_ranks(2, [&](int r) {
    BatchNorm layer({.channels = 3, .name = "layer"}, group->rank(r));
    Saved saved;
    SmallStep step({2, 3, 4}), other({2, 4, 3});
    if (r == 1) {
      EXPECT_THROW(other.forward(layer, saved), InvalidArgument);
      refused.set_value();
    } else {
      done.wait();
      expect_refused(false, [&] { step.forward(layer, saved); }, {1});
    }
    step_of(layer, step, saved);
  }));
}

TEST_P(Refusals, OfSumsLeaveTheGroupUsable) {
  const auto group = make_group(GetParam(), 2, kLong);
  expect_no_errors(run_ranks(2, [&](int r) {
    Communicator& end = group->rank(r);
    std::vector<std::int64_t> words = {5};
    if (r == 0) {
      end.refuse(std::string(2000, 'x'));  // a long reason is cut
    } else {
      EXPECT_TRUE(contains(error_of_call<PeerLost>([&] { end.all_reduce_sum(words); }).what(),
                           std::string(500, 'x')));
    }
    end.all_reduce_sum(words);
    EXPECT_EQ(words[0], 10);
  }));
}

/// A rank that ends after it refused: the others learn the reason and not only that it is gone.
TEST_P(Refusals, AreNotHiddenByAnAbandon) {
  const auto group = make_group(GetParam(), 2, kLong);
  group->rank(1).refuse("its argument");
  group->rank(1).abandon("it ends");
  std::vector<std::int64_t> words = {1};
  EXPECT_TRUE(
      contains(error_of_call<PeerLost>([&] { group->rank(0).all_reduce_sum(words); }).what(),
               "rank 1 refused its call: its argument"));
  EXPECT_THROW(group->rank(0).all_reduce_sum(words), PeerLost);
}

/// Who is not in time is named, also after a refusal whose other half is to come.
TEST_P(Refusals, DoNotHideWhoIsMissing) {
  const auto group = make_group(GetParam(), 2, std::chrono::milliseconds(50));
  group->rank(1).refuse("its argument");
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::vector<std::int64_t> words = {1};
  const auto error = error_of_call<ExchangeTimeout>([&] { group->rank(1).all_reduce_sum(words); });
  EXPECT_EQ(error.ranks(), std::vector<int>{0});
}

INSTANTIATE_TEST_SUITE_P(, Refusals,
                         ::testing::Values(GroupKind::kThreads, GroupKind::kSharedMemory,
                                           GroupKind::kFramed),
                         [](const auto& info) { return name(info.param); });

TEST(Reset, OfThreadsBeginsAgainWithTheirLayersExact) {
  ThreadGroup group(2, std::chrono::milliseconds(200));
  std::vector<std::unique_ptr<BatchNorm>> layers;
  for (int r = 0; r < 2; ++r) {
    layers.push_back(std::make_unique<BatchNorm>(BatchNorm::Options{.channels = 3, .name = "layer"},
                                                 group.rank(r)));
  }
  const auto step = [&](int r) {
    Saved saved;
    SmallStep s({2, 3, 4});
    return step_of(*layers[static_cast<std::size_t>(r)], s, saved);
  };
  std::vector<std::vector<double>> results(2);
  const auto all = [&] {
    expect_no_errors(run_ranks(2, [&](int r) { results[static_cast<std::size_t>(r)] = step(r); }));
  };
  all();
  const auto expected = results;
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(step(0), ExchangeTimeout);  // rank 1 does not come, and its layer counts nothing
    EXPECT_THROW(step(1), PeerLost);
    EXPECT_THROW(step(0), PeerLost);
    group.reset();
    EXPECT_EQ(layers[0]->calls(), 0U);
    all();
    EXPECT_TRUE(same_bits(results[0], expected[0]) && same_bits(results[1], expected[1]));
    EXPECT_EQ(layers[0]->calls(), 1U);
    EXPECT_EQ(layers[1]->calls(), 1U);
  }
  group.rank(1).abandon("enough");
  group.reset();
  all();
}

TEST(Reset, OfSharedMemoryBeginsAgainWithItsLayersExact) {
  SharedMemoryRanks group(2, std::chrono::milliseconds(200));
  ThreadGroup other(2, kLong);  // gathers
  expect_no_errors(run_ranks(2, [&](int r) {
    BatchNorm layer({.channels = 3, .name = "layer"}, group.rank(r));
    Saved saved;
    SmallStep step({2, 3, 4});
    const std::vector<double> expected = step_of(layer, step, saved);
    if (r == 0) {
      EXPECT_THROW(step.forward(layer, saved), PeerLost);  // rank 1 resets meanwhile
    }
    group.rank(r).reset([&](std::span<const std::byte> mine, std::span<std::byte> all) {
      gather(other.rank(r), mine, all);
    });
    EXPECT_EQ(layer.calls(), 0U);
    EXPECT_TRUE(same_bits(step_of(layer, step, saved), expected));
  }));
}

TEST(Run, GivesEachRankAThread) {
  ThreadGroup group(4);
  std::atomic<int> sum{0};
  run(group, [&](Communicator& end) {
    std::vector<std::int64_t> words = {end.rank()};
    end.all_reduce_sum(words);
    sum += static_cast<int>(words[0]);
  });
  EXPECT_EQ(sum, 24);
}

/// The others would wait for five minutes.
TEST(Run, ThrowsWhatARankThrewAndLetsNobodyWait) {
  const auto begin = std::chrono::steady_clock::now();
  for (const bool typed : {true, false}) {
    ThreadGroup group(3);
    std::atomic<int> told{0};
    const auto error = run_ranks(1, [&](int) {
      run(group, [&](Communicator& end) {
        BatchNorm layer({.channels = 3, .name = "layer"}, end);
        Saved saved;
        if (end.rank() == 1) {
          typed ? throw std::runtime_error("no data") : throw 5;
        }
        const std::string text =
            error_of_call<PeerLost>([&] { SmallStep({2, 3, 4}).forward(layer, saved); }).what();
        told += contains(text, typed ? "rank 1 left the group: no data" : "an unknown type");
      });
    })[0];
    EXPECT_EQ(told, 2);
    if (typed) {
      EXPECT_EQ(text_of<std::runtime_error>(error), "no data");
    } else {
      EXPECT_THROW(std::rethrow_exception(error), int);
    }
    group.reset();
    EXPECT_NO_THROW(run(group, [](Communicator& end) {
      std::vector<std::int64_t> words = {1};
      end.all_reduce_sum(words);
    }));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLong);
}

}  // namespace
}  // namespace syncbn::testing
