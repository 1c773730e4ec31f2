// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "syncbn/communicator.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/export.hpp"
#include "syncbn/tensor.hpp"

/// Batch normalization as one operator for graph engines: inputs, outputs and attributes that do
/// not change. Training and inference are two operators that share their variables
/// (docs/forked_graph.md). Differences from batch_norm.hpp: `momentum` is the share that the old
/// estimate keeps, the first batch assigns, and the variance is biased everywhere.
namespace syncbn {

struct BatchNormOpAttributes {
  bool is_infer = false;        ///< normalize with the given estimates; no exchange, no update
  bool use_global_est = false;  ///< in training normalize with the updated estimates
  double epsilon = 1e-6;        ///< finite, not negative
  double momentum = 0.99;       ///< in [0, 1]
  /// The caller's number for this layer, the same on all ranks, by which they tell it from others
  /// of its shape. Among several ranks from 1 on.
  std::uint64_t layer = 0;
};

/// x: (N, C, spatial...). The estimates: C entries of any dtype. scale and bias: the same, or
/// absent (1 and 0). batches: how many batches the estimates hold; at 0 the batch is assigned.
struct BatchNormOpInputs {
  TensorView x = {};
  TensorView estimated_mean = {};
  TensorView estimated_var = {};
  TensorView scale = {};
  TensorView bias = {};
  std::int64_t batches = 0;
};

/// y: like x. batch_mean and batch_var: C entries of any dtype, or absent. saved_mean, saved_var
/// and saved_batches: the updated estimates and counter, in inference the given ones. They are
/// never absent, and may be the memory of the estimates.
struct BatchNormOpOutputs {
  MutableTensorView y = {};
  MutableTensorView batch_mean = {};
  MutableTensorView batch_var = {};
  MutableTensorView saved_mean = {};
  MutableTensorView saved_var = {};
  std::int64_t* saved_batches = nullptr;
};

/// Statistics that y was normalized with.
struct BatchNormOpStatistics {
  std::vector<double> mean;
  std::vector<double> var;  ///< biased
  std::vector<double> rstd;
  std::int64_t count = 0;  ///< elements per channel over all ranks
  std::uint32_t fingerprint = 0;
};

/// Training: estimate <- momentum * estimate + (1 - momentum) * batch value, or the batch value if
/// inputs.batches is 0; a batch without elements changes nothing. y = (x - mean) / sqrt(var +
/// epsilon) * scale + bias with mean and var of the batch over all ranks, or with the updated
/// estimates. One exchange. Inference: mean and var are the given estimates, and so are batch_* and
/// saved_*. No exchange.
/// Returns the statistics that y was normalized with, which backward takes.
/// Throws as BatchNorm::forward does; nothing is changed then.
SYNCBN_API BatchNormOpStatistics batch_norm_op(const BatchNormOpInputs& inputs,
                                               const BatchNormOpOutputs& outputs,
                                               const BatchNormOpAttributes& attributes,
                                               Communicator& communicator,
                                               const Execution& execution);

/// dx, like x or absent; dscale and dbias, C entries or absent, of this rank's samples. x, scale:
/// of the forward.
struct BatchNormOpGradients {
  TensorView dy = {};
  TensorView x = {};
  TensorView scale = {};
  MutableTensorView dx = {};
  MutableTensorView dscale = {};
  MutableTensorView dbias = {};
};

/// Statistics of the batch are functions of x: one exchange if dx is wanted. Estimates (is_infer,
/// use_global_est) are constants: dx = scale * rstd * dy, no exchange. Errors as for the forward.
SYNCBN_API void batch_norm_op_backward(const BatchNormOpGradients& gradients,
                                       const BatchNormOpStatistics& statistics,
                                       const BatchNormOpAttributes& attributes,
                                       Communicator& communicator, const Execution& execution);

}  // namespace syncbn
