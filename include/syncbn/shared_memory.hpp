// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "syncbn/communicator.hpp"
#include "syncbn/export.h"

namespace syncbn {

/// The bytes that a rank sends to the others to form a SharedMemoryGroup. Rank 0's offer makes the
/// group's memory. The memory has no name, and ends with the last process that holds it.
class SYNCBN_API SharedMemoryOffer {
 public:
  static constexpr std::size_t kBytes = 256;

  /// size: 1 to 2048 ranks. rank: 0 to size - 1. Other values throw InvalidArgument. If the system
  /// refuses memory, this does not throw. The bytes say so, and SharedMemoryGroup::open fails in
  /// the same way on every rank.
  SharedMemoryOffer(int rank, int size);
  SharedMemoryOffer(SharedMemoryOffer&&) noexcept = default;
  SharedMemoryOffer& operator=(SharedMemoryOffer&&) = delete;

  /// Returns the bytes to gather from all ranks, by any means: pipes, a key-value store, MPI.
  [[nodiscard]] std::span<const std::byte, kBytes> bytes() const noexcept { return bytes_; }

 private:
  friend class SharedMemoryGroup;
  struct Resources;
  std::array<std::byte, kBytes> bytes_{};
  std::shared_ptr<Resources> resources_;
};

/// One rank's end of a group whose ranks are processes (or threads) of one node and exchange
/// through memory that they share.
///
/// After DivergenceError, and after the PeerLost of a refused argument, the group goes on. After
/// ExchangeTimeout and any other PeerLost it is broken until reset, and every later call on every
/// rank throws PeerLost at once. The ranks notice the death of a process within a second. An
/// exchange succeeds for all surviving ranks or for none. In a forked child of a rank's process
/// calls throw Error.
class SYNCBN_API SharedMemoryGroup final : public Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  struct Opened;

  /// A function that writes the bytes of all ranks to `all`, in rank order, by any means.
  /// mine.size() is the same on every rank, and all.size() is the number of ranks times
  /// mine.size().
  using Gather = std::function<void(std::span<const std::byte> mine, std::span<std::byte> all)>;

  /// Makes the group. Every rank calls `gather` equally often: for the offers (see open), and to
  /// learn whether each rank could use them. The result is a group on every rank, which may be used
  /// at once, or on every rank the reason why there is none. rank, size and timeout are those of
  /// SharedMemoryOffer and open. Exceptions of `gather` pass through.
  [[nodiscard]] static Opened create(int rank, int size, const Gather& gather,
                                     std::chrono::milliseconds timeout = kDefaultTimeout);

  /// Opens the memory that the offers describe, for callers who gather in steps of their own.
  ///
  /// offer: this rank's offer. offers: the offers of all ranks in rank order, size *
  /// SharedMemoryOffer::kBytes bytes. timeout: 1 ms to 2^40 ms. A rank that has waited so long
  /// throws ExchangeTimeout, which names the ranks that did not come. Other values throw
  /// InvalidArgument.
  ///
  /// It is no error if ranks do not see each other's memory (other nodes or containers); the result
  /// then says why. Use the group only after all ranks have opened it: gather each rank's success
  /// first.
  [[nodiscard]] static Opened open(SharedMemoryOffer offer, std::span<const std::byte> offers,
                                   std::chrono::milliseconds timeout = kDefaultTimeout);

  /// Leaves the group. Ranks that wait now or come later get PeerLost.
  ~SharedMemoryGroup() override;

  int rank() const override;
  int size() const override;
  void all_reduce_sum(std::span<std::int64_t> words) override;
  void abandon(const std::string& reason) override;
  void refuse(const std::string& reason) override;

  SumInParts* parts() override;

  /// Repairs a broken group. All ranks call this, and form it again with `gather` as in create. The
  /// layers of the group begin at call 0. If the group cannot be made, this throws Error, and the
  /// group stays broken.
  void reset(const Gather& gather);

  /// Sets the rank numbers in errors, for a group that is a part of a larger group of `size` ranks:
  /// rank r is called numbers[r]. Throws InvalidArgument unless there are size() numbers, each from
  /// 0 to size - 1.
  void call_ranks(std::vector<int> numbers, int size);

  /// Returns whether the group is broken until reset. Throws Error in a forked child.
  [[nodiscard]] bool broken() const;

  /// Sets the timeout of this rank, also for an exchange that is under way.
  void set_timeout(std::chrono::milliseconds timeout);

 private:
  struct State;
  explicit SharedMemoryGroup(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// A group, or the reason why there is none.
struct SharedMemoryGroup::Opened {
  std::unique_ptr<SharedMemoryGroup> group;
  std::string why;
};

}  // namespace syncbn
