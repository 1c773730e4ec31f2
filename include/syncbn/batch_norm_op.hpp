// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "syncbn/communicator.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/export.h"
#include "syncbn/tensor.hpp"

/// Batch normalization as one operator for graph engines. It has inputs, outputs, and attributes
/// that do not change. Training and inference are two operators that share their variables
/// (docs/forked_graph.md). There are three differences from batch_norm.hpp: `momentum` is the share
/// that the old estimate keeps, the first batch replaces the estimates, and the variance is biased
/// everywhere.
namespace syncbn {

struct BatchNormOpAttributes {
  bool is_infer = false;        ///< use the given estimates; no exchange or update
  bool use_global_est = false;  ///< in training, use the updated estimates
  double epsilon = 1e-6;        ///< finite, not negative
  double momentum = 0.99;       ///< in [0, 1]
  /// The caller's number for this layer, the same on all ranks. By this number the ranks tell the
  /// layer from other layers of its shape. With several ranks it must not be 0.
  std::uint64_t layer = 0;
};

/// x has shape (N, C, spatial...). The estimates have C entries of any dtype. So have scale and
/// bias; without them they are 1 and 0. `batches` is the number of batches that the estimates hold.
/// If it is 0, the batch replaces the estimates.
struct BatchNormOpInputs {
  TensorView x = {};
  TensorView estimated_mean = {};
  TensorView estimated_var = {};
  TensorView scale = {};
  TensorView bias = {};
  std::int64_t batches = 0;
};

/// y is like x. batch_mean and batch_var have C entries of any dtype, or are absent. saved_mean,
/// saved_var and saved_batches receive the updated estimates and counter; in inference they receive
/// the given ones. These three are never absent, and may be the memory of the estimates.
struct BatchNormOpOutputs {
  MutableTensorView y = {};
  MutableTensorView batch_mean = {};
  MutableTensorView batch_var = {};
  MutableTensorView saved_mean = {};
  MutableTensorView saved_var = {};
  std::int64_t* saved_batches = nullptr;
};

/// The statistics that y was normalized with.
struct BatchNormOpStatistics {
  std::vector<double> mean;
  std::vector<double> var;  ///< biased
  std::vector<double> rstd;
  std::int64_t count = 0;         ///< elements per channel over all ranks
  std::uint32_t fingerprint = 0;  ///< of the call, for the backward
};

/// Computes y = (x - mean) / sqrt(var + epsilon) * scale + bias.
///
/// In training mean and var come from the batch over all ranks, or are the updated estimates. Each
/// estimate becomes momentum * estimate + (1 - momentum) * batch value, or the batch value if
/// inputs.batches is 0. A batch without elements changes no estimate. There is one exchange.
///
/// In inference mean and var are the given estimates. They are also written to batch_* and saved_*.
/// There is no exchange.
///
/// Returns the statistics that y was normalized with; batch_norm_op_backward takes them. Throws as
/// BatchNorm::forward does, and then changes nothing.
SYNCBN_API BatchNormOpStatistics batch_norm_op(const BatchNormOpInputs& inputs,
                                               const BatchNormOpOutputs& outputs,
                                               const BatchNormOpAttributes& attributes,
                                               Communicator& communicator,
                                               const Execution& execution);

/// x and scale are those of the forward. dx is like x, or absent. dscale and dbias have C entries,
/// or are absent; they receive the sums over this rank's samples.
struct BatchNormOpGradients {
  TensorView dy = {};
  TensorView x = {};
  TensorView scale = {};
  MutableTensorView dx = {};
  MutableTensorView dscale = {};
  MutableTensorView dbias = {};
};

/// Computes the gradients. Statistics of the batch depend on x, so there is one exchange unless dx
/// is absent. Estimates (is_infer, use_global_est) are constants: dx = scale * rstd * dy, without
/// an exchange. Throws as the forward does.
SYNCBN_API void batch_norm_op_backward(const BatchNormOpGradients& gradients,
                                       const BatchNormOpStatistics& statistics,
                                       const BatchNormOpAttributes& attributes,
                                       Communicator& communicator, const Execution& execution);

}  // namespace syncbn
