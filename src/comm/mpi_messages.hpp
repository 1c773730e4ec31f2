// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "comm/rank_set.hpp"

// What the ranks of a group over MPI tell each other around an exchange.
namespace syncbn {

enum class Kind : std::int64_t { kMissing, kSum, kRefused, kLeft };
enum class Answer : std::int64_t { kAsk, kGo, kDivergence, kRefused, kTimeout, kLost };

/// Why an exchange failed, as bytes that ranks can hand to one another.
struct Failure {
  Answer answer;  ///< kDivergence, kRefused, kTimeout or kLost
  RankSet about;
  std::array<char, 1024> text;

  void set(Answer what, const std::string& from, const std::vector<int>& ranks) {
    answer = what;
    about = RankSet::of(ranks);
    const std::size_t length = std::min(from.size(), text.size() - 1);
    std::memcpy(text.data(), from.data(), length);
    text[length] = '\0';
  }
};

/// What a rank tells the one above it before an exchange, for itself and the ranks below it, or
/// when it leaves. Small enough that MPI sends it without waiting for the receiver.
struct Arrival {
  Kind kind;  ///< of the rank itself
  std::int64_t bytes;
  RankSet odd;  ///< ranks below that bring something else, and what the first of them brings
  std::int64_t odd_rank = -1;
  std::int64_t odd_bytes = 0;
  Kind odd_kind = Kind::kMissing;
  Failure failure;  ///< of kRefused and kLeft

  bool has_odd() const { return odd_rank >= 0; }
};

/// What rank 0 answers.
using Verdict = Failure;

}  // namespace syncbn
