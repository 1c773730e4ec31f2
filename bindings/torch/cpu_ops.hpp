// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>

#include "syncbn/step.hpp"

// Parts of operators on CPU that others are made of, too.
namespace syncbn::torch_layer {

using torch::stable::Tensor;

/// What a direction has come to. kUnchecked: what follows is left to the caller; the exchange, if
/// there was one, is complete. kNoMemory: this rank lacked memory, and has left the group.
enum Status : std::int64_t { kDone, kPending, kTimeout, kLost, kDiverged, kUnchecked, kNoMemory };

/// Runs a whole direction over the group of that number, whose sum is that of `message`. Its
/// Status; kDone if the output is there. An error before the exchange is thrown.
std::int64_t run_in_group(std::int64_t handle, const Tensor& message, const Tensor& merged,
                          const std::function<Reached(SumInParts&)>& direction);

/// How many ranks that group has.
int ranks_of_group(std::int64_t handle);

}  // namespace syncbn::torch_layer
