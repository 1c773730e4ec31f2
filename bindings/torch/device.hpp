// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "syncbn/error.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn::torch_layer {

/// Operators on CUDA are called as soon as one tensor is there; the core refuses a mixture.
inline Device device_of(const char* name, const torch::stable::Tensor& tensor) {
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    throw InvalidArgument(std::string(name) +
                          ": got a tensor on another device, expected the CPU or CUDA");
  }
  return tensor.is_cpu() ? Device::kCpu : Device::kCuda;
}

}  // namespace syncbn::torch_layer
