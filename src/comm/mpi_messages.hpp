// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "comm/rank_set.hpp"

// What the ranks of a group over MPI and its rank 0 tell each other around an exchange.
namespace syncbn {

enum class Kind : std::int64_t { kMissing, kSum, kGather, kRefused, kLeft };
enum class Answer : std::int64_t { kAsk, kGo, kDivergence, kRefused, kTimeout, kLost };

/// Why an exchange failed, as bytes that ranks can hand to one another.
template <std::size_t kBytes>
struct Failure {
  Answer answer;  ///< kDivergence, kRefused, kTimeout or kLost
  RankSet about;
  std::array<char, kBytes> text;

  void set(Answer what, const std::string& from, const std::vector<int>& ranks) {
    answer = what;
    about = RankSet::of(ranks);
    const std::size_t length = std::min(from.size(), kBytes - 1);
    std::memcpy(text.data(), from.data(), length);
    text[length] = '\0';
  }
};

/// What a rank tells rank 0 before an exchange, or when it leaves. Small enough that MPI sends it
/// without waiting for the receiver.
struct Arrival {
  Kind kind;
  std::int64_t bytes;
  Failure<512> failure;  ///< of kRefused and kLeft
};

/// What rank 0 answers.
using Verdict = Failure<1024>;

}  // namespace syncbn
