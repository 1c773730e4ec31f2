// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "small_step.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// A backward that does not fit its forward is refused, not answered with other numbers.
namespace syncbn::testing {
namespace {

constexpr std::int64_t kChannels = 3;
const Extents kSizes = {2, kChannels, 4};

/// One forward and its backward, whose arguments a case changes.
struct Step {
  std::vector<float> x = numbers(24, 1.0F), dy = numbers(24, 0.3F), added = numbers(24, -0.2F);
  std::vector<float> y = std::vector<float>(24), dx = std::vector<float>(24, 7.0F),
                     dresidual = std::vector<float>(24, 7.0F);
  std::vector<float> weight = {0.5F, 2.0F, -1.0F}, bias = {0.1F, -0.2F, 0.3F};
  std::vector<std::uint8_t> mask = {1, 1, 0, 1, 1, 1, 1, 1};
  BatchNorm::Forward forward{.x = {x, kSizes},
                             .weight = {weight, {kChannels}},
                             .bias = {bias, {kChannels}},
                             .y = {y, kSizes}};
  BatchNorm::Backward backward{.dy = {dy, kSizes},
                               .x = {x, kSizes},
                               .weight = {weight, {kChannels}},
                               .bias = {bias, {kChannels}},
                               .dx = {dx, kSizes}};

  Step() = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  static std::vector<float> numbers(int count, float scale) {
    std::vector<float> values;
    for (int i = 0; i < count; ++i) {
      values.push_back(scale * static_cast<float>(i * 7 % 11 - 4));
    }
    return values;
  }
  /// A backward that fits the forward.
  BatchNorm::Backward fitting() {
    const DType dtype = forward.x.dtype;
    return {.dy = {dy.data(), dtype, kSizes},
            .x = forward.x,
            .mask = forward.mask,
            .weight = forward.weight,
            .bias = forward.bias,
            .dx = {dx.data(), dtype, kSizes}};
  }
  MaskView whole_mask() const { return {mask.data(), {2, 4}}; }
};

struct Mismatch {
  const char* text;
  std::function<void(Step&)> change;
};

std::vector<Mismatch> mismatches() {
  return {
      {"weight: got none, expected that of the forward",
       [](Step& s) { s.backward.weight = TensorView(); }},
      {"weight: got one, expected none, as in the forward",
       [](Step& s) { s.forward.weight = TensorView(); }},
      {"bias: got none, expected that of the forward",
       [](Step& s) { s.backward.bias = TensorView(); }},
      {"bias: got one, expected none, as in the forward",
       [](Step& s) { s.forward.bias = TensorView(); }},
      {"mask: got none, expected that of the forward",
       [](Step& s) { s.forward.mask = s.whole_mask(); }},
      {"mask: got one, expected none, as in the forward",
       [](Step& s) { s.backward.mask = s.whole_mask(); }},
      {"dresidual: got one, expected none, as the forward had no residual",
       [](Step& s) { s.backward.dresidual = {s.dresidual, kSizes}; }},
      {"x: got the forward's y, expected its x", [](Step& s) { s.backward.x = s.forward.y; }},
      {"x: got other memory than the forward did, expected the same x",
       [](Step& s) { s.backward.x = {s.added, kSizes}; }},
      {"x: got shape (2, 3, 2, 2), expected that of the forward, (2, 3, 4)",
       [](Step& s) {
         const Extents sizes = {2, kChannels, 2, 2};
         s.backward = {.dy = {s.dy, sizes},
                       .x = {s.x, sizes},
                       .weight = s.forward.weight,
                       .bias = s.forward.bias,
                       .dx = {s.dx, sizes}};
       }},
      {"x: got other strides than in the forward, expected the same x",
       [](Step& s) {
         const Extents strides = {12, 1, 3};
         s.backward.x = TensorView(s.x.data(), DType::kFloat32, kSizes, strides);
       }},
      {"x: got bfloat16, expected the dtype of the forward, float16",
       [](Step& s) {
         const auto as = [](auto& values, DType dtype) {
           return MutableTensorView(values.data(), dtype, kSizes);
         };
         s.forward.x = as(s.x, DType::kFloat16);
         s.forward.y = as(s.y, DType::kFloat16);
         s.backward.x = as(s.x, DType::kBFloat16);
         s.backward.dy = as(s.dy, DType::kBFloat16);
         s.backward.dx = as(s.dx, DType::kBFloat16);
       }},
      {"x: got the memory that the forward wrote y to, expected what the forward normalized",
       [](Step& s) { s.forward.y = {s.x, kSizes}; }},
  };
}

TEST(SavedStep, ThatDoesNotFitIsRefusedBeforeAnythingIsWritten) {
  for (const Mismatch& one : mismatches()) {
    for (const ActivationKind kind : {ActivationKind::kNone, ActivationKind::kRelu}) {
      Step s;
      one.change(s);
      BatchNorm layer({.channels = kChannels, .activation = {kind}});
      Saved saved;
      layer.forward(s.forward, saved);
      EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { layer.backward(s.backward, saved); }),
                           one.text));
      EXPECT_EQ(s.dx, std::vector<float>(24, 7.0F)) << one.text;
      EXPECT_EQ(s.dresidual, std::vector<float>(24, 7.0F)) << one.text;
    }
  }
}

