// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/rank_set.hpp"
#include "comm/shared_segment.hpp"

// The barriers of a group in memory that its ranks share, and the slots that they fill for them.
namespace syncbn {

/// What a rank brings to one barrier; longer messages go in pieces. The L2 cache holds a few.
inline constexpr std::size_t kPieceBytes = std::size_t{128} << 10;

/// What a rank tells the others. A rank writes its own only. Numbers are atomic, as another process
/// may write anything at any time: a check and the use after it then cannot read two values.
struct alignas(64) RankArea {
  enum class Cause : std::uint32_t { kLeft, kRefused, kTimeout, kDied, kFault };

  std::atomic<std::uint64_t> arrived;  ///< number of the barrier that it has reached
  struct {
    std::atomic<std::uint64_t> bytes;
    std::atomic<std::uint64_t> end;  ///< of what its slot holds
    std::atomic<std::uint64_t>
        refused;  ///< 1: in place of a message the slot holds why there is none
    /// Before `arrived`, which others look at first.
    void set(std::uint64_t of_bytes, std::uint64_t to, std::uint64_t is_refused) {
      bytes.store(of_bytes, std::memory_order_relaxed);
      end.store(to, std::memory_order_relaxed);
      refused.store(is_refused, std::memory_order_relaxed);
    }
  } message[2];  ///< as slots
  /// Why it has broken the group; written once, before `state` says so.
  alignas(64) std::atomic<Cause> cause;
  char reason[508];
  RankSet about;  ///< the ranks that are to blame
};

/// The barriers are numbered from 1. Before barrier b a rank fills its slot for it, number b % 2;
/// after b it reads the others'. A slot is filled again two barriers later, when all ranks have
/// reached b + 1 and so have read it.
///
/// The last rank that comes and those that give up change one word, `state`, by compare-and-swap: a
/// barrier is met for all ranks or for none.
class SharedBarrier {
 public:
  /// memory: memory_bytes(size) bytes, zero where slots do not lie; outlives this. peers: the ranks
  /// in other processes. process: the only one that may use this, or 0.
  SharedBarrier(std::byte* memory, std::vector<Peer> peers, int rank, int size,
                std::chrono::milliseconds timeout, pid_t process);

  static std::size_t memory_bytes(int ranks);
  /// Without the slots.
  static std::size_t control_bytes(int ranks);

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return size_; }
  /// The barrier that this rank has reached last.
  std::uint64_t number() const { return number_; }
  bool in_own_process() const;
  RankArea& area(std::size_t rank) const;
  /// A rank's slot for a barrier: kPieceBytes, behind them one size()-th of that.
  std::byte* slot(std::size_t rank, std::uint64_t barrier) const {
    return memory_ + slots_ + (2 * rank + barrier % 2) * slot_;
  }

  /// What errors call the ranks, which are some of `of` ranks.
  void call_ranks(std::vector<int> numbers, std::size_t of);
  int number(std::size_t rank) const { return numbers_[rank]; }
  const std::vector<int>& numbers() const { return numbers_; }
  std::size_t numbers_of() const { return of_; }
  /// "rank R of N: ".
  std::string who() const;

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  /// Throws PeerLost if the group is broken, Error in a forked child.
  void check_usable() const;
  /// Whether it is broken.
  bool broken() const;
  /// Throws Error in a forked child.
  void check_process() const;
  /// From here on waits share one time limit.
  void begin_waits() { waited_ = std::chrono::milliseconds(0); }
  /// The same, at a barrier that this rank has come to before.
  void begin_waits_again();
  /// How long this rank has waited since, but for waits that ended at once.
  std::chrono::milliseconds waited() const { return waited_; }
  /// Comes to the next barrier.
  void arrive();
  /// Whether all have come. Throws ExchangeTimeout or PeerLost if the group broke before; breaks it
  /// if other processes wrote to the word that says so.
  bool met() const;
  /// Waits for the others for about `slice`; whether all have come. Errors as of met(); the group
  /// breaks at the time limit and when a missing rank is dead.
  bool wait(std::chrono::milliseconds slice);
  void abandon(const std::string& reason, RankArea::Cause cause = RankArea::Cause::kLeft);

 private:
  struct Control;
  using Cause = RankArea::Cause;

  Control& control() const;
  void try_meet();
  void look_at_peers();
  void look_at_clock(std::chrono::milliseconds waited);
  void sleep(std::chrono::milliseconds limit);
  void ring() const;
  bool break_at(std::uint64_t last_met, Cause cause, const std::string& text,
                const std::vector<int>& about);
  [[noreturn]] void throw_broken(std::uint64_t state, bool waiting) const;

  std::byte* memory_;
  std::vector<Peer> peers_;
  std::vector<pollfd> alive_;  ///< of peers_
  std::size_t rank_;
  std::size_t size_;
  std::vector<int> numbers_;
  std::size_t of_;
  std::chrono::milliseconds timeout_;
  std::size_t slots_;  ///< where they begin
  std::size_t slot_;   ///< bytes of one
  pid_t process_;
  std::uint64_t number_ = 0;
  std::chrono::steady_clock::time_point arrived_at_;
  std::chrono::milliseconds waited_{0};
  std::chrono::milliseconds waited_before_{0};  ///< this barrier
  mutable bool told_ = false;                   ///< this rank knows that the group is broken
};

}  // namespace syncbn
