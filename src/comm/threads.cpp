// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "comm/slot_exchange.hpp"
#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"
#include "tensors/checks.hpp"

// Threads exchange as processes of a node do, through memory of their own process.
namespace syncbn {
namespace {

struct Free {
  void operator()(std::byte* memory) const { ::operator delete(memory, kPage); }
  static constexpr std::align_val_t kPage{4096};
};

}  // namespace

struct __attribute__((visibility("hidden"))) ThreadGroup::State {
  std::unique_ptr<std::byte, Free> memory;
  std::chrono::milliseconds timeout;
  std::deque<SlotExchange> ranks;  // none moves

  State(int size, std::chrono::milliseconds limit)
      : memory(static_cast<std::byte*>(
            ::operator new(SharedBarrier::memory_bytes(size), Free::kPage))),
        timeout(limit) {
    clear(size);
    for (int r = 0; r < size; ++r) {
      ranks.emplace_back(barrier(r, size));
    }
  }
  void clear(int size) {  // slots cost nothing until used
    std::memset(memory.get(), 0, SharedBarrier::control_bytes(size));
  }
  SharedBarrier barrier(int rank, int size) const {
    return SharedBarrier(memory.get(), {}, rank, size, timeout, 0);
  }
};

ThreadGroup::ThreadGroup(int size, std::chrono::milliseconds timeout) : size_(size) {
  check_ranks(size);
  check_timeout(timeout);
  state_ = std::make_shared<State>(size, timeout);
}

void ThreadGroup::reset() {
  state_->clear(size());
  for (int r = 0; r < size(); ++r) {
    state_->ranks[static_cast<std::size_t>(r)].reset(state_->barrier(r, size()));
  }
}

void run(ThreadGroup& group, const std::function<void(Communicator& end)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  const auto fails = [&](Communicator& end, const char* reason) {
    {
      const std::lock_guard lock(mutex);
      first = first ? first : std::current_exception();
    }
    end.abandon(reason);
  };
  std::vector<std::thread> threads;
  try {
    for (int r = 0; r < group.size(); ++r) {
      threads.emplace_back([&fails, &body, &end = group.rank(r)] {
        try {
          body(end);
        } catch (const std::exception& error) {
          fails(end, error.what());
        } catch (...) {
          fails(end, "an exception of an unknown type");
        }
      });
    }
  } catch (const std::exception& error) {  // no thread for a rank
    fails(group.rank(static_cast<int>(threads.size())), error.what());
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

Communicator& ThreadGroup::rank(int rank) {
  check_rank(rank, size());
  return state_->ranks[static_cast<std::size_t>(rank)];
}

}  // namespace syncbn
