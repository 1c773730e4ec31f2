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

#include "checks.hpp"
#include "comm/slot_exchange.hpp"
#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"

// Threads exchange as processes of a node do, through memory of their own process.
namespace syncbn {
namespace {

class Rank final : public Communicator {
 public:
  explicit Rank(SharedBarrier barrier) : exchange_(std::move(barrier)) {}
  int rank() const override { return static_cast<int>(exchange_.barrier().rank()); }
  int size() const override { return static_cast<int>(exchange_.barrier().size()); }
  void all_reduce_sum(std::span<std::int64_t> words) override { exchange_.all_reduce_sum(words); }
  SumInParts* parts() override { return &exchange_; }
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override {
    exchange_.all_gather(in, out);
  }
  void abandon(const std::string& reason) override { exchange_.abandon(reason); }
  void refuse(const std::string& reason) override { exchange_.refuse(reason); }
  void reset(SharedBarrier barrier) {
    exchange_ = SlotExchange(std::move(barrier));
    begin_again();
  }

 private:
  SlotExchange exchange_;
};

struct Free {
  void operator()(std::byte* memory) const { ::operator delete(memory, kPage); }
  static constexpr std::align_val_t kPage{4096};
};

}  // namespace

struct __attribute__((visibility("hidden"))) ThreadGroup::State {
  std::unique_ptr<std::byte, Free> memory;
  std::chrono::milliseconds timeout;
  std::deque<Rank> ranks;  // none moves

  void clear(int size) {  // slots cost nothing until used
    std::memset(memory.get(), 0, SharedBarrier::control_bytes(size));
  }
  SharedBarrier barrier(int rank, int size) const {
    return SharedBarrier(memory.get(), {}, rank, size, timeout, 0);
  }
};

ThreadGroup::ThreadGroup(int size, std::chrono::milliseconds timeout) {
  check_ranks(size);
  check_timeout(timeout);
  const std::size_t bytes = SharedBarrier::memory_bytes(size);
  std::unique_ptr<std::byte, Free> memory(
      static_cast<std::byte*>(::operator new(bytes, Free::kPage)));
  state_.reset(new State{std::move(memory), timeout, {}});
  state_->clear(size);
  for (int r = 0; r < size; ++r) {
    state_->ranks.emplace_back(state_->barrier(r, size));
  }
}

ThreadGroup::~ThreadGroup() = default;

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

int ThreadGroup::size() const noexcept { return static_cast<int>(state_->ranks.size()); }

Communicator& ThreadGroup::rank(int rank) {
  if (rank < 0 || rank >= size()) {
    throw InvalidArgument("rank: got " + std::to_string(rank) + ", expected 0 to " +
                          std::to_string(size() - 1));
  }
  return state_->ranks[static_cast<std::size_t>(rank)];
}

}  // namespace syncbn
