// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "syncbn/error.hpp"
#include "syncbn/export.hpp"

namespace syncbn {

/// Where the passes take their threads from. The library starts no thread behind a caller's back:
/// inside a framework, wrap the framework's own pool. Results never depend on the executor.
class SYNCBN_API Executor {
 public:
  /// Refers to a function object of type (begin, end) -> void, which several threads may call at
  /// the same time. It copies and allocates nothing, so it is good for the time of a call.
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

  /// Calls body on disjoint ranges that cover [begin, end), possibly at the same time, and returns
  /// when all are done. Ranges have at least `grain` items where possible. An exception of body
  /// reaches the caller.
  virtual void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                            const Body& body) = 0;

  /// How many threads parallel_for uses at most, the caller's included.
  [[nodiscard]] virtual int concurrency() const = 0;
};

/// Runs everything on the calling thread.
[[nodiscard]] SYNCBN_API Executor& serial_executor();

/// What runs a call: an executor for CPU tensors, a stream (cudaStream_t) for CUDA tensors. By
/// default the calling thread alone, and the default stream.
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

/// A small pool. One parallel_for at a time; a second caller waits. In a child that its process
/// forks, everything runs on the calling thread.
class SYNCBN_API ThreadPool final : public Executor {
 public:
  /// threads: 1 or more, the calling thread included; otherwise InvalidArgument.
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
