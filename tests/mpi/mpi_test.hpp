// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "support.hpp"
#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"
#include "syncbn/mpi.hpp"

// What the tests of groups over MPI share.
namespace syncbn {

using std::chrono::milliseconds;
using testing::contains;
using testing::thrown_text;

/// Far above what ranks that come at the same time need on a busy machine.
constexpr milliseconds kShort(600);

inline MPI_Comm world() { return MPI_COMM_WORLD; }

inline int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

inline int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// What the ranks exchange over: a run of the tests has one.
enum class Way {
  kMemory,  ///< as a group is made by default, on one machine
  kMpi,     ///< no ranks share memory
  kNodes,   ///< the even and the odd ranks are taken for two nodes
};
inline Way way = Way::kMemory;

/// A group of all ranks that goes this way.
inline MpiCommunicator group_of_all(milliseconds timeout = MpiCommunicator::kDefaultTimeout) {
  if (way == Way::kMemory) {
    return MpiCommunicator(world(), timeout);
  }
  static MPI_Comm node = MPI_COMM_NULL;
  if (node == MPI_COMM_NULL) {
    // Backwards, because ranks of a node need not be in the group's order.
    MPI_Comm_split(world(), way == Way::kMpi ? world_rank() : world_rank() % 2, -world_rank(),
                   &node);
  }
  return MpiCommunicator(world(), timeout, node);
}

inline void expect_usable(Communicator& group) {
  std::vector<std::int64_t> words = {1, group.rank()};
  group.all_reduce_sum(words);
  EXPECT_EQ(words[0], group.size());
  EXPECT_EQ(words[1], group.size() * (group.size() - 1) / 2);
}

inline void expect_broken(Communicator& group, const std::string& part) {
  std::vector<std::int64_t> words = {1};
  const std::string text = thrown_text<PeerLost>([&] { group.all_reduce_sum(words); });
  EXPECT_TRUE(contains(text, part)) << text;
  EXPECT_EQ(words[0], 1);
}

}  // namespace syncbn
