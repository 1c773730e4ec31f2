// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "small_step.hpp"
#include "statistics/header.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// What syncbn/batch_norm.hpp promises of a layer, what it saves and its memory, besides numbers.
namespace syncbn::testing {
namespace {

TEST(Saved, ServesOtherShapesAndLayersExact) {
  Communicator& self = self_communicator();
  Saved kept;
  expect_empty(kept);
  for (const std::vector<std::int64_t>& sizes :
       std::vector<std::vector<std::int64_t>>{{2, 3, 4}, {5, 7, 9}, {1, 2}, {0, 4}, {5, 7, 9}}) {
    for (const bool residual : {false, true}) {
      const std::string name = "layer of " + std::to_string(sizes[1]);
      BatchNorm layer({.channels = sizes[1], .name = name, .activation = {ActivationKind::kRelu}},
                      self);
      SmallStep step(sizes), expected(sizes);
      Saved fresh;
      step.forward(layer, kept, residual);
      expected.forward(layer, fresh, residual);
      step.backward(layer, kept, residual);
      expected.backward(layer, fresh, residual);
      EXPECT_TRUE(same_bits(kept.mean(), fresh.mean()));
      EXPECT_TRUE(same_bits(kept.var(), fresh.var()));
      EXPECT_TRUE(same_bits(kept.rstd(), fresh.rstd()));
      EXPECT_EQ(kept.mean().size(), static_cast<std::size_t>(sizes[1]));
      EXPECT_EQ(kept.count(), fresh.count());
      EXPECT_TRUE(same_bits(step.y.values(), expected.y.values()));
      EXPECT_TRUE(same_bits(step.dx.values(), expected.dx.values()));
      EXPECT_TRUE(same_bits(step.dresidual.values(), expected.dresidual.values()));
    }
  }
}

TEST(Saved, AndLayersMoveExact) {
  SmallStep step({2, 3, 4}), expected({2, 3, 4});
  Communicator& self = self_communicator();
  BatchNorm first({.channels = 3, .name = "moved"}, self), third({.channels = 5}, self);
  Saved one, three;
  expected.forward(first, one);
  expected.backward(first, one);
  BatchNorm second = std::move(first);
  Saved two = std::move(one);
  third = std::move(second);
  three = std::move(two);
  EXPECT_EQ(three.count(), 8);
  const std::vector<double> dx = std::exchange(expected.dx, step.x).values();
  expected.backward(third, three);
  step.forward(third, three);
  EXPECT_TRUE(same_bits(step.y.values(), expected.y.values()));
  EXPECT_TRUE(same_bits(expected.dx.values(), dx));
  EXPECT_TRUE(
      contains(thrown_text<InvalidArgument>([&] { SmallStep({2, 4}).forward(third, three); }),
               "moved, call 2, forward"));
}

TEST(Layer, SaysWhatItIs) {
  ThreadGroup group(2);
  std::string name = "stem.bn1";
  BatchNorm layer({.channels = 3, .name = name, .eps = 0.5}, group.rank(1)), alone({.channels = 7});
  name = "gone";
  layer.set_momentum(0.25);
  EXPECT_EQ(layer.name(), "stem.bn1");
  EXPECT_EQ(layer.channels(), 3);
  EXPECT_EQ(layer.options().name, "stem.bn1");
  EXPECT_EQ(layer.options().eps, 0.5);
  EXPECT_EQ(layer.options().momentum, 0.25);
  EXPECT_EQ(layer.group(), &group.rank(1));
  EXPECT_EQ(alone.name(), "");
  EXPECT_EQ(alone.group(), &self_communicator());
}

TEST(Layer, ThatWasMovedFromSaysSo) {
  SmallStep step({2, 3, 4});
  BatchNorm layer({.channels = 3});
  Saved saved;
  const BatchNorm moved = std::move(layer);
  const std::function<void()> calls[] = {
      [&] { step.forward(layer, saved); },  // NOLINT(bugprone-use-after-move): what is tried
      [&] { step.backward(layer, saved); },
      [&] { layer.evaluate({.x = step.x.view(), .y = step.y.view()}); },
      [&] { layer.evaluate_backward({.dy = step.x.view(), .x = step.x.view()}); },
      [&] { layer.set_momentum(0.5); },
      [&] { layer.abandon_forward("no data"); },
      [&] { layer.check(); },
      [&] { EXPECT_EQ(layer.calls(), 0U); },
      [&] { EXPECT_EQ(layer.name(), ""); },
      [&] { EXPECT_EQ(layer.channels(), 3); },
      [&] { EXPECT_EQ(layer.options().eps, 1e-5); },
      [&] { EXPECT_EQ(layer.group(), nullptr); }};
  for (const auto& call : calls) {
    EXPECT_EQ(thrown_text<InvalidArgument>(call),
              "layer: got one that was moved from, expected another");
  }
  layer = BatchNorm({.channels = 3});
  EXPECT_NO_THROW(step.forward(layer, saved));
}

TEST(Saved, ThatWasMovedFromIsRefusedOnEveryRank) {
  ThreadGroup group(2, std::chrono::seconds(20));
  expect_no_errors(run_ranks(2, [&](int r) {
    BatchNorm layer({.channels = 3, .name = "layer"}, group.rank(r));
    SmallStep step({2, 3, 4});
    Saved saved;
    step.forward(layer, saved);
    Saved other;
    if (r == 1) {
      other = std::move(saved);
      expect_empty(saved);  // NOLINT(bugprone-use-after-move): what is tried
    }
    for (const auto& call : {std::function<void()>([&] { step.backward(layer, saved); }),
                             {[&] { step.forward(layer, saved); }}}) {
      if (r == 1) {
        EXPECT_TRUE(contains(thrown_text<InvalidArgument>(call),
                             "saved: got one that was moved from, expected another"));
      } else {
        EXPECT_TRUE(contains(thrown_text<PeerLost>(call), "saved: got one that was moved"));
      }
    }
    saved = Saved();
    step.forward(layer, saved);
    step.backward(layer, saved);
    EXPECT_EQ(saved.count(), 16);
  }));
}

TEST(Layer, CallThatFailsCountsOnEveryRank) {
  ThreadGroup group(3, std::chrono::seconds(20));
  expect_no_errors(run_ranks(3, [&](int r) {
    BatchNorm layer({.channels = 3, .name = "layer"}, group.rank(r));
    Saved saved;
    SmallStep step({2, 3, 4}), other({2, 3, 4}, DType::kBFloat16);
    step.forward(layer, saved);
    const auto error =
        error_of_call<DivergenceError>([&] { (r == 1 ? other : step).forward(layer, saved); });
    EXPECT_TRUE(contains(error.what(), "layer, call 1, forward"));
    EXPECT_EQ(error.ranks(), std::vector<int>{1});
    expect_empty(saved);
    step.forward(layer, saved);
    step.backward(layer, saved);
    EXPECT_EQ(saved.count(), 24);
    EXPECT_TRUE(contains(error_of_call<DivergenceError>([&] {
                           (r == 2 ? other : step).forward(layer, saved);
                         }).what(),
                         "layer, call 3, forward"));
  }));
}

TEST(Layer, WhoseGroupIsGoneSaysSo) {
  for (const auto kind : {GroupKind::kThreads, GroupKind::kSharedMemory}) {
    for (const int ranks : {1, 2}) {
      auto group = make_group(kind, ranks);
      const BatchNorm::Options options{.channels = 3, .name = "layer"};
      BatchNorm layer(options, group->rank(0));
      SmallStep step({2, 3, 4});
      Saved saved;
      if (ranks == 1) {
        step.forward(layer, saved);
      }
      group.reset();
      const std::function<void()> calls[] = {[&] { step.forward(layer, saved); },
                                             [&] { step.backward(layer, saved); },
                                             [&] { layer.abandon_forward("no data"); }};
      for (const auto& call : calls) {
        const auto error = error_of_call<InvalidArgument>(call);
        EXPECT_TRUE(contains(error.what(), "communicator: got one that is gone, expected"));
        EXPECT_EQ(error.layer(), "layer");
      }
      EXPECT_NO_THROW(layer.evaluate({.x = step.x.view(), .y = step.y.view()}));
      EXPECT_NO_THROW(layer.check());
      // Perhaps at the address of the one before; its layer's name is no matter.
      group = make_group(kind, ranks);
      EXPECT_NO_THROW(BatchNorm(options, group->rank(0)));
      std::optional<BatchNorm> next(std::in_place, options, group->rank(0));
      {
        const BatchNorm ends = std::move(layer);
      }
      const auto second = [&] { BatchNorm(options, group->rank(0)); };
      if (ranks > 1) {
        EXPECT_THROW(second(), Error);
      } else {
        EXPECT_NO_THROW(second());
      }
    }
  }
}

/// Rank 1 never comes.
TEST(Layer, EvaluatesOnOneRankAloneExact) {
  ThreadGroup group(2, std::chrono::milliseconds(50));
  BatchNorm layer({.channels = 3, .name = "layer"}, group.rank(0)), alone({.channels = 3});
  const Tensor mean(DType::kFloat32, {3}, {1, 2, 3}), var(DType::kFloat32, {3}, {4, 5, 6});
  SmallStep step({2, 3, 4}), expected({2, 3, 4});
  const auto run = [&](BatchNorm& of, SmallStep& s) {
    of.evaluate({.x = s.x.view(), .y = s.dresidual.view()});
    of.evaluate(
        {.x = s.x.view(), .running_mean = mean.view(), .running_var = var.view(), .y = s.y.view()});
    of.evaluate_backward({.dy = s.x.view(),
                          .x = s.x.view(),
                          .running_mean = mean.view(),
                          .running_var = var.view(),
                          .dx = s.dx.view()});
  };
  run(layer, step);
  run(alone, expected);
  EXPECT_TRUE(same_bits(step.y.values(), expected.y.values()));
  EXPECT_TRUE(same_bits(step.dx.values(), expected.dx.values()));
  EXPECT_TRUE(same_bits(step.dresidual.values(), expected.dresidual.values()));
  Saved saved;
  EXPECT_THROW(step.forward(layer, saved), ExchangeTimeout);
}

TEST(Layer, CheckDoesNothingOnTheCpu) {
  ThreadGroup group(1);
  const auto check = [](BatchNorm layer) {
    SmallStep step({2, 3, 4});
    Saved saved;
    EXPECT_NO_THROW(layer.check());
    step.forward(layer, saved);
    EXPECT_NO_THROW(layer.check());
    EXPECT_THROW(SmallStep({2, 4}).forward(layer, saved), InvalidArgument);
    EXPECT_NO_THROW(layer.check());
  };
  check(BatchNorm({.channels = 3}));
  check(BatchNorm({.channels = 3, .name = "layer"}, group.rank(0)));
}

/// A rank of two that do the same, which notes the fingerprints that it sends.
class Twin final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void all_reduce_sum(std::span<std::int64_t> words) override {
    fingerprints.push_back(static_cast<std::uint32_t>(words[1]));
    for (std::int64_t& word : words) {
      word *= 2;
    }
  }
  void abandon(const std::string&) override {}
  std::vector<std::uint32_t> fingerprints;
};

TEST(Layer, FingerprintsAreOfTheNameAndTheCall) {
  Twin group;
  BatchNorm layer({.channels = 3, .name = "foobar", .eps = 0.5}, group);
  Saved first, second;
  SmallStep step({2, 3, 4});
  step.forward(layer, first);
  step.forward(layer, second);
  step.backward(layer, second);
  step.backward(layer, first);
  // FNV-1a of "foobar", as its authors publish it.
  const std::uint64_t identity =
      layer_identity(0x85944171f73967e8U, {}, Statistics::kReproducible, false);
  const std::uint32_t call_0 = fingerprint(identity, 0, Direction::kForward, 3, 0.5);
  const std::uint32_t call_1 = fingerprint(identity, 1, Direction::kForward, 3, 0.5);
  EXPECT_EQ(group.fingerprints,
            (std::vector<std::uint32_t>{call_0, call_1, backward_fingerprint(call_1),
                                        backward_fingerprint(call_0)}));
}

}  // namespace
}  // namespace syncbn::testing
