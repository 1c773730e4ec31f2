// SPDX-License-Identifier: Apache-2.0
#pragma once

// A training step and an evaluation of a layer, on CPU and on CUDA, and what both must have in
// common.

#include <cstdint>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

namespace syncbn::testing {

/// What all ranks have in common.
struct LayerCase {
  DType dtype = DType::kFloat32;
  std::int64_t channels = 1;
  std::vector<std::int64_t> spatial;
  BatchNorm::Options options{.name = "layer"};  ///< but for its channels
  bool residual = false;
  bool mask = false;
  bool running = true;
  AffineGradients which = AffineGradients::kShare;
  int steps = 1;  ///< of one layer, on the same tensors
};

/// Makes a step with `samples` of each rank, on CPU and on CUDA, from the same random values and
/// layouts. Expects equal bits of all results on all ranks, and gaps untouched.
void compare_layers(const LayerCase& c, const std::vector<std::int64_t>& samples, Random& random);

}  // namespace syncbn::testing
