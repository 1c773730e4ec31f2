// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "comm/rank_set.hpp"
#include "syncbn/error.hpp"

namespace syncbn::detail {

/// Why a rank brings nothing to an exchange, or why an exchange failed, as words that ranks can
/// hand to one another.
struct Failure {
  enum class Kind : std::int64_t { kNone, kDivergence, kRefused, kTimeout, kLost };

  Kind kind;
  std::int64_t words;  ///< without a failure: of the rank's message
  RankSet about;
  std::array<char, 1024> text;

  static Failure of(Kind kind, const std::string& from, const std::vector<int>& ranks) {
    Failure failure{};
    failure.kind = kind;
    failure.about = RankSet::of(ranks);
    from.copy(failure.text.data(), failure.text.size() - 1);
    return failure;
  }

  /// Of an error of a rank that is called `who`.
  static Failure of(const Error& error, const std::string& who) {
    Kind kind = Kind::kLost;
    if (error.kind() == ErrorKind::kDivergence) {
      kind = Kind::kDivergence;
    } else if (error.kind() == ErrorKind::kTimeout) {
      kind = Kind::kTimeout;
    }
    const std::string text = error.what();
    return of(kind, text.substr(text.starts_with(who) ? who.size() : 0), error.ranks());
  }

  /// As the error of a rank that is called `who`.
  [[noreturn]] void raise(const std::string& who) const {
    switch (kind) {
      case Kind::kDivergence:
        throw DivergenceError(text.data(), about.list());
      case Kind::kTimeout:
        throw ExchangeTimeout(who + text.data(), about.list());
      default:
        throw PeerLost(who + text.data(), about.list());
    }
  }
};

inline constexpr std::size_t kFailureWords = sizeof(Failure) / sizeof(std::int64_t);

}  // namespace syncbn::detail
