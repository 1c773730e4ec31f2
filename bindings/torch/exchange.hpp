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
  kInPlace = -3,  ///< the message, and no room for y
  kOwn = -4,      ///< of a backward without an exchange: the message, and no room for dx
  kNoted = -5,    ///< on the CPU as kAlone, and the sums are given back; on CUDA as kMessage
};

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

/// A message of at least `frame` words: zeros follow those of the channels.
inline Tensor new_message(const Tensor& x, std::int64_t words, std::int64_t frame) {
  const Device device = device_of("x", x);
  if (device == Device::kCuda) {  // whose messages have no frame
    frame = 0;
  }
  Tensor message = empty(x, std::max(checked_frame(frame), words), ScalarType::Long);
  if (message.numel() > words) {
    const std::span<std::int64_t> all = words_of(message);
    std::fill(all.begin() + words, all.end(), 0);
  }
  return message;
}

/// The sum over one rank: what it brings, which lies where the sum is looked for.
class OwnSum final : public SumInParts {
 public:
  void open(std::span<const std::int64_t>, std::span<std::int64_t>) override {}
  void publish(std::size_t) override {}
  bool wait(std::size_t, std::chrono::milliseconds) override { return true; }
};

/// What ended a direction in shared memory, or of one rank by kNoted; the sums, and this rank's
/// message where it did not come to its end.
struct InGroup {
  std::optional<Tensor> message, merged;
  std::int64_t status = kDone;
  MessageInfo info;
  std::int64_t backward = 0;  ///< the merged header's word

  /// direction(GroupSum): the rest of it.
  template <class Direction>
  InGroup(const Tensor& x, std::int64_t handle, std::int64_t slice, GroupSum group,
          const Direction& direction)
      : message(new_message(x, message_words(dtype_of("x", x), channels_of(x)), 0)),
        merged(handle == kNoted ? *message : empty(x, message->numel(), ScalarType::Long)) {
    const auto run = [&](SumInParts& sum) {
      group.sum = &sum;
      return direction(group);
    };
    group.message = words_of(*message);
    group.merged = words_of(*merged);
    group.slice = std::chrono::milliseconds(slice);
    if (handle == kNoted) {
      OwnSum own;
      status = run(own) == Reached::kOutput ? kDone : kUnchecked;
    } else {
      group.ranks = ranks_of_group(handle);
      status = run_in_group(handle, *message, *merged, run);
    }
    info = group.info;
    backward = group.merged[kHeaderBackward];
    if (status == kDone || handle == kNoted) {
      message.reset();
    }
  }
};

}  // namespace syncbn::torch_layer
