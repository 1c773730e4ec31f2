#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "syncbn/export.hpp"

namespace syncbn {

/// One rank's end of a group that exchanges statistics. Every rank of the group makes the same
/// sequence of calls. Calls on one communicator come from one thread at a time. On the CPU
/// batch_norm_forward and batch_norm_backward ask a group of one rank for no sum.
class SYNCBN_API Communicator {
 public:
  virtual ~Communicator();

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// words[i] becomes the sum over ranks of words[i], modulo 2^64; afterwards words is the same on
  /// every rank. Throws on every rank: DivergenceError when lengths differ, ExchangeTimeout when a
  /// rank does not come in time, PeerLost when one has left.
  virtual void all_reduce_sum(std::span<std::int64_t> words) = 0;

  /// Concatenates every rank's bytes in rank order; out.size() == size() * in.size(). Errors as for
  /// all_reduce_sum.
  virtual void all_gather(std::span<const std::byte> in, std::span<std::byte> out) = 0;

  /// Tells the other ranks that this one cannot take part any more (its call failed); those that
  /// wait now or come later get PeerLost with this rank's number and the reason.
  virtual void abandon(const std::string& reason) = 0;
};

/// The group of one rank: an exchange does nothing.
SYNCBN_API std::unique_ptr<Communicator> self_communicator();

/// A group whose ranks are threads of this process.
class SYNCBN_API ThreadGroup {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// size: 1 to 2048 ranks. timeout: 1 ms to 2^40 ms (34 years); how long a rank waits in one
  /// exchange before ExchangeTimeout, which names the ranks that did not come. Other values:
  /// InvalidArgument.
  explicit ThreadGroup(int size, std::chrono::milliseconds timeout = kDefaultTimeout);
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  int size() const;

  /// Rank `rank`'s end, to be used by one thread; valid while the group lives.
  Communicator& rank(int rank);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace syncbn
