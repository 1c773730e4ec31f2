// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/mpi_meeting.hpp"
#include "syncbn/communicator.hpp"

namespace syncbn {

/// Exchanges over MPI alone. MPI's collective begins only when all ranks are there with the same
/// call, which they tell each other before.
class MpiExchange final : public Communicator {
 public:
  /// comm: of its own. The rest is as for MpiMeeting.
  MpiExchange(MPI_Comm comm, std::vector<int> numbers, int group_size,
              std::chrono::milliseconds timeout);
  /// Frees the communicator, unless the group is broken: then MPI may still use it and its memory.
  ~MpiExchange() override;

  int rank() const override { return meeting_->rank(); }
  int size() const override { return meeting_->size(); }
  void all_reduce_sum(std::span<std::int64_t> words) override;
  void abandon(const std::string& reason) override { meeting_->abandon(reason); }
  void refuse(const std::string& reason) override;

  /// In place of an exchange: what went wrong among the ranks that this one speaks for. The others
  /// get an error of the same type.
  void fail(const Error& error);

 private:
  template <class Body>
  void or_leave(const Body& body);
  void finish(MPI_Request& request);

  MPI_Comm comm_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<MpiMeeting> meeting_;
  /// Memory that MPI may still read or write when an exchange has failed, and then stays allocated.
  struct Memory {
    std::vector<std::uint64_t> words;
  };
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>();
};

}  // namespace syncbn
