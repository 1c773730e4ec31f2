// SPDX-License-Identifier: Apache-2.0
#pragma once

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/mpi_messages.hpp"
#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"

namespace syncbn {

inline std::string mpi_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  return MPI_Error_string(code, text.data(), &length) == MPI_SUCCESS
             ? std::string(text.data(), static_cast<std::size_t>(length))
             : "error " + std::to_string(code);
}

/// Throws Error with MPI's text unless the call succeeded.
inline void check_mpi(int code, const std::string& who, const char* call, const char* file,
                      int line) {
  if (code != MPI_SUCCESS) {
    throw Error(who + call + " failed at " + file + ":" + std::to_string(line) + ": " +
                mpi_text(code));
  }
}

#define SYNCBN_MPI_CHECK(who, call) ::syncbn::check_mpi((call), (who), #call, __FILE__, __LINE__)

/// Whether MPI allows this thread to call it.
inline bool on_mpis_thread() {
  int level = MPI_THREAD_SINGLE;
  int is_main = 0;
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&is_main);
  return level >= MPI_THREAD_SERIALIZED || is_main != 0;
}

/// Exchanges over MPI alone. Before each one every rank tells rank 0 what it brings, and rank 0
/// answers; only when all are there with the same call does MPI's collective begin.
class MpiExchange final : public Communicator {
 public:
  /// comm: of its own. numbers: what errors call its ranks, which may be some of a group of
  /// `group_size`.
  MpiExchange(MPI_Comm comm, std::vector<int> numbers, int group_size,
              std::chrono::milliseconds timeout);
  /// Frees the communicator, unless the group is broken: then MPI may still use it and its memory.
  ~MpiExchange() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_reduce_sum(std::span<std::int64_t> words) override;
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override;
  void abandon(const std::string& reason) override;
  void refuse(const std::string& reason) override;

  /// In place of an exchange: what went wrong among the ranks that this one speaks for. The others
  /// get an error of the same type.
  void fail(const Error& error);

 private:
  using Clock = std::chrono::steady_clock;

  int number(int rank) const { return numbers_[static_cast<std::size_t>(rank)]; }
  std::string who() const;
  template <class Body>
  void or_leave(const Body& body);
  void meet(Kind kind, std::size_t bytes);
  void decide();
  bool collect(std::vector<Arrival>& arrivals);
  bool answer_refusals(const std::vector<Arrival>& arrivals);
  void await_answer(const Arrival& mine);
  void heed();
  void settle();
  void send_refusal(Answer type, const std::string& text, const std::vector<int>& about);
  void leave(Answer type, const std::string& text, const std::vector<int>& about);
  void answer(Answer what, const std::string& text, const std::vector<int>& about = {});
  void tell(const Verdict& what);
  template <class Message>
  void send(const Message& message, int to, int tag);
  void forget_sent();
  template <class Message>
  std::optional<int> receive(int from, int tag, Message& message);
  void finish(MPI_Request& request);

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
  std::optional<std::string> broken_;         ///< why there are no further exchanges
  bool refused_ = false;  ///< the last exchange, whose other half is still to come
  std::vector<std::pair<int, Arrival>> early_;  ///< at rank 0, of ranks one exchange ahead

  struct Sent {
    MPI_Request request;
    std::vector<std::byte> message;
  };
  /// Memory that MPI may still read or write when an exchange has failed, and then stays allocated.
  struct Memory {
    std::list<Sent> sent;
    std::vector<std::uint64_t> words;
    std::vector<std::byte> mine;
    std::vector<std::byte> all;
  };
  Arrival arrival_{};
  Arrival refusal_{};
  Verdict verdict_{};
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>();
};

}  // namespace syncbn
