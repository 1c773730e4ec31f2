// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_nodes.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"

namespace syncbn {

MpiNodes::MpiNodes(std::unique_ptr<SharedMemoryGroup> node, std::unique_ptr<MpiExchange> between,
                   int rank, int size, std::chrono::milliseconds timeout)
    : node_(std::move(node)),
      between_(std::move(between)),
      rank_(rank),
      size_(size),
      timeout_(timeout) {}

/// In the node, between the nodes' first ranks, and from each of them to its node.
void MpiNodes::all_reduce_sum(std::span<std::int64_t> words) {
  std::vector<std::int64_t> sum(words.begin(), words.end());  // words stay as they are at an error
  node_->set_timeout(timeout_);
  try {
    node_->all_reduce_sum(sum);
  } catch (const Error& error) {
    if (between_ != nullptr) {
      between_->fail(error, node_->broken());
    }
    throw;
  }
  const std::string who = rank_of(rank_, static_cast<std::size_t>(size_));
  detail::Failure outcome{};  // without a kind if it was well between the nodes
  if (between_ != nullptr) {
    try {
      between_->all_reduce_sum(sum);
    } catch (const Error& error) {
      outcome = detail::Failure::of(error, who);
    }
  }
  shared_.assign(detail::kFailureWords + sum.size(), 0);
  const auto result = shared_.begin() + static_cast<std::ptrdiff_t>(detail::kFailureWords);
  if (between_ != nullptr) {
    std::memcpy(shared_.data(), &outcome, sizeof(outcome));
    std::copy(sum.begin(), sum.end(), result);
  }
  // The first rank waits between nodes, with twice the time limit.
  node_->set_timeout((2 * MpiExchange::kLimits + 1) * timeout_);
  node_->all_reduce_sum(shared_);  // the others bring zeros
  std::memcpy(&outcome, shared_.data(), sizeof(outcome));
  if (outcome.kind != detail::Failure::Kind::kNone) {
    outcome.raise(who);
  }
  std::copy(result, shared_.end(), words.begin());
}

void MpiNodes::abandon(const std::string& reason) {
  node_->abandon(reason);
  if (between_ != nullptr) {
    between_->abandon(reason);
  }
}

void MpiNodes::refuse(const std::string& reason) {
  node_->refuse(reason);
  if (between_ != nullptr) {
    between_->refuse(reason);
  }
}

}  // namespace syncbn
