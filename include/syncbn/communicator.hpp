// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "syncbn/error.hpp"
#include "syncbn/export.h"

namespace syncbn {

/// A sum over the ranks of a group whose words travel in parts. So a rank can compute while earlier
/// parts travel, and can do other work while it waits. The ranks need not publish the same parts.
/// Nothing is allocated.
class SYNCBN_API SumInParts {
 public:
  virtual ~SumInParts() = default;

  /// Begins a sum, without waiting. in.size() == out.size(); out may be in. Both must stay valid
  /// until all words of out are complete, a call throws, or the group is abandoned. Throws Error if
  /// another sum is under way. All calls throw InvalidArgument for lengths that do not fit, and
  /// otherwise the errors of all_reduce_sum.
  virtual void open(std::span<const std::int64_t> in, std::span<std::int64_t> out) = 0;

  /// Says that the first `words` words of `in` will not change any more, without waiting. The last
  /// call of a sum publishes all words.
  virtual void publish(std::size_t words) = 0;

  /// Waits for at most about `slice` until the first `words` words of `out` are complete, and
  /// returns whether they are. With a slice of 0 it only looks; 2^40 ms is the longest. This rank
  /// must have published these words.
  virtual bool wait(std::size_t words, std::chrono::milliseconds slice) = 0;
};

namespace detail {
template <class Group>
class GroupLink;

/// Tells the layers of a group whether the group still exists, and whether it was reset. A copy of
/// a group has a life of its own.
class SYNCBN_API GroupLife {
 public:
  GroupLife() = default;
  GroupLife(const GroupLife&) : GroupLife() {}
  // NOLINTNEXTLINE(bugprone-unhandled-self-assignment): nothing is taken over
  GroupLife& operator=(const GroupLife&) { return *this; }
  void begin_again() noexcept { ++*beginnings_; }

 private:
  template <class Group>
  friend class GroupLink;
  std::shared_ptr<std::uint64_t> beginnings_ = std::make_shared<std::uint64_t>(0);
};
}  // namespace detail

/// One rank's end of a group that exchanges statistics. Every rank of the group makes the same
/// sequence of calls. Only one thread at a time may call a communicator. On the CPU a layer does
/// not call all_reduce_sum of a group of one rank.
class SYNCBN_API Communicator {
 public:
  virtual ~Communicator() = default;

  /// The place in the group: rank() is 0 to size() - 1, and size() is 1 to 2048. Both stay the same
  /// until begin_again(). Layers refuse other values.
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// Replaces words[i] by the sum of words[i] over all ranks, modulo 2^64. Afterwards `words` is
  /// the same on every rank. On every rank it throws DivergenceError if lengths differ,
  /// ExchangeTimeout if a rank does not come in time, and PeerLost if a rank has left.
  /// When the ranks' calls differ, a layer calls it once more, to learn how they differ.
  virtual void all_reduce_sum(std::span<std::int64_t> words) = 0;

  /// Returns all_reduce_sum in parts, or null if this group cannot send parts.
  [[nodiscard]] virtual SumInParts* parts() { return nullptr; }

  /// Tells the other ranks that this rank cannot take part any more. Ranks that wait now or come
  /// later get PeerLost with this rank's number and the reason.
  virtual void abandon(const std::string& reason) = 0;

  /// Tells the other ranks that this rank leaves out the next exchange, because its call was
  /// refused. In that exchange the others get PeerLost with the reason, and then the group goes
  /// on. This call does not wait for the exchange. But if this rank also refused an earlier
  /// exchange, it waits until all ranks have come to that one. A class that does not override
  /// this function abandons the group.
  virtual void refuse(const std::string& reason) { abandon(reason); }

 protected:
  /// Makes the group's layers count their calls from 0. Call it after a reset.
  void begin_again() noexcept { life_.begin_again(); }

 private:
  friend class detail::GroupLink<Communicator>;
  detail::GroupLife life_;
};

/// Returns the group of one rank, in which an exchange does nothing. All callers share it, and it
/// lasts as long as the process.
[[nodiscard]] SYNCBN_API Communicator& self_communicator();

/// A group whose ranks are threads of this process.
class SYNCBN_API ThreadGroup {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// size: 1 to 2048 ranks. timeout: 1 ms to 2^40 ms (34 years). A rank that has waited so long in
  /// one exchange throws ExchangeTimeout, which names the ranks that did not come. Other values
  /// throw InvalidArgument.
  explicit ThreadGroup(int size, std::chrono::milliseconds timeout = kDefaultTimeout);
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  [[nodiscard]] int size() const noexcept { return size_; }

  /// Returns the end of rank `rank`, for one thread. It is valid while the group lives.
  [[nodiscard]] Communicator& rank(int rank);

  /// Repairs a broken group. The ends stay the same, and their layers begin at call 0. Call it
  /// while no thread is in a call of the group.
  void reset();

 private:
  struct State;
  int size_;
  std::shared_ptr<State> state_;
};

/// Runs body(end) for the end of every rank, each on a thread of its own, and waits for all
/// threads. If a body throws, its rank abandons the group, so that no other rank waits for it.
/// Afterwards `run` throws the exception that was thrown first.
SYNCBN_API void run(ThreadGroup& group, const std::function<void(Communicator& end)>& body);

}  // namespace syncbn
