#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "checks.hpp"
#include "comm/rank_texts.hpp"
#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

/// Rounds of looking before a waiting thread yields, and of yielding before it sleeps: exchanges of
/// ranks that run side by side end within them, and a longer pure spin starves ranks that share a
/// core.
constexpr int kSpins = 200;
constexpr int kYields = 20;

}  // namespace

struct __attribute__((visibility("hidden"))) ThreadGroup::State {
  State(int ranks, std::chrono::milliseconds limit);

  /// What a rank brings to the exchange at hand.
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> arrived{0};  ///< number of the barrier that this rank has reached
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    bool gather = false;
  };

  class Rank final : public Communicator {
   public:
    Rank(State& state, int rank) : state_(state), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(state_.slots.size()); }
    void all_reduce_sum(std::span<std::int64_t> words) override;
    void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override;
    void abandon(const std::string& reason) override { state_.abandon(rank_, reason); }

   private:
    void enter(const void* data, std::size_t bytes, bool gather);
    void meet();
    void barrier();

    State& state_;
    int rank_;
    std::uint64_t barriers_ = 0;
  };

  bool all_arrived(std::uint64_t barrier) const;
  std::string place(int rank) const { return rank_of(rank, slots.size()); }
  void abandon(int rank, const std::string& reason);
  /// For a rank that comes to a broken group.
  [[noreturn]] void throw_lost(int rank);
  /// For a rank that waits while the group breaks.
  [[noreturn]] void throw_broken(int rank);
  /// Why the wait at this barrier ended; `mutex` is held.
  std::string missing(std::uint64_t barrier) const;
  /// Tells waiting threads to look again, after what they wait for has been stored.
  void wake();

  const std::chrono::milliseconds timeout;
  std::vector<Slot> slots;
  std::vector<Rank> ranks;
  std::vector<std::int64_t> sums;

  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int> sleepers{0};
  /// The last entry barrier that all ranks have reached: from there on every rank finishes the
  /// exchange, so that nobody leaves while others read its words. Changes under `mutex`.
  std::atomic<std::uint64_t> met{0};
  std::atomic<bool> broken{false};
  bool broken_by_timeout = false;
  int broken_rank = -1;
  std::string broken_reason;
};

ThreadGroup::State::State(int count, std::chrono::milliseconds limit)
    : timeout(limit), slots(static_cast<std::size_t>(count)) {
  ranks.reserve(slots.size());
  for (int r = 0; r < count; ++r) {
    ranks.emplace_back(*this, r);
  }
}

bool ThreadGroup::State::all_arrived(std::uint64_t barrier) const {
  return std::all_of(slots.begin(), slots.end(),
                     [&](const Slot& slot) { return slot.arrived.load() >= barrier; });
}

void ThreadGroup::State::abandon(int rank, const std::string& reason) {
  {
    const std::lock_guard lock(mutex);
    if (broken.load()) {
      return;
    }
    broken_rank = rank;
    broken_reason = reason;
    broken.store(true);
  }
  changed.notify_all();
}

void ThreadGroup::State::throw_lost(int rank) {
  const std::lock_guard lock(mutex);
  throw PeerLost(place(rank) + left_text(broken_rank, broken_reason));
}

void ThreadGroup::State::throw_broken(int rank) {
  {
    const std::lock_guard lock(mutex);
    if (broken_by_timeout) {
      throw ExchangeTimeout(place(rank) + broken_reason);
    }
  }
  throw_lost(rank);
}

std::string ThreadGroup::State::missing(std::uint64_t barrier) const {
  std::vector<int> ranks_missing;
  for (std::size_t r = 0; r < slots.size(); ++r) {
    if (slots[r].arrived.load() < barrier) {
      ranks_missing.push_back(static_cast<int>(r));
    }
  }
  return missing_text(ranks_missing, timeout);
}

void ThreadGroup::State::wake() {
  if (sleepers.load() > 0) {
    {
      const std::lock_guard lock(mutex);
    }
    changed.notify_all();
  }
}

