// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "bindings/torch/outputs.hpp"
#include "syncbn/step.hpp"

// How far a direction goes, and its messages.
namespace syncbn::torch_layer {

/// How far begin goes, where it is not given the number of a group in shared memory (0 and more),
/// whose exchange it makes as well.
enum Way : std::int64_t {
  kAlone = -1,    ///< to the end: there is one rank
  kMessage = -2,  ///< the message, and room for the outputs
  kFramed = -3,   ///< as kMessage; the message has kFrameWords words at least
  kOwn = -4,      ///< of a backward without an exchange: the message, and no room for dx
};

/// Words of the first message of an exchange over Gloo, the same for every call of the group: Gloo
/// ends the process when ranks bring different lengths, so lengths may differ only after the first
/// message has shown that the calls agree. 512 channels of float32 fit.
inline constexpr std::int64_t kFrameWords = kHeaderWords + 512 * 19;

/// How long an operator waits in shared memory before Python looks for signals.
inline constexpr std::chrono::milliseconds kSlice{50};

/// What a direction has come to. kUnchecked: what follows is left to the caller; the exchange, if
/// there was one, is complete. kNoMemory: this rank lacked memory, and has left the group.
enum Status : std::int64_t { kDone, kPending, kTimeout, kLost, kDiverged, kUnchecked, kNoMemory };

/// Runs a whole direction over the group of that number, whose sum is that of `message`. Its
/// Status; kDone if the output is there. An error before the exchange is thrown.
std::int64_t run_in_group(std::int64_t handle, const Tensor& message, const Tensor& merged,
                          const std::function<Reached(SumInParts&)>& direction);

/// How many ranks that group has.
int ranks_of_group(std::int64_t handle);

inline std::span<std::int64_t> words_of(Tensor& tensor, Device device = Device::kCpu) {
  return {int64_data("message", tensor, kHeaderWords, device),
          static_cast<std::size_t>(tensor.numel())};
}

/// A message of so many words, which on the CPU way kFramed makes longer: zeros follow those of the
/// channels.
inline Tensor new_message(const Tensor& x, std::int64_t words, std::int64_t way) {
  const bool framed = way == kFramed && device_of("x", x) == Device::kCpu;
  Tensor message = empty(x, framed ? std::max(kFrameWords, words) : words, ScalarType::Long);
  if (message.numel() > words) {
    const std::span<std::int64_t> all = words_of(message);
    std::fill(all.begin() + words, all.end(), 0);
  }
  return message;
}

/// What ended a direction in shared memory: the sums, and this rank's message where it did not come
/// to its end.
struct InGroup {
  std::optional<Tensor> message, merged;
  std::int64_t status = kDone;
  std::int64_t backward = 0;  ///< the merged header's word

  /// direction(GroupSum): the rest of it.
  template <class Direction>
  InGroup(const Tensor& x, std::int64_t handle, GroupSum group, const Direction& direction)
      : message(new_message(x, message_words(dtype_of("x", x), channels_of(x)), kMessage)),
        merged(empty(x, message->numel(), ScalarType::Long)) {
    group.message = words_of(*message);
    group.merged = words_of(*merged);
    group.slice = kSlice;
    group.ranks = ranks_of_group(handle);
    status = run_in_group(handle, *message, *merged, [&](SumInParts& sum) {
      group.sum = &sum;
      return direction(group);
    });
    backward = group.merged[kHeaderBackward];
    if (status == kDone) {
      message.reset();
    }
  }
};

}  // namespace syncbn::torch_layer
