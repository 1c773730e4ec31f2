#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// What two ranks get when one cannot take part, or when they do not make the same call.
namespace syncbn {
namespace {

using testing::contains;
using testing::run_ranks;
using testing::Tensor;
using testing::text_of;

/// How long a rank would wait for one that does not come; prompt is far below.
constexpr auto kTimeout = std::chrono::seconds(10);
constexpr auto kPrompt = std::chrono::seconds(8);

class FailingExecutor final : public Executor {
 public:
  void parallel_for(std::int64_t, std::int64_t, std::int64_t, const Body&) override {
    throw std::runtime_error("no threads left");
  }
  int concurrency() const override { return 1; }
};

/// One rank's call.
struct Step {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> sizes = {2, 3, 4};
  BatchNormOptions options{.layer = 1};
  BatchStatistics statistics{{1, 2, 3}, {1, 1, 1}, {1, 1, 1}, 16, 5};
  AffineGradients which = AffineGradients::kShare;
  bool backward = false;
  std::function<void(TensorView&)> spoil = [](TensorView&) {};  ///< of x
  Executor* executor = &serial_executor();

  void run(Communicator& communicator) const {
    const std::vector<double> ones(static_cast<std::size_t>(sizes[1]), 1.0);
    Tensor x(dtype, sizes);
    x.fill(std::vector<double>(static_cast<std::size_t>(x.numel()), 1.0));
    Tensor y = x;
    Tensor mean(DType::kFloat32, {sizes[1]}, ones);
    Tensor var = mean;
    Tensor dweight = mean;
    Tensor dbias = mean;
    std::int64_t tracked = 7;
    TensorView x_view = std::as_const(x).view();
    MutableTensorView y_view = y.view();
    spoil(x_view);
    MutableTensorView channels[] = {mean.view(), var.view(), dweight.view(), dbias.view()};
    y_view.device = x_view.device;
    for (MutableTensorView& view : channels) {
      view.device = x_view.device;
    }
    try {
      if (backward) {
        batch_norm_backward(x_view, x_view, {}, {}, {}, statistics, y_view, channels[2],
                            channels[3], {}, which, communicator, *executor);
      } else {
        batch_norm_forward(x_view, {}, {}, {}, {}, y_view, {channels[0], channels[1], &tracked},
                           options, communicator, *executor);
      }
    } catch (...) {  // "Nothing is changed then."
      EXPECT_TRUE(y.storage() == x.storage());
      EXPECT_EQ(mean.values(), ones);
      EXPECT_EQ(var.values(), ones);
      EXPECT_EQ(dweight.values(), ones);
      EXPECT_EQ(dbias.values(), ones);
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

Step forward_step() { return {}; }
Step backward_step(AffineGradients which = AffineGradients::kShare) {
  Step step;
  step.backward = true;
  step.which = which;
  return step;
}

void expect_usable(ThreadGroup& group) {
  for (const auto& error : run_two(group, forward_step(), 0, [](Step&) {})) {
    EXPECT_EQ(error, nullptr);
  }
  for (const auto& error : run_two(group, backward_step(), 0, [](Step&) {})) {
    EXPECT_EQ(error, nullptr);
  }
}

struct Case {
  const char* name;
  Step step;
  Change change;
  const char* difference = "";  ///< where rank 1 is the odd one
};

std::vector<Case> diverging_cases() {
  const Step forward = forward_step();
  Step welford = forward;
  welford.options.statistics = Statistics::kWelford;
  Step leaky = forward;
  leaky.options.activation.kind = ActivationKind::kLeakyRelu;
  const Step share = backward_step(AffineGradients::kShare);
  const Step global = backward_step(AffineGradients::kGlobal);
  return {
      {"eps", forward, [](Step& s) { s.options.eps = 1e-6; },
       "eps: 1e-05 on rank 0, 1e-06 on rank 1"},
      {"layer", forward, [](Step& s) { s.options.layer = 2; },
       "same call: layer: 1 on rank 0, 2 on rank 1"},
      {"call", forward, [](Step& s) { s.options.call = 1; },
       "same call: call: 0 on rank 0, 1 on rank 1"},
      {"activation", forward, [](Step& s) { s.options.activation.kind = ActivationKind::kRelu; },
       "activation: none on rank 0, relu on rank 1"},
      {"negative slope", leaky, [](Step& s) { s.options.activation.negative_slope = -0.01; },
       "negative slope: 0.01 on rank 0, -0.01 on rank 1"},
      {"statistics", forward, [](Step& s) { s.options.statistics = Statistics::kWelford; }},
      {"call of the welford mode", welford, [](Step& s) { s.options.call = 1; },
       "call: 0 on rank 0, 1 on rank 1"},
      {"dtype of the welford mode", welford, [](Step& s) { s.dtype = DType::kBFloat16; }},
      {"channels of the welford mode", welford, [](Step& s) { s.sizes = {2, 4, 3}; }},
      {"channels", forward, [](Step& s) { s.sizes = {2, 4, 3}; }},
      {"dtype of the same format", forward, [](Step& s) { s.dtype = DType::kBFloat16; },
       "dtype: float32 on rank 0, bfloat16 on rank 1"},
      {"dtype of another format", forward, [](Step& s) { s.dtype = DType::kFloat64; }},
      {"smaller dtype", forward, [](Step& s) { s.dtype = DType::kFloat16; }},
      {"direction", forward, [](Step& s) { s.backward = true; }},
      {"direction", share, [](Step& s) { s.backward = false; }},
      {"forward's fingerprint", share, [](Step& s) { s.statistics.fingerprint = 6; }},
      {"forward's fingerprint", global, [](Step& s) { s.statistics.fingerprint = 6; }},
      {"dtype", share, [](Step& s) { s.dtype = DType::kBFloat16; }},
      {"dtype", global, [](Step& s) { s.dtype = DType::kBFloat16; }},
      {"fewer samples than in forward", share, [](Step& s) { s.sizes[0] = 1; }},
      {"fewer samples than in forward", global, [](Step& s) { s.sizes[0] = 1; }},
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
  Step step = forward_step();
  const std::vector<Change> changes = {
      [](Step& s) { s.options.momentum = 0.5; }, [](Step& s) { s.sizes = {0, 3, 4}; },
      [](Step& s) { s.sizes = {5, 3, 7, 2}; },
      [](Step& s) {  // an empty rank does not know the group's dtype
        s.dtype = DType::kBFloat16;
        s.sizes = {0, 3, 4};
      }};
  for (const Change& change : changes) {
    for (const auto& error : run_two(group, step, 1, change)) {
      EXPECT_EQ(error, nullptr);
    }
  }
}

TEST(Divergence, LayersOfOneShapeInAnotherOrder) {
  ThreadGroup group(2, kTimeout);
  for (const auto& error : run_ranks(2, [&](int r) {
         Step step = forward_step();
         for (const std::uint64_t layer : {1u, 2u}) {
           step.options.layer = r == 0 ? layer : 3 - layer;
           step.run(group.rank(r));
         }
       })) {
    EXPECT_TRUE(contains(text_of<DivergenceError>(error), "layer: 1 on rank 0, 2 on rank 1"));
  }
}

/// Rank `odd` throws an Expected, the other PeerLost with the rank and, if given, the reason.
template <class Expected>
void expect_peer_lost(const Step& step, const Change& change, const std::string& reason) {
  for (const int odd : {0, 1}) {
    ThreadGroup group(2, kTimeout);
    const auto errors = run_two(group, step, odd, change);
    const std::string own = text_of<Expected>(errors[static_cast<std::size_t>(odd)]);
    const std::string other = text_of<PeerLost>(errors[static_cast<std::size_t>(1 - odd)]);
    EXPECT_TRUE(contains(own, reason));
    EXPECT_TRUE(contains(other, "rank " + std::to_string(odd)));
    EXPECT_TRUE(contains(other, reason));
  }
}

TEST(Refusal, TheOtherRankLearnsOfItAtOnce) {
  for (const Step& step : {forward_step(), backward_step()}) {
    expect_peer_lost<InvalidArgument>(
        step, [](Step& s) { s.spoil = [](TensorView& x) { x.sizes[2] = -4; }; }, "(2, 3, -4)");
    expect_peer_lost<InvalidArgument>(
        step, [](Step& s) { s.spoil = [](TensorView& x) { x.dtype = static_cast<DType>(9); }; },
        "dtype number 9");
  }
  expect_peer_lost<InvalidArgument>(forward_step(), [](Step& s) { s.options.eps = -1; }, "eps");
  expect_peer_lost<InvalidArgument>(
      forward_step(), [](Step& s) { s.options.momentum = 2; }, "momentum");
  expect_peer_lost<InvalidArgument>(
      backward_step(), [](Step& s) { s.statistics.mean.clear(); }, "statistics");
}

TEST(Refusal, ALayerWithoutANumberAmongSeveralRanks) {
  const Change unnumbered = [](Step& s) { s.options.layer = 0; };
  Step welford = forward_step();
  welford.options.statistics = Statistics::kWelford;
  for (const Step& step : {forward_step(), welford}) {
    expect_peer_lost<InvalidArgument>(
        step, unnumbered,
        "options.layer: got 0, expected this layer's own number, from 1 on, the same on all ranks "
        "(there are 2 ranks)");
  }
  // On all of them, as where nobody thought of it.
  ThreadGroup group(2, kTimeout);
  Step step = forward_step();
  unnumbered(step);
  for (const auto& error : run_two(group, step, 0, unnumbered)) {
    EXPECT_TRUE(contains(text_of<InvalidArgument>(error), "options.layer: got 0"));
  }
  const auto alone = self_communicator();
  EXPECT_NO_THROW(step.run(*alone));
}

TEST(Refusal, AGpuTensorToo) {
  for (const Step& step : {forward_step(), backward_step()}) {
    expect_peer_lost<Unavailable>(
        step, [](Step& s) { s.spoil = [](TensorView& x) { x.device = Device::kCuda; }; }, "CUDA");
  }
}

TEST(Refusal, AFailureBeforeTheExchangeToo) {
  FailingExecutor failing;
  for (const Step& step : {forward_step(), backward_step()}) {
    expect_peer_lost<std::runtime_error>(
        step, [&](Step& s) { s.executor = &failing; }, "no threads left");
  }
}

TEST(Refusal, LaterCallsOfTheGroupFailAtOnce) {
  ThreadGroup group(2, kTimeout);
  run_two(group, forward_step(), 1, [](Step& s) { s.options.eps = -1; });
  const auto errors = run_two(group, forward_step(), 1, [](Step&) {});
  text_of<PeerLost>(errors[0]);
  text_of<PeerLost>(errors[1]);
}

TEST(Refusal, MoreElementsThanTheLimitOverAllRanksIsAnErrorOnEveryRank) {
  // Each rank alone is within the limit; only the header says so, as the samples have no channels.
  ThreadGroup group(2, kTimeout);
  const auto errors = run_ranks(2, [&](int r) {
    const TensorView x(nullptr, DType::kFloat32, {(std::int64_t{1} << 35) + r, 0}, {0, 0});
    const MutableTensorView y(nullptr, DType::kFloat32, x.sizes, x.strides);
    batch_norm_forward(x, {}, {}, {}, {}, y, {}, {.layer = 1}, group.rank(r), serial_executor());
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(text_of<InvalidArgument>(error), "2^36"));
  }
}

}  // namespace
}  // namespace syncbn
