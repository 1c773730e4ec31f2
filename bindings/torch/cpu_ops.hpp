#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "syncbn/tensor.hpp"

// Parts of operators on CPU that others are made of, too.
namespace syncbn::torch_layer {

using torch::stable::Tensor;

/// What a wait for other ranks ended with. kUnchecked: the exchange is complete, and its header
/// says that the calls differ.
enum Status : std::int64_t { kDone, kPending, kTimeout, kLost, kDiverged, kUnchecked };

/// The sum of a message over the group of that number, and a Status.
std::tuple<Tensor, std::int64_t> sum_message(const Tensor& message, std::int64_t handle,
                                             std::int64_t slice);

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
