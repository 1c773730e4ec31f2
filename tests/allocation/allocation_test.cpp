#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "layer_tensors.hpp"
#include "replaced_new.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/batch_norm_op.hpp"

// Every allocation of a step fails once: running statistics are updated whole or not at all, the
// other ranks are told or have finished, and the next step has the bits of one without the failure.

namespace syncbn {
namespace {

using testing::run_ranks;
using testing::Tensor;

/// Runs body with its `at`-th allocation failing, on a new thread: one that has made a call keeps
/// memory for the next. Whether there was such an allocation.
bool fails_at(std::int64_t at, const std::function<void()>& body) {
  bool failed = false;
  bool reached = false;
  const auto errors = run_ranks(1, [&](int) {
    testing::until_failure = at;
    try {
      body();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    reached = at >= 0 && testing::until_failure < 0;
    testing::until_failure = -1;
  });
  if (errors[0] != nullptr) {
    std::rethrow_exception(errors[0]);
  }
  EXPECT_EQ(reached, failed) << "a failure was swallowed";
  return failed;
}

struct Layer : testing::LayerTensors {
  bool as_op = false;

  std::vector<std::vector<double>> state() const {
    return {mean.values(), var.values(), {static_cast<double>(tracked)}};
  }
  std::vector<std::vector<double>> results() const {
    return {y.values(),      dx.values(),    dweight.values(), dbias.values(),
            statistics.mean, statistics.var, statistics.rstd};
  }
};

/// A layer's tensors as the functions take them: a call allocates nothing of its own then.
struct Step {
  explicit Step(Layer& of)
      : layer(of), inputs{x, of.mean.view(), of.var.view(), {}, {}, of.tracked} {}
  Layer& layer;
  TensorView x = std::as_const(layer.x).view(), dy = std::as_const(layer.dy).view();
  TensorView weight = std::as_const(layer.weight).view(), absent;
  MutableTensorView y = layer.y.view(), dx = layer.dx.view(), none;
  MutableTensorView dweight = layer.dweight.view(), dbias = layer.dbias.view();
  RunningStatistics running{layer.mean.view(), layer.var.view(), &layer.tracked};
  BatchNormOpInputs inputs;
  BatchNormOpOutputs outputs{y, {}, {}, running.mean, running.var, &layer.tracked};
  Execution execution = serial_executor();

  void forward(Communicator& group) {
    layer.statistics = layer.as_op
                           ? batch_norm_op(inputs, outputs, layer.attributes, group, execution)
                           : batch_norm_forward(x, {}, weight, weight, absent, y, running,
                                                layer.options, group, execution);
  }
  void backward(Communicator& group) {
    if (layer.as_op) {
      batch_norm_op_backward(dy, x, absent, layer.statistics, layer.attributes, dx, dweight, dbias,
                             group, execution);
    } else {
      batch_norm_backward(dy, x, {}, weight, weight, layer.statistics, dx, dweight, dbias, none,
                          AffineGradients::kShare, group, execution);
    }
  }
};

std::vector<std::pair<std::string, Layer>> layers() {
  Layer plain, welford, cumulative, relu, op, estimates;
  welford.options.statistics = Statistics::kWelford;
  cumulative.options.momentum.reset();
  relu.options.activation = {ActivationKind::kRelu};
  op.as_op = estimates.as_op = true;
  estimates.attributes.use_global_est = true;
  return {{"plain", plain}, {"welford", welford}, {"cumulative", cumulative},
          {"relu", relu},   {"op", op},           {"estimates", estimates}};
}

TEST(Allocation, FailsAndRunningStatisticsAreWholeExact) {
  const auto self = self_communicator();
  for (const auto& [name, layer] : layers()) {
    Layer expected = layer;
    const auto before = expected.state();
    Step(expected).forward(*self);
    const auto after = expected.state();
    Step(expected).backward(*self);
    for (const bool forward : {true, false}) {
      std::int64_t at = 0;
      for (bool failed = true; failed; ++at) {
        SCOPED_TRACE(name + (forward ? ", forward" : ", backward") + ", allocation " +
                     std::to_string(at));
        Layer one = layer;
        Step step(one);
        if (!forward) {
          step.forward(*self);
        }
        failed = fails_at(at, [&] { forward ? step.forward(*self) : step.backward(*self); });
        ASSERT_TRUE(one.state() == before || one.state() == after) << "updated in part";
        ASSERT_EQ(one.state() == before, failed && forward);
        if (failed && forward) {
          step.forward(*self);
        }
        step.backward(*self);
        ASSERT_TRUE(one.state() == after);
        ASSERT_TRUE(one.results() == expected.results());
      }
      EXPECT_GT(at, 2);
    }
  }
}

/// The other rank fails within moments, or has finished: it does not wait until its time is up.
TEST(Allocation, FailsAndTheOtherRankIsTold) {
  for (const auto& [name, layer] : layers()) {
    for (const bool forward : {true, false}) {
      std::int64_t at = 0;
      for (bool failed = true; failed; ++at) {
        SCOPED_TRACE(name + (forward ? ", forward" : ", backward") + ", allocation " +
                     std::to_string(at));
        ThreadGroup group(2, std::chrono::seconds(20));
        Layer of_rank[2] = {layer, layer};
        const auto before = layer.state();
        bool failures[2] = {false, false};
        const auto errors = run_ranks(2, [&](int r) {
          Step mine(of_rank[r]);
          if (!forward) {
            mine.forward(group.rank(r));
          }
          failures[r] = fails_at(r == 0 ? at : -1, [&] {
            forward ? mine.forward(group.rank(r)) : mine.backward(group.rank(r));
          });
        });
        failed = failures[0];
        ASSERT_TRUE(errors[0] == nullptr);
        if (errors[1] != nullptr) {
          EXPECT_THROW(std::rethrow_exception(errors[1]), PeerLost);
          ASSERT_TRUE(failed);
          ASSERT_EQ(of_rank[1].state() == before, forward);
        }
        ASSERT_EQ(of_rank[0].state() == before, failed && forward);
      }
      EXPECT_GT(at, 2);
    }
  }
}

}  // namespace
}  // namespace syncbn
