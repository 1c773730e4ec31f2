// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/failure.hpp"
#include "comm/mpi_check.hpp"
#include "syncbn/framed_exchange.hpp"

namespace syncbn {

/// Exchanges over MPI alone. A rank that has waited for the time limit says to all that it is here,
/// and so does each that hears it. Who says nothing is missing.
class MpiExchange final : public FramedExchange {
 public:
  /// The words of a message of 64 channels of float32: what is longer takes a second sum, and what
  /// is shorter as long.
  static constexpr std::size_t kMpiFrameWords = kHeaderWords + 64 * 19;
  /// A rank that does not come is an error on the others after so many time limits, for each of
  /// the two messages that an exchange has at most.
  static constexpr int kLimits = 3;

  /// comm: of its own. numbers: what errors call the ranks of `comm`, which may be some of a group
  /// of `group_size`.
  MpiExchange(MPI_Comm comm, std::vector<int> numbers, int group_size,
              std::chrono::milliseconds timeout);
  /// Frees the communicator, unless the group is broken: then MPI may still use it and its memory.
  ~MpiExchange() override;

  void all_reduce_sum(std::span<std::int64_t> words) override;
  void refuse(const std::string& reason) override;

  /// In place of an exchange: what went wrong among the ranks that this one speaks for. The others
  /// get an error of the same type. for_good: those ranks do not come again.
  void fail(const Error& error, bool for_good);

 private:
  using Clock = std::chrono::steady_clock;

  /// What a rank says to the others outside of sums: that it is in a sum, or why it has left.
  struct Notice {
    std::int64_t group;
    std::uint64_t sum;
    detail::Failure failure;
  };
  struct Sent {
    Notice notice;
    std::vector<MPI_Request> requests;
  };

  void begin_sum(std::span<std::int64_t> words) override;
  void wait_for_sum() override;
  void say_farewell(const detail::Failure& failure) override;
  bool hear();
  void tell(const detail::Failure& failure);
  void give_up();
  void forget_sent();

  MPI_Comm comm_;
  std::chrono::milliseconds timeout_;
  /// MPICH gives the messages that nobody received from a group to the next one in its place.
  std::int64_t group_ = 0;
  std::deque<MPI_Request> sums_;
  std::uint64_t waited_for_ = 0;     ///< number of the sum that this rank waits for
  std::optional<Notice> left_;       ///< of the first rank that has left, after its last sum
  std::vector<std::uint64_t> here_;  ///< in which sum each rank said last that it is
  /// Stays allocated where MPI may still read it.
  std::unique_ptr<std::list<Sent>> sent_ = std::make_unique<std::list<Sent>>();
};

}  // namespace syncbn
