// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>

#include "syncbn/communicator.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/export.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/tensor.hpp"

// Whole directions of a rank of a group, for those who own the exchange themselves. Where it pays,
// sums of some channels are taken while those before them are on their way to the other ranks, and
// the output of others on its way to memory. Bits are those of the passes one by one. CPU tensors.
namespace syncbn {

/// The exchange of one direction.
struct GroupSum {
  SumInParts* sum = nullptr;
  bool in_parts = true;  ///< whether parts travel while others are computed
  int ranks = 1;
  /// This rank's message and the sum of all, message_words(x.dtype, C) words each.
  std::span<std::int64_t> message = {};
  std::span<std::int64_t> merged = {};
  std::uint32_t fingerprint = 0;
  std::int64_t backward = 0;  ///< the header's word about backward
  /// What else a merged header has to be to go on, besides usable; may be empty.
  std::function<bool(const MessageInfo& info)> accept = {};
  std::chrono::milliseconds slice = std::chrono::hours(1);  ///< of a wait
  MessageInfo info = {};                                    ///< given back: of the merged header
};

enum class Reached : std::uint8_t {
  kOutput,     ///< all outputs are there
  kExchange,   ///< `merged` is there, and was not accepted
  kPublished,  ///< a slice ended; all of `message` is published, and the sum goes on
};

/// local_moments, the sum, finalize_moments and normalize in one. Until kOutput mean, var, rstd, y
/// and activation_mask hold anything; y may be x. Throws what the sum throws; after another error
/// the caller has to abandon the group unless the sum is complete.
SYNCBN_API Reached forward_in_group(const ForwardPass& pass, GroupSum& group,
                                    const Execution& execution);

/// local_gradients, the sum, finalize_gradients (or, where `share`, affine_gradient_shares) and
/// input_gradient in one.
SYNCBN_API Reached backward_in_group(const BackwardPass& pass, GroupSum& group,
                                     const Execution& execution);

}  // namespace syncbn
