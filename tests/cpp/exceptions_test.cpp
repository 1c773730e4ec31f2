#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "layer_tensors.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/batch_norm_op.hpp"

// A communicator or an executor of the caller's that throws: running statistics are updated whole
// or not at all, the exception reaches the caller, and the next step has the bits of one without
// it.
namespace syncbn {
namespace {

using testing::run_ranks;
using testing::Tensor;
using testing::text_of;

/// A rank of two that do the same. Throws at the n-th exchange, counted from 0, before or after it.
class Failing final : public Communicator {
 public:
  Failing(int at, bool late) : at_(at), late_(late) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void all_reduce_sum(std::span<std::int64_t> words) override {
    exchange([&] {
      for (std::int64_t& word : words) {
        word *= 2;
      }
    });
  }
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override {
    exchange([&] {
      std::copy(in.begin(), in.end(), out.begin());
      std::copy(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(in.size()));
    });
  }
  void abandon(const std::string&) override {}

 private:
  void exchange(const std::function<void()>& whole) {
    const bool fails = at_-- == 0;
    if (fails && !late_) {
      throw std::runtime_error("no network");
    }
    whole();
    if (fails) {
      throw std::runtime_error("no network");
    }
  }
  int at_;
  bool late_;
};

/// Throws at the n-th loop, at its beginning or when all is done.
class FailingExecutor final : public Executor {
 public:
  FailingExecutor(int at, bool late) : at_(at), late_(late) {}
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t, const Body& body) override {
    const bool fails = at_-- == 0;
    if (fails && !late_) {
      throw 5;  // of no class
    }
    body(begin, end);
    if (fails) {
      throw 5;
    }
  }
  int concurrency() const override { return 1; }

