// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "syncbn/cuda_passes.hpp"
#include "syncbn/export.hpp"

/// The exchange of ranks on one node, on their devices: one kernel brings a message into the memory
/// of all peers, waits for theirs, and finalizes. No other kernel waits, and this one is small, so
/// that the kernels of other libraries that wait for peers, too, find room beside it.
namespace syncbn::cuda {

inline constexpr int kMostPeers = 16;
inline constexpr int kMostExchangeBlocks = 8;

/// Words that a rank's device keeps from one exchange to the next; zero when the ranks meet.
inline constexpr std::int64_t kPeerStateWords = kMostExchangeBlocks + 2;

/// Words of the mark, where a failed exchange says why: memory of the host that the device can
/// write, zero when the ranks meet. First what the rank's abort word held, then for each rank the
/// epoch for which it did not come in time.
inline constexpr int kMarkGaveUp = 0;
inline constexpr int kMarkMissing = 1;
inline constexpr std::int64_t kPeerMarkWords = 1 + kMostPeers;

/// What an abort word holds: zero, who gave up first (1 + rank), or what a host has put there. It
/// lies in its rank's memory at this word, and ends all exchanges of that rank: outputs are NaN,
/// running statistics stay, and the ranks have to meet anew.
inline constexpr std::int64_t kAbortWord = kMostExchangeBlocks * kMostPeers;
inline constexpr std::int64_t kSlotsBegin = kAbortWord + kMostPeers;

/// What the ranks of a group agreed on when they met, and what they gave each other.
struct PeerGroup {
  int rank = 0;
  int ranks = 1;
  int blocks = 1;  ///< of the kernel, which has to fit on every rank, all of them at once
  std::int64_t slot_words = 0;  ///< of one block's part of a message, at least kLeastSlotWords
  std::int64_t timeout = 0;     ///< nanoseconds that an exchange waits for peers
  std::int64_t* memory[kMostPeers] = {};  ///< memory_words() of each rank, zero when they meet
  std::int64_t* state = nullptr;
  std::int64_t* mark = nullptr;

  constexpr std::int64_t memory_words() const {
    return kSlotsBegin + 2 * std::int64_t{ranks} * blocks * slot_words;
  }
};
inline constexpr std::int64_t kLeastSlotWords = 96;

/// Loads the kernels on the current device, before the ranks' first exchange. Throws Unavailable
/// where so many blocks of them do not run at once.
SYNCBN_API void load_peer_exchange(DType dtype, int blocks);

/// finalize_moments() with a momentum or without, of the sum of all ranks' messages. message: this
/// rank's, as local_moments wrote it, or with a rank that refuses its input no more than a header,
/// for no channels. Ranks whose calls differ get NaN and info as after an exchange over NCCL, also
/// where their messages have different lengths.
///
/// All exchanges of a group come in the same order on all ranks, and on a rank one after the other.
SYNCBN_API void exchange_moments(const std::int64_t* message, DType dtype, const PeerGroup& group,
                                 double* mean, double* var, double* rstd, std::int64_t* info,
                                 std::int64_t channels, double eps,
                                 const RunningStatistics& running, std::optional<double> momentum,
                                 const Stream& stream);

/// finalize_gradients() of the sum of all ranks' messages. share: dweight and dbias are this rank's
/// own. They are NaN with the coefficients.
SYNCBN_API void exchange_gradients(const std::int64_t* message, DType dtype, const PeerGroup& group,
                                   bool share, const std::int64_t* info, const double* mean,
                                   const double* rstd, const TensorView& weight,
                                   double* coefficients, const MutableTensorView& dweight,
                                   const MutableTensorView& dbias, std::int64_t channels,
                                   const Stream& stream);

/// The sum of all ranks' messages, in place of this rank's; what is finalized or used otherwise
/// later. Its digits may be negative, or need carries, as those of any sum of messages. Other ranks
/// may be in one of the functions above with the same call. If the exchange fails, or the calls
/// differ, its header is one that finalize_moments and finalize_gradients refuse.
SYNCBN_API void exchange_sums(std::int64_t* message, DType dtype, const PeerGroup& group,
                              std::int64_t channels, const Stream& stream);

}  // namespace syncbn::cuda
