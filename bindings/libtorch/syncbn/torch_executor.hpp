// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "syncbn/error.hpp"
#include "syncbn/executor.hpp"

namespace syncbn::detail {

/// Runs on PyTorch's own threads, because a second pool beside them would cost milliseconds. It
/// does not use at::parallel_for, which is a plain loop in a program without OpenMP. If a process
/// used several threads and then forked, everything in the child runs on the calling thread. In the
/// child OpenMP would wait for ever for the threads that stayed in the parent.
class TorchExecutor final : public Executor {
 public:
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const Body& body) override {
    if (end - begin > grain && concurrency() > 1 && threads_stayed_behind()) {
      body(begin, end);
      return;
    }
    const auto run = [](std::int64_t first, std::int64_t last, void* what) {
      (*static_cast<const Body*>(what))(first, last);
    };
    if (torch_parallel_for(begin, end, grain, run, const_cast<Body*>(&body)) != 0) {
      throw Error("parallel_for of PyTorch failed");
    }
  }
  int concurrency() const override {
    std::uint32_t threads = 1;
    torch_get_num_threads(&threads);
    return static_cast<int>(threads);
  }

 private:
  static bool threads_stayed_behind() {
    static std::atomic<pid_t> first_user{0};
    const pid_t self = getpid();
    pid_t user = 0;
    return !first_user.compare_exchange_strong(user, self) && user != self;
  }
};

}  // namespace syncbn::detail
