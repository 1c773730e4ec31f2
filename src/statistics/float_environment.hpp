// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "syncbn/error.hpp"
#include "syncbn/executor.hpp"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace syncbn::cpu {

/// Round to nearest, subnormals kept, while in scope, whatever mode the process is in
/// (docs/numerics.md: no flush-to-zero).
class FloatEnvironment {
 public:
#if defined(__SSE__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned int saved_;
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  std::uint64_t saved_;
#else
#error "FloatEnvironment: say how this processor's rounding mode is saved and set"
#endif

 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

/// The executor of a pass: while it lives, this thread computes in that environment, and so does
/// each thread that runs a part. Each pass begins with one, so that nothing is left out.
class ContractExecutor final : public Executor {
 public:
  /// Throws InvalidArgument unless the executor, which may be the caller's, has a thread.
  explicit ContractExecutor(Executor& executor)
      : executor_(executor), concurrency_(executor.concurrency()) {
    if (concurrency_ < 1) {
      throw InvalidArgument("executor.concurrency: got " + std::to_string(concurrency_) +
                            ", expected at least 1");
    }
  }
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const Body& body) override {
    executor_.parallel_for(begin, end, grain, [&](std::int64_t first, std::int64_t last) {
      const FloatEnvironment environment;
      body(first, last);
    });
  }
  int concurrency() const override { return concurrency_; }

 private:
  Executor& executor_;
  int concurrency_;
  FloatEnvironment environment_;
};

}  // namespace syncbn::cpu
