// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "small_step.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/c_api.h"

// What syncbn/error.hpp promises of the errors of a layer.
namespace syncbn::testing {
namespace {

TEST(LayerErrors, NameTheLayerAndTheCall) {
  std::string name = "stem.bn1";
  Communicator& self = self_communicator();
  BatchNorm layer({.channels = 3, .name = name}, self);
  name = "gone";  // it was copied
  SmallStep step({2, 3, 4}), wide({2, 64}, DType::kBFloat16);
  Saved saved;
  step.forward(layer, saved);
  step.forward(layer, saved);
  const TensorView x = std::as_const(wide.x).view();
  const MutableTensorView y = wide.y.view();
  const std::string channels = ", 64 channels, bfloat16: x: got 64 channels, expected ";
  const auto expect = [](const std::string& text, const auto& call) {
    const auto error = error_of_call<InvalidArgument>(call);
    EXPECT_TRUE(std::string(error.what()).starts_with(text)) << error.what();
    EXPECT_EQ(error.layer(), "stem.bn1");
    EXPECT_TRUE(error.ranks().empty());
  };
  expect("stem.bn1, call 1, backward, 64 channels, bfloat16: saved: got 3 channels",
         [&] { wide.backward(layer, saved); });
  expect("stem.bn1, call 2, forward" + channels, [&] { wide.forward(layer, saved); });
  expect("stem.bn1, call 3, forward: x: got none", [&] { layer.forward({}, saved); });
  expect("stem.bn1, evaluation" + channels, [&] { layer.evaluate({.x = x, .y = y}); });
  expect("stem.bn1, backward of an evaluation" + channels,
         [&] { layer.evaluate_backward({.dy = x, .x = x, .dx = y}); });
}

TEST(LayerErrors, OfALayerWithoutANameAndOfItsMakingHaveTheTextAlone) {
  BatchNorm layer({.channels = 3});
  Saved saved;
  const auto expect = [](const std::string& text, const auto& call) {
    const auto error = error_of_call<InvalidArgument>(call);
    EXPECT_TRUE(std::string(error.what()).starts_with(text)) << error.what();
    EXPECT_EQ(error.layer(), "");
  };
  expect("x: got 4 channels", [&] { SmallStep({2, 4}).forward(layer, saved); });
  expect("channels: got -1", [] { BatchNorm({.channels = -1}); });
}

/// A group that was forgotten would be a layer without synchronization.
TEST(LayerErrors, ANameWithoutAGroupIsRefusedInTraining) {
  SmallStep step({2, 3, 4});
  BatchNorm layer({.channels = 3, .name = "stem.bn1"});
  Saved saved;
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { step.forward(layer, saved); }),
                       "stem.bn1, call 0, forward, 3 channels, float32: communicator: got none"));
  EXPECT_NO_THROW(layer.evaluate({.x = step.x.view(), .y = step.y.view()}));
}

/// In the call, not before it, where the others would wait for this rank.
TEST(LayerErrors, AVectorOfAnotherLengthReachesTheOtherRanks) {
  ThreadGroup group(2, std::chrono::seconds(20));
  const auto errors = run_ranks(2, [&](int r) {
    const std::vector<float> x(8, 1.0F);
    std::vector<float> y(r == 1 ? 7 : 8);
    BatchNorm layer({.channels = 4, .name = "bn"}, group.rank(r));
    Saved saved;
    layer.forward({.x = {x, {2, 4}}, .y = {y, {2, 4}}}, saved);
  });
  const std::string text =
      "bn, call 0, forward, 4 channels, float32: y: got 7 elements, expected those of shape (2, 4)";
  EXPECT_EQ(error_of<InvalidArgument>(errors[1]).what(), text);
  EXPECT_TRUE(contains(error_of<PeerLost>(errors[0]).what(), "rank 1 refused its call: " + text));
}

