// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "syncbn/export.h"
#include "syncbn/tensor.hpp"

/// The messages of ranks, for callers with an exchange of their own. A message is int64 words. Any
/// SUM all-reduce of the ranks' messages gives the group's message (docs/numerics.md, section 2).
namespace syncbn {

/// The number of words in the header, before the words of the channels. The header has the count,
/// the fingerprint, its square, the flags, the ranks that take part in the backward, and three
/// zeros.
inline constexpr int kHeaderWords = 8;
/// The index of the flags. Here a message says that ranks refused their input.
inline constexpr int kHeaderFlags = 3;
inline constexpr std::int64_t kRejected = 1;
/// The index of the word that says which ranks take part in the backward. It is for the caller: the
/// core writes the word that a forward gives it (ForwardStep::backward), and never reads it.
inline constexpr int kHeaderBackward = 4;

/// Returns the number of words of a message: kHeaderWords, and for each channel 6 (float16), 19
/// (bfloat16, float32) or 83 (float64).
SYNCBN_API std::int64_t message_words(DType dtype, std::int64_t channels);

/// The content of the header of a summed message.
struct MessageInfo {
  std::int64_t count = 0;     ///< elements per channel over all ranks
  bool agree = false;         ///< equal fingerprints, at most one dtype among ranks with samples
  bool any_rejected = false;  ///< a rank's input was refused, so that rank takes no part
  bool any_data = false;      ///< at least one rank had samples, and dtype is set
  DType dtype = DType::kFloat32;  ///< of the ranks with samples
};

/// Reads the header of a message that was summed over `ranks` ranks.
SYNCBN_API MessageInfo read_header(const std::int64_t* merged, int ranks);

/// Throws DivergenceError if a rank's input was refused or the ranks do not agree, and
/// InvalidArgument if the count is larger than kMaxCount.
SYNCBN_API void check_header(const MessageInfo& info);

/// Writes a header that says that this rank's input was refused, so that the other ranks learn of
/// it at once. message: kHeaderWords words.
inline void rejection_header(std::int64_t* message) {
  std::fill_n(message, kHeaderWords, 0);
  message[kHeaderFlags] = kRejected;
}

}  // namespace syncbn
