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
#include "syncbn/export.hpp"

namespace syncbn {

/// What a rank tells the others so that they can form a SharedMemoryGroup. Rank 0's offer makes the
/// group's memory, which has no name and ends with the last process that holds it.
class SYNCBN_API SharedMemoryOffer {
 public:
  static constexpr std::size_t kBytes = 256;

  /// size: 1 to 2048 ranks, rank: 0 to size - 1, otherwise InvalidArgument. What the system refuses
  /// is not thrown: the bytes carry it, so that SharedMemoryGroup::open fails alike on every rank.
  SharedMemoryOffer(int rank, int size);
  SharedMemoryOffer(SharedMemoryOffer&&) noexcept = default;
  SharedMemoryOffer& operator=(SharedMemoryOffer&&) = delete;

  /// To be gathered from all ranks, by any means: pipes, a key-value store, MPI.
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
/// After DivergenceError, and after PeerLost because a rank refused an argument, the group can be
/// used further. After ExchangeTimeout and any other PeerLost it is broken until reset: every later
/// call on every rank throws PeerLost at once. A process that dies is noticed within a second.
/// Whether an exchange succeeds is the same for all surviving ranks. In a child that the rank's
/// process forks, calls throw Error.
class SYNCBN_API SharedMemoryGroup final : public Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  struct Opened;

  /// Puts every rank's bytes into `all`, in rank order, by any means: all.size() is the number of
  /// ranks times mine.size(), which is the same on every rank.
  using Gather = std::function<void(std::span<const std::byte> mine, std::span<std::byte> all)>;

  /// Makes the group, in calls of `gather` that every rank makes: of offers (see open), and of
  /// whether each rank could use them. On every rank a group that may be used at once, or on every
  /// rank the reason why there is none. rank, size, timeout: as for SharedMemoryOffer and open.
  /// What `gather` throws comes out of here.
  [[nodiscard]] static Opened create(int rank, int size, const Gather& gather,
                                     std::chrono::milliseconds timeout = kDefaultTimeout);

  /// Opens the memory that the offers describe: for callers who gather in steps of their own.
  ///
  /// offer: this rank's. offers: size * SharedMemoryOffer::kBytes bytes, all ranks' offers in rank
  /// order. timeout: 1 ms to 2^40 ms; how long a rank waits for the others before ExchangeTimeout,
  /// which names the ranks that did not come. Other values: InvalidArgument.
  ///
  /// Ranks that do not see each other's memory (other nodes or containers) are not an error: the
  /// result then says why. The group may be used once all ranks have opened it, so the caller
  /// gathers each rank's success first.
  [[nodiscard]] static Opened open(SharedMemoryOffer offer, std::span<const std::byte> offers,
                                   std::chrono::milliseconds timeout = kDefaultTimeout);

  /// Ranks that wait now or come later get PeerLost.
  ~SharedMemoryGroup() override;

  int rank() const override;
  int size() const override;
  void all_reduce_sum(std::span<std::int64_t> words) override;
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override;
  void abandon(const std::string& reason) override;
  void refuse(const std::string& reason) override;

  SumInParts* parts() override;

  /// Makes a broken group a new one, as create does: every rank that it is to have calls this. The
  /// layers of the group begin at call 0. Error, and the group stays broken, where create has none.
  void reset(const Gather& gather);

  /// What errors call the ranks, where they are some of `size` ranks of a larger group: numbers[r]
  /// for rank r. InvalidArgument unless there are size() numbers, of 0 to size - 1.
  void call_ranks(std::vector<int> numbers, int size);

  /// The timeout of this rank from now on, also in an exchange that is under way.
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
