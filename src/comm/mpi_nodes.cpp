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

/// within: sums or gathers in the node. across: likewise between the nodes' first ranks, into
/// `result`, which all ranks of the node then get.
template <class Within, class Across>
void MpiNodes::exchange(std::span<std::byte> result, const Within& within, const Across& across) {
  node_->set_timeout(timeout_);
  try {
    within();
  } catch (const Error& error) {
    if (between_ != nullptr) {
      between_->fail(error);
    }
    throw;
  }
  Outcome outcome{};
  if (between_ != nullptr) {
    try {
      across();
      outcome.answer = Answer::kGo;
    } catch (const Error& error) {
      outcome = outcome_of(error);
    }
  }
  shared_.assign(kOutcomeWords + (result.size() + 7) / 8, 0);
  std::int64_t* const words = shared_.data() + kOutcomeWords;
  if (between_ != nullptr) {
    std::memcpy(shared_.data(), &outcome, sizeof(outcome));
    std::copy(result.begin(), result.end(), reinterpret_cast<std::byte*>(words));
  }
  // The first rank waits between nodes, with twice the time limit.
  node_->set_timeout((2 * MpiMeeting::limits(static_cast<int>(ranks_.size())) + 1) * timeout_);
  node_->all_reduce_sum(shared_);  // the others bring zeros
  std::memcpy(&outcome, shared_.data(), sizeof(outcome));
  if (outcome.answer != Answer::kGo) {
    const auto ranks = static_cast<std::size_t>(size_);
    raise(outcome, rank_of(first_, ranks), rank_of(rank_, ranks));
  }
  const auto* from = reinterpret_cast<const std::byte*>(words);
  std::copy(from, from + result.size(), result.begin());
}

void MpiNodes::all_reduce_sum(std::span<std::int64_t> words) {
  std::vector<std::int64_t> sum(words.begin(), words.end());  // words stay as they are at an error
  exchange(
      std::as_writable_bytes(std::span(sum)), [&] { node_->all_reduce_sum(sum); },
      [&] { between_->all_reduce_sum(sum); });
  std::copy(sum.begin(), sum.end(), words.begin());
}

void MpiNodes::all_gather(std::span<const std::byte> in, std::span<std::byte> out) {
  const std::size_t length = in.size();
  if (out.size() != length * static_cast<std::size_t>(size_)) {
    const std::string reason =
        gather_size_text(out.size(), length * static_cast<std::size_t>(size_));
    refuse(reason);
    throw InvalidArgument(reason);
  }
  const auto of_node = static_cast<std::size_t>(node_->size());
  std::size_t most = 0;  // ranks of a node
  for (const std::vector<int>& on_node : ranks_) {
    most = std::max(most, on_node.size());
  }
  std::vector<std::byte> mine(most * length);
  std::vector<std::byte> all(out.size());
  exchange(
      all, [&] { node_->all_gather(in, std::span(mine).first(of_node * length)); },
      [&] {
        std::vector<std::byte> padded(ranks_.size() * mine.size());
        between_->all_gather(mine, padded);
        for (std::size_t n = 0; n < ranks_.size(); ++n) {
          for (std::size_t i = 0; i < ranks_[n].size(); ++i) {
            const std::byte* from = padded.data() + (n * most + i) * length;
            std::copy(from, from + length,
                      all.data() + static_cast<std::size_t>(ranks_[n][i]) * length);
          }
        }
      });
  std::copy(all.begin(), all.end(), out.begin());
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
