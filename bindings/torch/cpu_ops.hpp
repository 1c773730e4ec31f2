// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>

#include "syncbn/group_passes.hpp"
#include "syncbn/tensor.hpp"

// Parts of operators on CPU that others are made of, too.
namespace syncbn::torch_layer {

using torch::stable::Tensor;

/// What an exchange has come to. kUnchecked: it is complete, and what follows is left to the
/// caller. kNoMemory: this rank lacked memory, and has left the group.
enum Status : std::int64_t { kDone, kPending, kTimeout, kLost, kDiverged, kUnchecked, kNoMemory };

/// Runs a whole direction over the group of that number, whose sum is that of `message`. Its
/// Status; kDone if the output is there. An error before the exchange is thrown.
std::int64_t run_in_group(std::int64_t handle, const Tensor& message, const Tensor& merged,
                          const std::function<Reached(SumInParts&)>& direction);

/// How many ranks that group has.
int ranks_of_group(std::int64_t handle);

/// A message of at least `frame` words: zeros follow the channels' words.
Tensor new_message(const Tensor& x, DType dtype, std::int64_t channels, std::int64_t frame);

/// What training updates besides its output: running statistics and counters, each may be absent.
class Updates {
 public:
  /// Checks them. momentum: empty for cumulative averaging.
  Updates(std::optional<Tensor>& running_mean, std::optional<Tensor>& running_var,
          std::optional<Tensor>& num_batches_tracked, std::optional<Tensor>& call,
          std::optional<double> momentum);

  /// count: elements per channel over all ranks; 0 leaves all but `call` as they are.
  void apply(const double* mean, const double* var, std::int64_t channels, std::int64_t count);

  MutableTensorView running_mean, running_var;
  std::int64_t* num_batches_tracked;

 private:
  std::int64_t* call_;
  std::optional<double> momentum_;
};

}  // namespace syncbn::torch_layer