TEST(SavedStep, ThatDoesNotFitOnOneRankIsToldToTheOthers) {
  for (const Mismatch& one : mismatches()) {
    ThreadGroup group(3, std::chrono::seconds(20));
    const auto errors = run_ranks(3, [&](int r) {
      Step s;
      one.change(s);
      BatchNorm layer({.channels = kChannels, .name = "bn"}, group.rank(r));
      Saved saved;
      layer.forward(s.forward, saved);
      layer.backward(r == 1 ? s.backward : s.fitting(), saved);
    });
    const bool in_place = std::string(one.text).find("wrote y to") != std::string::npos;
    EXPECT_TRUE(contains(text_of<InvalidArgument>(errors[1]), one.text));
    for (const std::size_t r : {0U, 2U}) {
      if (in_place) {  // as the forward is the same on all ranks
        EXPECT_TRUE(contains(text_of<InvalidArgument>(errors[r]), one.text));
      } else {
        EXPECT_TRUE(contains(text_of<PeerLost>(errors[r]), "rank 1 refused its call"));
        EXPECT_TRUE(contains(text_of<PeerLost>(errors[r]), one.text));
      }
    }
  }
}

TEST(SavedStep, OfAnotherLayerIsRefusedWithoutANameToo) {
  Step s;
  BatchNorm first({.channels = kChannels}), second({.channels = kChannels, .eps = 0.5});
  Saved saved;
  const auto expect_refused = [&](BatchNorm& layer) {
    EXPECT_TRUE(contains(
        thrown_text<InvalidArgument>([&] { layer.backward(s.backward, saved); }),
        "saved: got that of another layer, expected one that this layer's forward filled"));
  };
  first.forward(s.forward, saved);
  expect_refused(second);
  BatchNorm moved = std::move(first);
  EXPECT_NO_THROW(moved.backward(s.backward, saved));
  for (int i = 0; i < 4; ++i) {  // perhaps at the address of the one before
    const auto layer = std::make_unique<BatchNorm>(BatchNorm::Options{.channels = kChannels});
    expect_refused(*layer);
    layer->forward(s.forward, saved);
  }
}

TEST(SavedStep, IsUsedUpByAnInputGradientInTheMemoryOfX) {
  Step s;
  BatchNorm layer({.channels = kChannels});
  Saved saved;
  layer.forward(s.forward, saved);
  s.backward.dx = {s.x, kSizes};
  layer.backward(s.backward, saved);
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { layer.backward(s.backward, saved); }),
                       "x: got the memory that an earlier backward wrote dx to, expected what the "
                       "forward normalized"));
  layer.forward(s.forward, saved);
  EXPECT_NO_THROW(layer.backward(s.backward, saved));
}

TEST(SavedStep, OfOtherElementsThanTheMaskHasNowIsADivergence) {
  ThreadGroup group(2, std::chrono::seconds(20));
  for (const int ranks : {1, 2}) {
    for (const auto& error : run_ranks(ranks, [&](int r) {
           Step s;
           s.forward.mask = s.backward.mask = s.whole_mask();
           BatchNorm layer = ranks == 1
                                 ? BatchNorm({.channels = kChannels})
                                 : BatchNorm({.channels = kChannels, .name = "bn"}, group.rank(r));
           Saved saved;
           layer.forward(s.forward, saved);
           s.mask[0] = static_cast<std::uint8_t>(r);
           layer.backward(s.backward, saved);
         })) {
      EXPECT_TRUE(contains(text_of<DivergenceError>(error), "backward: the ranks bring"));
    }
  }
}

TEST(SavedStep, WithoutSamplesNeedsNoMemoryOfX) {
  std::vector<float> weight(kChannels, 1.0F), a, b, c;
  BatchNorm layer({.channels = kChannels});
  Saved saved;
  const Extents none = {0, kChannels, 4};
  layer.forward({.x = {a, none}, .weight = {weight, {kChannels}}, .y = {b, none}}, saved);
  float somewhere = 0;
  EXPECT_NO_THROW(layer.backward({.dy = {c, none},
                                  .x = TensorView(&somewhere, DType::kFloat32, none),
                                  .weight = {weight, {kChannels}},
                                  .dx = {c, none}},
                                 saved));
}

}  // namespace
}  // namespace syncbn::testing
