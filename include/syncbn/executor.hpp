// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "syncbn/error.hpp"
#include "syncbn/export.h"

namespace syncbn {

/// The source of the threads that the library computes on. The library starts no threads that
/// the caller did not ask for. Inside a framework, wrap the framework's own pool. Results never
/// depend on the executor.
class SYNCBN_API Executor {
 public:
  /// A reference to a function object of type (begin, end) -> void. Several threads may call it at
  /// the same time. A Body does not copy the object, so it is valid only during the call that takes
  /// it. It allocates nothing.
  class Body {
   public:
    template <class Function>
      requires(!std::is_same_v<Function, Body> && std::is_object_v<Function> &&
               std::is_invocable_v<const Function&, std::int64_t, std::int64_t>)
    Body(const Function& function) : function_(&function), call_(call<Function>) {}
    void operator()(std::int64_t begin, std::int64_t end) const { call_(function_, begin, end); }

   private:
    template <class Function>
    static void call(const void* function, std::int64_t begin, std::int64_t end) {
      (*static_cast<const Function*>(function))(begin, end);
    }
    const void* function_;
    void (*call_)(const void* function, std::int64_t begin, std::int64_t end);
  };

  virtual ~Executor() = default;

  /// Calls `body` for disjoint ranges that together cover [begin, end). The calls may run at the
  /// same time. Returns when all of them have ended. Each range has at least `grain` items where
  /// possible. If `body` throws, the caller gets the exception.
  virtual void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                            const Body& body) = 0;

  /// Returns the largest number of threads that parallel_for uses, including the calling thread: 1
  /// or more. Calls on another number throw InvalidArgument.
  [[nodiscard]] virtual int concurrency() const = 0;
};

/// Returns an executor that runs everything on the calling thread.
[[nodiscard]] SYNCBN_API Executor& serial_executor();

/// Says where a call runs: on an executor for CPU tensors, on a stream (cudaStream_t) for CUDA
/// tensors. The defaults are the calling thread alone and the default stream.
struct Execution {
  Execution() : executor(&serial_executor()) {}
  Execution(Executor& cpu_executor) : executor(&cpu_executor) {}
  static Execution on_stream(void* cuda_stream) {
    Execution execution;
    execution.stream = cuda_stream;
    return execution;
  }
  Executor* executor;
  void* stream = nullptr;
};

/// A small pool of threads. It runs one parallel_for at a time; a second caller waits. In a forked
/// child process, everything runs on the calling thread.
class SYNCBN_API ThreadPool final : public Executor {
 public:
  /// Makes a pool of `threads` threads, including the calling thread. Throws InvalidArgument unless
  /// `threads` is at least 1.
  explicit ThreadPool(int threads);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const Body& body) override;
  int concurrency() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace syncbn
