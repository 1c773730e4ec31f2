// SPDX-License-Identifier: Apache-2.0
#include "syncbn/executor.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "syncbn/error.hpp"

namespace syncbn {
namespace {

class SerialExecutor final : public Executor {
 public:
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t, const Body& body) override {
    if (begin < end) {
      body(begin, end);
    }
  }
  int concurrency() const override { return 1; }
};

/// Looks for a while, before the caller sleeps: to wake a thread takes 50 µs, as long as a pass
/// over a small tensor.
template <class Met>
void look(const Met& met) {
  constexpr int kYields = 100;
  for (int i = 0; i < kYields && !met(); ++i) {
    std::this_thread::yield();
  }
}

}  // namespace

Executor& serial_executor() {
  static SerialExecutor executor;
  return executor;
}

struct __attribute__((visibility("hidden"))) ThreadPool::State {
  const pid_t process = getpid();
  std::mutex caller;  ///< held for the whole of a parallel_for
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::vector<std::thread> threads;
  std::atomic<std::int64_t> generation = 0;
  bool stop = false;

  // The job at hand.
  const Body* body = nullptr;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t pieces = 0;
  std::atomic<int> pending = 0;
  std::exception_ptr error;

  /// A forked child has none of the threads, and the mutexes as they were.
  bool in_own_process() const { return getpid() == process; }

  void run_piece(std::int64_t piece) {
    if (piece >= pieces) {
      return;
    }
    const std::int64_t whole = (end - begin) / pieces;
    const std::int64_t longer = (end - begin) % pieces;  // so many pieces have one item more
    const std::int64_t first = begin + piece * whole + std::min(piece, longer);
    try {
      (*body)(first, first + whole + (piece < longer ? 1 : 0));
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
    }
  }

  void serve(std::int64_t piece) {
    std::int64_t seen = 0;
    while (true) {
      look([&] { return generation.load(std::memory_order_relaxed) != seen; });
      std::unique_lock lock(mutex);
      work.wait(lock, [&] { return stop || generation != seen; });
      if (stop) {
        return;
      }
      seen = generation;
      lock.unlock();
      run_piece(piece);
      lock.lock();
      if (--pending == 0) {
        done.notify_one();
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  if (threads < 1) {
    throw InvalidArgument("threads: got " + std::to_string(threads) + ", expected at least 1");
  }
  for (int i = 1; i < threads; ++i) {
    state_->threads.emplace_back([state = state_.get(), i] { state->serve(i); });
  }
}

ThreadPool::~ThreadPool() {
  if (!state_->in_own_process()) {
    [[maybe_unused]] State* const left = state_.release();  // cannot be joined or destroyed
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->work.notify_all();
  for (std::thread& thread : state_->threads) {
    thread.join();
  }
}

void ThreadPool::parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                              const Body& body) {
  if (begin >= end) {
    return;
  }
  const std::int64_t pieces =
      std::clamp<std::int64_t>((end - begin) / std::max<std::int64_t>(grain, 1), 1, concurrency());
  if (pieces == 1 || !state_->in_own_process()) {
    body(begin, end);
    return;
  }
  const std::lock_guard one_caller(state_->caller);
  {
    const std::lock_guard lock(state_->mutex);
    state_->body = &body;
    state_->begin = begin;
    state_->end = end;
    state_->pieces = pieces;
    state_->pending = static_cast<int>(state_->threads.size());
    state_->error = nullptr;
    ++state_->generation;
  }
  state_->work.notify_all();
  state_->run_piece(0);
  look([&] { return state_->pending.load(std::memory_order_relaxed) == 0; });
  std::unique_lock lock(state_->mutex);
  state_->done.wait(lock, [&] { return state_->pending == 0; });
  if (state_->error) {
    std::rethrow_exception(state_->error);
  }
}

int ThreadPool::concurrency() const { return static_cast<int>(state_->threads.size()) + 1; }

}  // namespace syncbn
