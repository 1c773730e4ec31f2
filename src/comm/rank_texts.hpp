// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

// Words that the errors of all communicators share.
namespace syncbn {

/// "rank R of N: ", in front of every error.
inline std::string rank_of(int rank, std::size_t size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size) + ": ";
}

/// "rank 3" or "ranks 3, 5".
inline std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return text;
}

inline std::string missing_text(const std::vector<int>& ranks, std::chrono::milliseconds timeout) {
  return rank_list(ranks) + " did not come to the exchange within " +
         std::to_string(timeout.count()) + " ms";
}

inline std::string left_text(int rank, const std::string& reason) {
  return "rank " + std::to_string(rank) + " left the group: " + reason;
}

/// For all that comes after an error that broke the group.
inline std::string broken_text(const std::string& what) {
  return "the group is broken: " + what +
         "; call reset on every rank, or make a new group if a rank has ended";
}

inline std::string refused_text(int rank, const std::string& reason) {
  return "rank " + std::to_string(rank) + " refused its call: " + reason;
}

/// For a DivergenceError: rank `rank` and rank `other` brought different messages.
inline std::string divergence_text(int rank, std::size_t size, std::size_t bytes, int other,
                                   std::size_t other_bytes) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size) + " brought " +
         std::to_string(bytes) + " bytes to the exchange, rank " + std::to_string(other) +
         " brought " + std::to_string(other_bytes);
}

inline std::string size_text(std::size_t got, std::size_t expected) {
  return "out: got " + std::to_string(got) + " bytes, expected " + std::to_string(expected);
}

}  // namespace syncbn
