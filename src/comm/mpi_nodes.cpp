// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_nodes.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

/// What the first rank of a node tells the others after an exchange between nodes: kGo, or the
/// type of an error.
using Outcome = Failure;
constexpr std::size_t kOutcomeWords = sizeof(Outcome) / sizeof(std::int64_t);

Outcome outcome_of(const Error& error) {
  Answer type = Answer::kLost;
  if (dynamic_cast<const DivergenceError*>(&error) != nullptr) {
    type = Answer::kDivergence;
  } else if (dynamic_cast<const ExchangeTimeout*>(&error) != nullptr) {
    type = Answer::kTimeout;
  }
  Outcome outcome{};
  outcome.set(type, error.what(), error.ranks());
  return outcome;
}

[[noreturn]] void raise(const Outcome& outcome, const std::string& first, const std::string& who) {
  std::string text = outcome.text.data();
  if (text.starts_with(first)) {
    text.replace(0, first.size(), who);
  }
  switch (outcome.answer) {
    case Answer::kDivergence:
      throw DivergenceError(text, outcome.about.list());
    case Answer::kTimeout:
      throw ExchangeTimeout(text, outcome.about.list());
    default:
      throw PeerLost(text, outcome.about.list());
  }
}

}  // namespace

MpiNodes::MpiNodes(std::unique_ptr<SharedMemoryGroup> node, std::unique_ptr<MpiExchange> between,
                   std::vector<std::vector<int>> ranks, int rank, int size,
                   std::chrono::milliseconds timeout)
    : node_(std::move(node)),
      between_(std::move(between)),
      ranks_(std::move(ranks)),
      rank_(rank),
      size_(size),
      timeout_(timeout) {
  for (const std::vector<int>& on_node : ranks_) {
    if (std::find(on_node.begin(), on_node.end(), rank) != on_node.end()) {
      first_ = on_node.front();
    }
  }
}

/// In the node, between the nodes' first ranks, and from each of them to its node.
void MpiNodes::all_reduce_sum(std::span<std::int64_t> words) {
  std::vector<std::int64_t> sum(words.begin(), words.end());  // words stay as they are at an error
  node_->set_timeout(timeout_);
  try {
    node_->all_reduce_sum(sum);
  } catch (const Error& error) {
    if (between_ != nullptr) {
      between_->fail(error);
    }
    throw;
  }
  Outcome outcome{};
  if (between_ != nullptr) {
    try {
      between_->all_reduce_sum(sum);
      outcome.answer = Answer::kGo;
    } catch (const Error& error) {
      outcome = outcome_of(error);
    }
  }
  shared_.assign(kOutcomeWords + sum.size(), 0);
  const auto result = shared_.begin() + static_cast<std::ptrdiff_t>(kOutcomeWords);
  if (between_ != nullptr) {
    std::memcpy(shared_.data(), &outcome, sizeof(outcome));
    std::copy(sum.begin(), sum.end(), result);
  }
  // The first rank waits between nodes, with twice the time limit.
  node_->set_timeout((2 * MpiMeeting::limits(static_cast<int>(ranks_.size())) + 1) * timeout_);
  node_->all_reduce_sum(shared_);  // the others bring zeros
  std::memcpy(&outcome, shared_.data(), sizeof(outcome));
  if (outcome.answer != Answer::kGo) {
    const auto ranks = static_cast<std::size_t>(size_);
    raise(outcome, rank_of(first_, ranks), rank_of(rank_, ranks));
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
