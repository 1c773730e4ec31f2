// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/mpi_exchange.hpp"
#include "syncbn/communicator.hpp"
#include "syncbn/shared_memory.hpp"

namespace syncbn {

/// Exchanges of ranks on several nodes: in the memory of each node, over MPI between the nodes'
/// first ranks, and in memory again, where the first rank brings the result or what went wrong. So
/// an error has one type on all ranks.
class MpiNodes final : public Communicator {
 public:
  /// node: of this rank's node. between: of the first ranks of the nodes; null on other ranks.
  MpiNodes(std::unique_ptr<SharedMemoryGroup> node, std::unique_ptr<MpiExchange> between, int rank,
           int size, std::chrono::milliseconds timeout);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_reduce_sum(std::span<std::int64_t> words) override;
  void abandon(const std::string& reason) override;
  void refuse(const std::string& reason) override;

 private:
  std::unique_ptr<SharedMemoryGroup> node_;
  std::unique_ptr<MpiExchange> between_;
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::vector<std::int64_t> shared_;  ///< what went wrong, and the result
};

}  // namespace syncbn