 private:
  int at_;
  bool late_;
};

struct Layer : testing::LayerTensors {
  void forward(Communicator& group, Executor& executor) {
    statistics = batch_norm_forward(std::as_const(x).view(), {}, std::as_const(weight).view(),
                                    std::as_const(weight).view(), {}, y.view(),
                                    {mean.view(), var.view(), &tracked}, options, group, executor);
  }
  void backward(Communicator& group, Executor& executor) {
    batch_norm_backward(std::as_const(dy).view(), std::as_const(x).view(), {},
                        std::as_const(weight).view(), {}, statistics, dx.view(), dweight.view(),
                        dbias.view(), {}, AffineGradients::kShare, group, executor);
  }
  void op(Communicator& group, Executor& executor) {
    statistics = batch_norm_op({std::as_const(x).view(), mean.view(), var.view(), {}, {}, tracked},
                               {y.view(), {}, {}, mean.view(), var.view(), &tracked}, attributes,
                               group, executor);
  }
  void op_backward(Communicator& group, Executor& executor) {
    batch_norm_op_backward(std::as_const(dy).view(), std::as_const(x).view(), {}, statistics,
                           attributes, dx.view(), dweight.view(), dbias.view(), group, executor);
  }
  /// What outlives a step.
  std::vector<std::vector<double>> state() const {
    return {mean.values(), var.values(), {static_cast<double>(tracked)}};
  }
  std::vector<std::vector<double>> results() const {
    return {y.values(),      dx.values(),    dweight.values(), dbias.values(),
            statistics.mean, statistics.var, statistics.rstd};
  }
};

using Pass = void (Layer::*)(Communicator&, Executor&);

/// The layers whose steps are tried.
std::vector<std::pair<std::string, std::function<Layer()>>> layers() {
  return {{"reproducible", [] { return Layer(); }},
          {"welford",
           [] {
             Layer layer;
             layer.options.statistics = Statistics::kWelford;
             return layer;
           }},
          {"cumulative",
           [] {
             Layer layer;
             layer.options.momentum.reset();
             return layer;
           }},
          {"estimates", [] {
             Layer layer;
             layer.attributes.use_global_est = true;
             return layer;
           }}};
}

/// A step that fails as `fail(layer)` makes it, then a good one, against a good one alone.
void expect_whole_or_not(const std::function<Layer()>& make, Pass forward, Pass backward,
                         Communicator& group, const std::function<void(Layer&)>& fail) {
  Layer expected = make();
  const auto before = expected.state();
  (expected.*forward)(group, serial_executor());
  const auto after = expected.state();
  (expected.*backward)(group, serial_executor());
  ASSERT_NE(before, after);

  Layer layer = make();
  EXPECT_ANY_THROW(fail(layer));
  EXPECT_TRUE(layer.state() == before || layer.state() == after) << "updated in part";
  if (layer.state() == before) {
    (layer.*forward)(group, serial_executor());
  }
  (layer.*backward)(group, serial_executor());
  EXPECT_TRUE(layer.state() == after);
  EXPECT_TRUE(layer.results() == expected.results());
}

const std::vector<std::pair<Pass, Pass>> kPasses = {{&Layer::forward, &Layer::backward},
                                                    {&Layer::op, &Layer::op_backward}};

TEST(Exceptions, OfACommunicatorExact) {
  for (const auto& [name, make] : layers()) {
    for (const auto& [forward, backward] : kPasses) {
      for (const bool late : {false, true}) {
        for (const int exchange : {0, 1}) {
          SCOPED_TRACE(name + ", exchange " + std::to_string(exchange));
          if (exchange == 1 && forward == &Layer::op && make().attributes.use_global_est) {
            continue;  // its backward has none
          }
          Failing good(-1, false);
          expect_whole_or_not(make, forward, backward, good, [&](Layer& layer) {
            Failing group(exchange, late);
            (layer.*forward)(group, serial_executor());
            (layer.*backward)(group, serial_executor());
          });
        }
      }
    }
  }
}

TEST(Exceptions, OfAnExecutorExact) {
  const auto self = self_communicator();
  Failing twins(-1, false);
  for (Communicator* group : {self.get(), static_cast<Communicator*>(&twins)}) {
    for (const auto& [name, make] : layers()) {
      for (const auto& [forward, backward] : kPasses) {
        for (const bool late : {false, true}) {
          int loops = 0;
          for (bool thrown = true; thrown; ++loops) {
            FailingExecutor probe(loops, late);
            Layer layer = make();
            thrown = false;
            try {
              (layer.*forward)(*group, probe);
              (layer.*backward)(*group, probe);
            } catch (int) {
              thrown = true;
            }
            if (thrown) {
              SCOPED_TRACE(name + ", loop " + std::to_string(loops));
              expect_whole_or_not(make, forward, backward, *group, [&](Layer& again) {
                FailingExecutor executor(loops, late);
                (again.*forward)(*group, executor);
                (again.*backward)(*group, executor);
              });
            }
          }
          EXPECT_GT(loops, 4);
        }
      }
    }
  }
}

/// What is no std::exception is told to the others as well, before an exchange.
TEST(Exceptions, OfAnExecutorReachTheOtherRanks) {
  for (const Pass forward : {&Layer::forward, &Layer::op}) {
    ThreadGroup group(2, std::chrono::seconds(20));
    Layer layers_of_ranks[2];
    const auto before = layers_of_ranks[0].state();
    const auto errors = run_ranks(2, [&](int r) {
      FailingExecutor executor(r == 0 ? 0 : 100, false);
      (layers_of_ranks[r].*forward)(group.rank(r), executor);
    });
    EXPECT_THROW(std::rethrow_exception(errors[0]), int);
    EXPECT_TRUE(testing::contains(text_of<PeerLost>(errors[1]), "unknown type"));
    EXPECT_TRUE(layers_of_ranks[0].state() == before);
    EXPECT_TRUE(layers_of_ranks[1].state() == before);
  }
}

}  // namespace
}  // namespace syncbn