/// Calls of one would be taken for calls of the other.
TEST(LayerErrors, TwoLayersOfOneNameInAGroupAreRefused) {
  ThreadGroup group(2, std::chrono::seconds(20));
  const BatchNorm::Options options{.channels = 3, .name = "bn"};
  {
    BatchNorm one(options, group.rank(0)), of_the_other_rank(options, group.rank(1));
    BatchNorm moved = std::move(one);
    EXPECT_TRUE(contains(
        thrown_text<InvalidArgument>([&] { BatchNorm two(options, group.rank(0)); }),
        "bn: options.name: got bn, which another layer of this group has, expected a name of its"));
  }
  ThreadGroup fresh(2);
  EXPECT_NO_THROW(BatchNorm(options, fresh.rank(0)));
  EXPECT_NO_THROW(BatchNorm(options, fresh.rank(0)));  // the first is gone
}

TEST(LayerErrors, KeepTheFirstLayerAndTheRanks) {
  Error error("text", {2, 5});
  const Error before = error;
  error.set_layer("inner", "inner, call 3");
  error.set_layer("outer", "outer, call 1");
  EXPECT_STREQ(error.what(), "inner, call 3: text");
  EXPECT_EQ(error.layer(), "inner");
  EXPECT_EQ(error.ranks(), (std::vector<int>{2, 5}));
  EXPECT_STREQ(before.what(), "text");
  EXPECT_EQ(before.layer(), "");
}

TEST(LayerErrors, HaveAKindWithTheNumberOfC) {
  Error copies[] = {Error("text"),           InvalidArgument("text"), DivergenceError("text"),
                    ExchangeTimeout("text"), PeerLost("text"),        Unavailable("text")};
  const syncbn_status codes[] = {SYNCBN_STATUS_ERROR,      SYNCBN_STATUS_INVALID_ARGUMENT,
                                 SYNCBN_STATUS_DIVERGENCE, SYNCBN_STATUS_TIMEOUT,
                                 SYNCBN_STATUS_PEER_LOST,  SYNCBN_STATUS_UNAVAILABLE};
  for (std::size_t i = 0; i < std::size(copies); ++i) {
    copies[i].set_layer("bn", "bn, call 3");
    EXPECT_EQ(static_cast<int>(copies[i].kind()), codes[i]);
  }
}

TEST(LayerErrors, OfADivergenceNameTheLayersAndTheRanksThatDiffer) {
  const auto named = [](std::string_view name, double eps = 1e-5) {
    return BatchNorm::Options{.channels = 3, .name = name, .eps = eps};
  };
  const BatchNorm::Options usual = named("stem.bn1"), odd = named("stem.bn1", 1e-6);
  const std::string end(126, 'a');  // of a long name the exchange carries the end
  const std::string first = "begin" + end + ".1", second = "begin" + end + ".2";
  const struct {
    std::vector<BatchNorm::Options> options;
    std::vector<int> ranks;
    std::string text;
  } cases[] = {
      {{usual, usual, odd}, {2}, "eps: 1e-05 on ranks 0, 1, 1e-06 on rank 2"},
      {{usual, odd, usual}, {1}, "eps: 1e-05 on ranks 0, 2, 1e-06 on rank 1"},
      {{odd, usual, usual}, {1, 2}, "eps: 1e-06 on rank 0, 1e-05 on ranks 1, 2"},
      {{usual, named("stem.bn2")}, {1}, "layer: stem.bn1 on rank 0, stem.bn2 on rank 1"},
      {{named(first), named(second)},
       {1},
       "layer: " + end + ".1 on rank 0, " + end + ".2 on rank 1"},
  };
  for (const auto& one : cases) {
    const auto ranks = static_cast<int>(one.options.size());
    ThreadGroup group(ranks, std::chrono::seconds(20));
    expect_no_errors(run_ranks(ranks, [&](int r) {
      BatchNorm layer(one.options[static_cast<std::size_t>(r)], group.rank(r));
      Saved saved;
      const auto error =
          error_of_call<DivergenceError>([&] { SmallStep({2, 3, 4}).forward(layer, saved); });
      EXPECT_EQ(error.ranks(), one.ranks);
      EXPECT_EQ(error.layer(), layer.name());
      EXPECT_EQ(error.what(), std::string(layer.name()) +
                                  ", call 0, forward, 3 channels, float32: rank " +
                                  std::to_string(r) + " of " + std::to_string(ranks) +
                                  ": the ranks did not make the same call: " + one.text);
    }));
  }
}

}  // namespace
}  // namespace syncbn::testing
