// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <deque>
#include <memory>
#include <new>

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
  std::deque<Rank> ranks;  // none moves
};

ThreadGroup::ThreadGroup(int size, std::chrono::milliseconds timeout) {
  check_ranks(size);
  check_timeout(timeout);
  const std::size_t bytes = SharedBarrier::memory_bytes(size);
  std::byte* const memory = static_cast<std::byte*>(::operator new(bytes, Free::kPage));
  state_.reset(new State{std::unique_ptr<std::byte, Free>(memory), {}});
  std::memset(memory, 0, SharedBarrier::control_bytes(size));  // slots cost nothing until used
  for (int r = 0; r < size; ++r) {
    state_->ranks.emplace_back(SharedBarrier(memory, {}, r, size, timeout, 0));
  }
}

ThreadGroup::~ThreadGroup() = default;

int ThreadGroup::size() const { return static_cast<int>(state_->ranks.size()); }

Communicator& ThreadGroup::rank(int rank) {
  if (rank < 0 || rank >= size()) {
    throw InvalidArgument("rank: got " + std::to_string(rank) + ", expected 0 to " +
                          std::to_string(size() - 1));
  }
  return state_->ranks[static_cast<std::size_t>(rank)];
}

}  // namespace syncbn
