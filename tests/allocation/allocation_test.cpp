// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "replaced_new.hpp"
#include "step_tensors.hpp"
#include "support.hpp"

// Every allocation of a step fails once: running statistics are updated whole or not at all, the
// other ranks are told or have finished, and the next step has the bits of one without the failure.

namespace syncbn::testing {
namespace {

/// Runs body with its `at`-th allocation failing, on a new thread: one that has made a call keeps
/// memory for the next. Whether there was such an allocation.
bool fails_at(std::int64_t at, const std::function<void()>& body) {
  bool failed = false;
  bool reached = false;
  const auto errors = run_ranks(1, [&](int) {
    until_failure = at;
    try {
      body();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    reached = at >= 0 && until_failure < 0;
    until_failure = -1;
  });
  if (errors[0] != nullptr) {
    std::rethrow_exception(errors[0]);
  }
  EXPECT_EQ(reached, failed) << "a failure was swallowed";
  return failed;
}

TEST(Allocation, FailsAndRunningStatisticsAreWholeExact) {
  Communicator& self = self_communicator();
  for (const auto& [name, kind] : kStepKinds) {
    StepTensors expected(kind);
    const auto before = expected.state();
    expected.forward(self);
    const auto after = expected.state();
    expected.backward(self);
    for (const bool forward : {true, false}) {
      std::int64_t at = 0;
      for (bool failed = true; failed; ++at) {
        SCOPED_TRACE(std::string(name) + (forward ? ", forward" : ", backward") + ", allocation " +
                     std::to_string(at));
        StepTensors step(kind);
        if (!forward) {
          step.forward(self);
        }
        failed = fails_at(at, [&] { forward ? step.forward(self) : step.backward(self); });
        ASSERT_TRUE(step.state() == before || step.state() == after) << "updated in part";
        ASSERT_EQ(step.state() == before, failed && forward);
        if (failed && forward) {
          step.forward(self);
        }
        step.backward(self);
        ASSERT_TRUE(step.state() == after);
        ASSERT_TRUE(step.results() == expected.results());
      }
      EXPECT_GT(at, 2);
    }
  }
}

/// The other rank fails within moments, or has finished: it does not wait until its time is up.
TEST(Allocation, FailsAndTheOtherRankIsTold) {
  for (const auto& [name, kind] : kStepKinds) {
    for (const bool forward : {true, false}) {
      std::int64_t at = 0;
      for (bool failed = true; failed; ++at) {
        SCOPED_TRACE(std::string(name) + (forward ? ", forward" : ", backward") + ", allocation " +
                     std::to_string(at));
        ThreadGroup group(2, std::chrono::seconds(20));
        StepTensors steps[2] = {StepTensors(kind), StepTensors(kind)};
        const auto before = steps[0].state();
        bool failures[2] = {false, false};
        const auto errors = run_ranks(2, [&](int r) {
          StepTensors& mine = steps[r];
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
          ASSERT_EQ(steps[1].state() == before, forward);
        }
        ASSERT_EQ(steps[0].state() == before, failed && forward);
      }
      EXPECT_GT(at, 2);
    }
  }
}

}  // namespace
}  // namespace syncbn::testing
