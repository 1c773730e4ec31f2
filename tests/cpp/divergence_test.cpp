// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "small_step.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// What two ranks get when they do not make the same call.
namespace syncbn::testing {
namespace {

/// How long a rank would wait for one that does not come; prompt is far below.
constexpr auto kTimeout = std::chrono::seconds(10);
constexpr auto kPrompt = std::chrono::seconds(8);

/// One rank's call, after two forwards on which all ranks agree.
struct Step {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> sizes = {2, 3, 4};
  BatchNorm::Options options{.channels = 3, .name = "layer"};
  BatchNorm::Options before = options;
  bool same_layer = false;  ///< that of the forwards before: this is its third call
  AffineGradients affine = AffineGradients::kShare;
  bool weight = false;
  bool bias = false;
  bool backward = false;
  std::size_t saved = 1;  ///< backward's: of the first forward or of the second

  void run(Communicator& communicator) const {
    std::optional<BatchNorm> layer(std::in_place, before, communicator);
    std::array<Saved, 2> all;
    SmallStep of_forwards({2, 3, 4});
    of_forwards.forward(*layer, all[0]);
    of_forwards.forward(*layer, all[1]);
    const std::vector<double> ones(static_cast<std::size_t>(sizes[1]), 1.0);
    Tensor x(dtype, sizes);
    x.fill(std::vector<double>(static_cast<std::size_t>(x.numel()), 1.0));
    Tensor y = x;
    Tensor mean(DType::kFloat32, {sizes[1]}, ones);
    Tensor var = mean, dweight = mean, dbias = mean;
    std::int64_t tracked = 7;
    const TensorView x_view = std::as_const(backward ? of_forwards.x : x).view();
    try {
      if (!same_layer) {
        layer.reset();  // one of a name at a time
        layer.emplace(options, communicator);
      }
      if (backward) {
        layer->backward({.dy = x_view,
                         .x = x_view,
                         .dx = y.view(),
                         .dweight = dweight.view(),
                         .dbias = dbias.view(),
                         .affine = affine},
                        all[saved]);
      } else {
        const Tensor values = mean;
        layer->forward({.x = x_view,
                        .weight = weight ? values.view() : TensorView(),
                        .bias = bias ? values.view() : TensorView(),
                        .y = y.view(),
                        .running_mean = mean.view(),
                        .running_var = var.view(),
                        .num_batches_tracked = &tracked},
                       all[saved]);
      }
    } catch (...) {
      EXPECT_TRUE(y.storage() == x.storage());
      for (const Tensor* one : {&mean, &var, &dweight, &dbias}) {
        EXPECT_EQ(one->values(), ones);
      }
      EXPECT_EQ(tracked, 7);
      throw;
    }
  }
};

using Change = std::function<void(Step&)>;

/// What the two ranks throw when rank `odd`'s step is changed.
std::vector<std::exception_ptr> run_two(ThreadGroup& group, Step step, int odd,
                                        const Change& change) {
  Step changed = step;
  change(changed);
  const auto begin = std::chrono::steady_clock::now();
  auto errors = run_ranks(2, [&](int r) { (r == odd ? changed : step).run(group.rank(r)); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kPrompt);
  return errors;
}

Step backward_step(AffineGradients affine = AffineGradients::kShare) {
  return {.affine = affine, .backward = true};
}

void expect_usable(ThreadGroup& group) {
  for (const Step& step : {Step{}, backward_step()}) {
    expect_no_errors(run_two(group, step, 0, [](Step&) {}));
  }
}

struct Case {
  const char* name;
  Step step;
  Change change;
  const char* difference = "";  ///< where rank 1 is the odd one
};

std::vector<Case> diverging_cases() {
  const Step forward;
  Step welford = forward;
  welford.options.statistics = welford.before.statistics = Statistics::kWelford;
  Step leaky = forward;
  leaky.options.activation.kind = ActivationKind::kLeakyRelu;
  const Step share = backward_step(AffineGradients::kShare);
  const Step global = backward_step(AffineGradients::kGlobal);
  const Change four_channels = [](Step& s) {
    s.sizes = {2, 4, 3};
    s.options.channels = 4;
  };
  return {
      {"eps", forward, [](Step& s) { s.options.eps = 1e-6; },
       "eps: 1e-05 on rank 0, 1e-06 on rank 1"},
      {"layer", forward, [](Step& s) { s.options.name = "other"; },
       "same call: layer: layer on rank 0, other on rank 1"},
      {"call", forward, [](Step& s) { s.same_layer = true; },
       "same call: call: 0 on rank 0, 2 on rank 1"},
      {"activation", forward, [](Step& s) { s.options.activation.kind = ActivationKind::kRelu; },
       "activation: none on rank 0, relu on rank 1"},
      {"negative slope", leaky, [](Step& s) { s.options.activation.negative_slope = -0.01; },
       "negative slope: 0.01 on rank 0, -0.01 on rank 1"},
      {"weight", forward, [](Step& s) { s.weight = true; },
       "same call: weight: absent on rank 0, given on rank 1"},
      {"bias", forward, [](Step& s) { s.bias = true; },
       "same call: bias: absent on rank 0, given on rank 1"},
      {"weight of the welford mode", welford, [](Step& s) { s.weight = true; },
       "same call: weight: absent on rank 0, given on rank 1"},
      {"statistics", forward, [](Step& s) { s.options.statistics = Statistics::kWelford; },
       "statistics: reproducible on rank 0, welford on rank 1"},
      {"call of the welford mode", welford, [](Step& s) { s.same_layer = true; },
       "call: 0 on rank 0, 2 on rank 1"},
      {"dtype of the welford mode", welford, [](Step& s) { s.dtype = DType::kBFloat16; },
       "dtype: float32 on rank 0, bfloat16 on rank 1"},
      {"channels of the welford mode", welford, four_channels,
       "channels: 3 on rank 0, 4 on rank 1"},
      {"channels", forward, four_channels, "channels: 3 on rank 0, 4 on rank 1"},
      {"dtype of the same format", forward, [](Step& s) { s.dtype = DType::kBFloat16; },
       "dtype: float32 on rank 0, bfloat16 on rank 1"},
      {"dtype of another format", forward, [](Step& s) { s.dtype = DType::kFloat64; },
       "dtype: float32 on rank 0, float64 on rank 1"},
      {"smaller dtype", forward, [](Step& s) { s.dtype = DType::kFloat16; },
       "dtype: float32 on rank 0, float16 on rank 1"},
      {"direction", forward, [](Step& s) { s.backward = true; },
       "direction: forward on rank 0, backward on rank 1"},
      {"direction", share, [](Step& s) { s.backward = false; }},
      {"forward's fingerprint", share, [](Step& s) { s.saved = 0; }},
      {"forward's fingerprint", global, [](Step& s) { s.saved = 0; }},
  };
}

TEST(Divergence, EveryRankThrowsAndNothingChanges) {
  ThreadGroup group(2, kTimeout);
  for (const Case& one : diverging_cases()) {
    for (const int odd : {0, 1}) {
      SCOPED_TRACE(std::string(one.name) + ", rank " + std::to_string(odd) +
                   (one.step.backward ? ", backward" : ", forward"));
      const auto errors = run_two(group, one.step, odd, one.change);
      for (const int rank : {0, 1}) {
        const std::string text = text_of<DivergenceError>(errors[static_cast<std::size_t>(rank)]);
        if (odd == 1) {
          EXPECT_TRUE(contains(text, one.difference)) << text;
        }
      }
      expect_usable(group);
    }
  }
}

TEST(Divergence, WhatMayDiffer) {
  ThreadGroup group(2, kTimeout);
  const Step step;
  const std::vector<Change> changes = {
      [](Step& s) { s.options.momentum = 0.5; }, [](Step& s) { s.sizes = {0, 3, 4}; },
      [](Step& s) { s.sizes = {5, 3, 7, 2}; },
      [](Step& s) {  // an empty rank does not know the group's dtype
        s.dtype = DType::kBFloat16;
        s.sizes = {0, 3, 4};
      }};
  for (const Change& change : changes) {
    expect_no_errors(run_two(group, step, 1, change));
  }
}

TEST(Refusal, MoreElementsThanTheLimitOverAllRanksIsAnErrorOnEveryRank) {
  // Each rank alone is within the limit; only the header says so, as the samples have no channels.
  ThreadGroup group(2, kTimeout);
  const auto errors = run_ranks(2, [&](int r) {
    const TensorView x(nullptr, DType::kFloat32, {(std::int64_t{1} << 35) + r, 0}, {0, 0});
    const MutableTensorView y(nullptr, DType::kFloat32, x.sizes, x.strides);
    Saved saved;
    BatchNorm({.channels = 0, .name = "layer"}, group.rank(r)).forward({.x = x, .y = y}, saved);
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(text_of<InvalidArgument>(error), "2^36"));
  }
}

}  // namespace
}  // namespace syncbn::testing
