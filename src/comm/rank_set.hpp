// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "syncbn/options.hpp"

namespace syncbn {

/// Ranks that an error is about, as bytes that ranks can hand to one another.
struct RankSet {
  std::array<std::uint64_t, kMaxRanks / 64> bits;

  static RankSet of(const std::vector<int>& ranks) {
    RankSet set{};
    for (const int rank : ranks) {
      set.bits[static_cast<std::size_t>(rank) / 64] |= std::uint64_t{1} << (rank % 64);
    }
    return set;
  }
  void add(const RankSet& others) {
    for (std::size_t i = 0; i < bits.size(); ++i) {
      bits[i] |= others.bits[i];
    }
  }
  void remove(const RankSet& others) {
    for (std::size_t i = 0; i < bits.size(); ++i) {
      bits[i] &= ~others.bits[i];
    }
  }
  std::vector<int> list() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      if ((bits[static_cast<std::size_t>(rank) / 64] >> (rank % 64) & 1) != 0) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }
};

}  // namespace syncbn
