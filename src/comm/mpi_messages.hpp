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

/// What a rank tells rank 0 before an exchange, or when it leaves. Small enough that MPI sends it
/// without waiting for the receiver.
struct Arrival {
  Kind kind;
  std::int64_t bytes;
  std::array<char, 512> reason;
};

/// What rank 0 answers.
struct Verdict {
  Answer answer;
  RankSet about;
  std::array<char, 1024> text;
};

constexpr int kArrivalTag = 1;
constexpr int kVerdictTag = 2;

template <std::size_t kSize>
void copy_text(std::array<char, kSize>& to, const std::string& from) {
  const std::size_t length = std::min(from.size(), kSize - 1);
  std::memcpy(to.data(), from.data(), length);
  to[length] = '\0';
}

}  // namespace syncbn
