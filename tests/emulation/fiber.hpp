// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

// A stack with something that runs on it, and the switch between stacks.
namespace syncbn::emulation {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// The next resume() begins entry(argument), which ends by calling suspend(true) and never
  /// returns.
  void start(void (*entry)(void*), void* argument);
  /// Runs until the fiber suspends itself. Called from outside of all fibers.
  void resume();
  /// Back to whoever resumed. Called from the fiber itself.
  void suspend(bool for_ever);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace syncbn::emulation
