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
#include "syncbn/export.hpp"

namespace syncbn {

/// A sum over the ranks of a group whose words come and go in parts: a rank goes on computing while
/// others exchange, and can look after other things while it waits. The ranks need not publish the
/// same parts. Nothing is allocated.
class SYNCBN_API SumInParts {
 public:
  virtual ~SumInParts() = default;

  /// Begins a sum; waits for nobody. in.size() == out.size(); both stay valid until all words of
  /// out are there, a call throws, or the group was abandoned. out may be in. Throws Error when one
  /// is under way already. All calls throw InvalidArgument for lengths that do not fit, and
  /// otherwise the errors of all_reduce_sum.
  virtual void open(std::span<const std::int64_t> in, std::span<std::int64_t> out) = 0;

  /// The first `words` of `in` change no more: all of them, in the end. Waits for nobody.
  virtual void publish(std::size_t words) = 0;

  /// Waits until the first `words` of `out` are there, which have to be published, for at most
  /// about `slice` (0: only looks). Whether they are.
  virtual bool wait(std::size_t words, std::chrono::milliseconds slice) = 0;
};

namespace detail {
template <class Group>
class GroupLink;

/// By it those that refer to a group see that it is gone, or was reset. No copy shares it.
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
/// sequence of calls. Calls on one communicator come from one thread at a time. On the CPU a
/// layer asks a group of one rank for no sum.
class SYNCBN_API Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// words[i] becomes the sum over ranks of words[i], modulo 2^64; afterwards words is the same on
  /// every rank. Throws on every rank: DivergenceError when lengths differ, ExchangeTimeout when a
  /// rank does not come in time, PeerLost when one has left.
  virtual void all_reduce_sum(std::span<std::int64_t> words) = 0;

  /// all_reduce_sum in parts, or null where words travel only at once.
  [[nodiscard]] virtual SumInParts* parts() { return nullptr; }

  /// Concatenates every rank's bytes in rank order; out.size() == size() * in.size(). Errors as for
  /// all_reduce_sum.
  virtual void all_gather(std::span<const std::byte> in, std::span<std::byte> out) = 0;

  /// Tells the other ranks that this one cannot take part any more; those that wait now or come
  /// later get PeerLost with this rank's number and the reason.
  virtual void abandon(const std::string& reason) = 0;

  /// Tells them that it does not take part in the exchange that comes next, because its call was
  /// refused: there they get PeerLost with the reason, and then the group goes on. It does not
  /// wait for this exchange. If this rank also refused an earlier exchange, it waits until all
  /// ranks have come to that one. Where a group has no such word, this rank abandons it.
  virtual void refuse(const std::string& reason) { abandon(reason); }

 protected:
  /// After a reset: layers count their calls from 0.
  void begin_again() noexcept { life_.begin_again(); }

 private:
  friend class detail::GroupLink<Communicator>;
  detail::GroupLife life_;
};

/// The group of one rank: an exchange does nothing. There is one for all, which is always there.
[[nodiscard]] SYNCBN_API Communicator& self_communicator();

/// A group whose ranks are threads of this process.
class SYNCBN_API ThreadGroup {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// size: 1 to 2048 ranks. timeout: 1 ms to 2^40 ms (34 years); how long a rank waits in one
  /// exchange before ExchangeTimeout, which names the ranks that did not come. Other values:
  /// InvalidArgument.
  explicit ThreadGroup(int size, std::chrono::milliseconds timeout = kDefaultTimeout);
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  [[nodiscard]] int size() const noexcept { return size_; }

  /// Rank `rank`'s end, to be used by one thread; valid while the group lives.
  [[nodiscard]] Communicator& rank(int rank);

  /// Makes a broken group a new one, with the same ends; their layers begin at call 0. While no
  /// thread is in a call of the group.
  void reset();

 private:
  struct State;
  int size_;
  std::shared_ptr<State> state_;
};

/// Runs body(end) for every rank's end of the group, each on a thread of its own, and waits for
/// all. A rank whose body throws abandons the group, so that none waits for it. Throws what was
/// thrown first.
SYNCBN_API void run(ThreadGroup& group, const std::function<void(Communicator& end)>& body);

}  // namespace syncbn
