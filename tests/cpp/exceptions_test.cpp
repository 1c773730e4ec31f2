// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>

#include "step_tensors.hpp"
#include "support.hpp"
#include "syncbn/communicator.hpp"

// A communicator or an executor of the caller's that throws: running statistics are updated whole
// or not at all, the exception reaches the caller, and the next step has the bits of one without
// it.
namespace syncbn::testing {
namespace {

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

using Kind = void (*)(StepTensors&);

/// A step that fails as `fail(layer)` makes it, then a good one, against a good one alone.
void expect_whole_or_not(Kind kind, Communicator& group,
                         const std::function<void(StepTensors&)>& fail) {
  StepTensors expected(kind);
  const auto before = expected.state();
  expected.forward(group);
  const auto after = expected.state();
  expected.backward(group);
  ASSERT_NE(before, after);

  StepTensors step(kind);
  EXPECT_ANY_THROW(fail(step));
  EXPECT_TRUE(step.state() == before || step.state() == after) << "updated in part";
  if (step.state() == before) {
    step.forward(group);
  }
  step.backward(group);
  EXPECT_TRUE(step.state() == after);
  EXPECT_TRUE(step.results() == expected.results());
}

TEST(Exceptions, OfACommunicatorExact) {
  for (const auto& [name, kind] : kStepKinds) {
    for (const bool late : {false, true}) {
      for (const int exchange : {0, 1}) {
        SCOPED_TRACE(std::string(name) + ", exchange " + std::to_string(exchange));
        if (exchange == 1 && StepTensors(kind).attributes.use_global_est) {
          continue;  // its backward has none
        }
        Failing good(-1, false);
        expect_whole_or_not(kind, good, [&](StepTensors& step) {
          Failing group(exchange, late);
          step.forward(group);
          step.backward(group);
        });
      }
    }
  }
}

TEST(Exceptions, OfAnExecutorExact) {
  Communicator& self = self_communicator();
  Failing twins(-1, false);
  for (Communicator* group : {&self, static_cast<Communicator*>(&twins)}) {
    for (const auto& [name, kind] : kStepKinds) {
      for (const bool late : {false, true}) {
        int loops = 0;
        for (bool thrown = true; thrown; ++loops) {
          const auto fail = [&](StepTensors& step) {
            FailingExecutor executor(loops, late);
            step.forward(*group, executor);
            step.backward(*group, executor);
          };
          StepTensors probe(kind);
          thrown = false;
          try {
            fail(probe);
          } catch (int) {
            thrown = true;
          }
          if (thrown) {
            SCOPED_TRACE(std::string(name) + ", loop " + std::to_string(loops));
            expect_whole_or_not(kind, *group, fail);
          }
        }
        EXPECT_GT(loops, 4);
      }
    }
  }
}

/// What is no std::exception is told to the others as well, before an exchange.
TEST(Exceptions, OfAnExecutorReachTheOtherRanks) {
  for (const auto& [name, kind] : kStepKinds) {
    for (const bool backward : {false, true}) {
      if (backward && StepTensors(kind).attributes.use_global_est) {
        continue;  // nobody waits for its backward
      }
      SCOPED_TRACE(name);
      ThreadGroup group(2, std::chrono::seconds(20));
      StepTensors steps[2] = {StepTensors(kind), StepTensors(kind)};
      if (backward) {
        run_ranks(2, [&](int r) { steps[r].forward(group.rank(r)); });
      }
      const auto before = steps[0].state();
      const auto errors = run_ranks(2, [&](int r) {
        FailingExecutor executor(r == 0 ? 0 : 100, false);
        backward ? steps[r].backward(group.rank(r), executor)
                 : steps[r].forward(group.rank(r), executor);
      });
      EXPECT_THROW(std::rethrow_exception(errors[0]), int);
      EXPECT_TRUE(contains(text_of<PeerLost>(errors[1]), "unknown type"));
      EXPECT_TRUE(steps[0].state() == before);
      EXPECT_TRUE(steps[1].state() == before);
    }
  }
}

}  // namespace
}  // namespace syncbn::testing
