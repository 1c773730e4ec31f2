// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "syncbn/tensor.hpp"

// In the place of the header of the same name: all tensors pass for tensors on CUDA.
namespace syncbn::torch_layer {

inline Device device_of(const char*, const torch::stable::Tensor&) { return Device::kCuda; }

}  // namespace syncbn::torch_layer
