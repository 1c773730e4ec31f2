// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/mpi_check.hpp"
#include "comm/mpi_messages.hpp"

namespace syncbn {

/// Has the ranks of a communicator meet before each exchange, and fail together. The ranks are a
/// tree: each tells the one above it what it and those below it bring, and rank 0's answer comes
/// back the same way. So no rank hears of more than kFanOut others, and a group of up to
/// kFanOut + 1 ranks tells rank 0 directly.
class MpiMeeting {
 public:
#ifdef SYNCBN_MPI_FAN_OUT  // of a test
  static constexpr int kFanOut = SYNCBN_MPI_FAN_OUT;
#else
  static constexpr int kFanOut = 16;
#endif

  /// numbers: what errors call the ranks of `comm`, which may be some of a group of `group_size`.
  MpiMeeting(MPI_Comm comm, std::vector<int> numbers, int group_size,
             std::chrono::milliseconds timeout);
  ~MpiMeeting();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int number() const { return number(rank_); }
  /// "rank R of N: ".
  std::string who() const;
  /// Why there are no further exchanges.
  const std::optional<std::string>& broken() const { return broken_; }
  /// After how many time limits from its own coming a rank in a group of that size knows at the
  /// latest that others do not come.
  static int limits(int size);

  /// All ranks are at the same exchange of `bytes` bytes, or all throw.
  void meet(Kind kind, std::size_t bytes);
  /// Tells the others that this rank is not in the exchange to come. type: of their error.
  void refuse(Answer type, const std::string& text, const std::vector<int>& about);
  /// The other half of an exchange that this rank refused.
  void settle();
  /// Tells the others that this rank comes no more, and does not wait for them.
  void leave(Answer type, const std::string& text, const std::vector<int>& about);
  void abandon(const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;

  int number(int rank) const { return numbers_[static_cast<std::size_t>(rank)]; }
  static int above(int rank) { return (rank - 1) / kFanOut; }
  static int first_below(int rank) { return rank * kFanOut + 1; }
  int end_below() const { return std::min(first_below(rank_) + kFanOut, size_); }
  static int height(int rank, int size);
  static int depth(int rank);
  RankSet with_all_below(int rank) const;
  std::optional<Arrival> collect(const Arrival& mine);
  Arrival together(const Arrival& mine, const std::vector<Arrival>& below) const;
  void decide(const Arrival& mine, bool late);
  template <class Again>
  bool await_answer(const Again& again);
  void heed();
  void end(Answer what, const std::string& text, const std::vector<int>& about);
  void tell(const Verdict& what);
  template <class Message>
  void send(const Message& message, int to, int tag);
  void forget_sent();
  template <class Message>
  std::optional<int> receive(int from, int tag, Message& message);

  MPI_Comm comm_;
  std::vector<int> numbers_;
  int group_size_;
  std::chrono::milliseconds timeout_;
  int rank_ = 0;
  int size_ = 0;
  /// And the next one for verdicts. MPICH gives the messages that nobody received from a group to
  /// the next one in its place, so each group has tags of its own.
  int arrival_tag_ = 0;
  Clock::time_point decided_ = Clock::now();  ///< when rank 0 last let the ranks go
  std::optional<std::string> broken_;
  bool refused_ = false;  ///< the last exchange, whose other half is still to come
  std::vector<std::pair<int, Arrival>> early_;  ///< of ranks below, one exchange ahead
  Arrival refusal_{};
  Verdict verdict_{};

  struct Sent {
    MPI_Request request;
    std::vector<std::byte> message;
  };
  /// Stays allocated where MPI may still read it.
  std::unique_ptr<std::list<Sent>> sent_ = std::make_unique<std::list<Sent>>();
};

}  // namespace syncbn