/// The barrier in front of an exchange, the only one at which a rank may be missing.
void ThreadGroup::State::Rank::meet() {
  State& s = state_;
  const std::uint64_t number = ++barriers_;
  bool lost = false;
  {
    const std::lock_guard lock(s.mutex);
    lost = s.broken.load();
    if (!lost) {
      s.slots[static_cast<std::size_t>(rank_)].arrived.store(number);
      if (s.all_arrived(number)) {
        s.met.store(number);
      }
    }
  }
  if (lost) {
    s.throw_lost(rank_);
  }
  s.wake();
  for (int i = 0; i < kSpins + kYields && !s.broken.load(); ++i) {
    if (s.met.load() >= number) {
      return;
    }
    if (i >= kSpins) {
      std::this_thread::yield();
    }
  }
  {
    std::unique_lock lock(s.mutex);
    ++s.sleepers;
    const bool woken = s.changed.wait_for(
        lock, s.timeout, [&] { return s.met.load() >= number || s.broken.load(); });
    --s.sleepers;
    if (s.met.load() >= number) {
      return;
    }
    if (!woken) {
      s.broken_rank = rank_;
      s.broken_reason = s.missing(number);
      s.broken_by_timeout = true;
      s.broken.store(true);
    }
  }
  s.changed.notify_all();
  s.throw_broken(rank_);
}

/// A barrier inside an exchange: all ranks are there and will come.
void ThreadGroup::State::Rank::barrier() {
  State& s = state_;
  const std::uint64_t number = ++barriers_;
  s.slots[static_cast<std::size_t>(rank_)].arrived.store(number);
  s.wake();
  for (int i = 0; i < kSpins + kYields; ++i) {
    if (s.all_arrived(number)) {
      return;
    }
    if (i >= kSpins) {
      std::this_thread::yield();
    }
  }
  std::unique_lock lock(s.mutex);
  ++s.sleepers;
  s.changed.wait(lock, [&] { return s.all_arrived(number); });
  --s.sleepers;
}

void ThreadGroup::State::Rank::enter(const void* data, std::size_t bytes, bool gather) {
  Slot& mine = state_.slots[static_cast<std::size_t>(rank_)];
  mine.data = static_cast<const std::byte*>(data);
  mine.bytes = bytes;
  mine.gather = gather;
  meet();
  for (std::size_t r = 0; r < state_.slots.size(); ++r) {
    const Slot& other = state_.slots[r];
    if (other.bytes != bytes || other.gather != gather) {
      // Every rank sees the same slots, so every rank throws.
      barrier();
      throw DivergenceError(divergence_text(rank_, state_.slots.size(), bytes, static_cast<int>(r),
                                            other.bytes, other.gather != gather));
    }
  }
}

void ThreadGroup::State::Rank::all_reduce_sum(std::span<std::int64_t> words) {
  State& s = state_;
  if (rank_ == 0) {  // nobody reads it any more: all have passed the last exchange's last barrier
    try {
      s.sums.resize(words.size());
    } catch (const std::exception& error) {
      abandon(error.what());
      throw;
    }
  }
  enter(words.data(), words.size_bytes(), false);
  // Each rank sums a part of the words over all ranks.
  const std::size_t ranks = s.slots.size();
  const std::size_t begin = words.size() * static_cast<std::size_t>(rank_) / ranks;
  const std::size_t end = words.size() * (static_cast<std::size_t>(rank_) + 1) / ranks;
  for (std::size_t i = begin; i < end; ++i) {
    std::uint64_t sum = 0;  // wraps, as the interface says
    for (const Slot& slot : s.slots) {
      std::uint64_t word;
      std::memcpy(&word, slot.data + i * sizeof(word), sizeof(word));
      sum += word;
    }
    s.sums[i] = static_cast<std::int64_t>(sum);
  }
  barrier();
  std::copy(s.sums.begin(), s.sums.end(), words.begin());
  barrier();  // nobody resizes or fills `sums` while another still reads it
}

void ThreadGroup::State::Rank::all_gather(std::span<const std::byte> in, std::span<std::byte> out) {
  if (out.size() != in.size() * state_.slots.size()) {
    const std::string reason = gather_size_text(out.size(), in.size() * state_.slots.size());
    abandon(reason);
    throw InvalidArgument(reason);
  }
  enter(in.data(), in.size(), true);
  for (std::size_t r = 0; r < state_.slots.size(); ++r) {
    if (!in.empty()) {
      std::memcpy(out.data() + r * in.size(), state_.slots[r].data, in.size());
    }
  }
  barrier();
}

ThreadGroup::ThreadGroup(int size, std::chrono::milliseconds timeout) {
  check_ranks(size);
  check_timeout(timeout);
  state_ = std::make_unique<State>(size, timeout);
}

ThreadGroup::~ThreadGroup() = default;

int ThreadGroup::size() const { return static_cast<int>(state_->slots.size()); }

Communicator& ThreadGroup::rank(int rank) {
  if (rank < 0 || rank >= size()) {
    throw InvalidArgument("rank: got " + std::to_string(rank) + ", expected 0 to " +
                          std::to_string(size() - 1));
  }
  return state_->ranks[static_cast<std::size_t>(rank)];
}

}  // namespace syncbn
