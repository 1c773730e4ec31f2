// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "syncbn/export.hpp"
#include "syncbn/tensor.hpp"

/// What ranks send, for those who own the exchange themselves: int64 words, of which any SUM
/// all-reduce makes those of the group (docs/numerics.md, section 2).
namespace syncbn {

/// Words in front of the channels' words: count, fingerprint, its square, flags, who takes part in
/// backward, and three that are 0.
inline constexpr int kHeaderWords = 8;
/// Where a message says that ranks refused their input.
inline constexpr int kHeaderFlags = 3;
inline constexpr std::int64_t kRejected = 1;
/// Where a forward's message says who takes part in backward, for the caller: the core writes what
/// it is given and reads nothing.
inline constexpr int kHeaderBackward = 4;

/// kHeaderWords, and for each channel 6 words (float16), 19 (bfloat16, float32) or 83 (float64).
SYNCBN_API std::int64_t message_words(DType dtype, std::int64_t channels);

/// What the header of a summed message says.
struct MessageInfo {
  std::int64_t count = 0;     ///< elements per channel over all ranks
  bool agree = false;         ///< all fingerprints equal, at most one dtype among ranks with data
  bool any_rejected = false;  ///< a rank could not take part (its input was refused)
  bool any_data = false;      ///< at least one rank had samples; dtype is then set
  DType dtype = DType::kFloat32;  ///< of the ranks with data
};

/// Reads the header of a message summed over `ranks` ranks.
SYNCBN_API MessageInfo read_header(const std::int64_t* merged, int ranks);

/// Throws DivergenceError unless all ranks agree, InvalidArgument when the count is beyond
/// kMaxCount.
SYNCBN_API void check_header(const MessageInfo& info);

/// A header that says that this rank's input was refused, so that the other ranks learn of it at
/// once. message: kHeaderWords words.
inline void rejection_header(std::int64_t* message) {
  std::fill_n(message, kHeaderWords, 0);
  message[kHeaderFlags] = kRejected;
}

}  // namespace syncbn
