// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/torch/tensors.hpp"

// In the place of the header of the same name: no device, no stream.
namespace syncbn::torch_layer {

class OnDevice {
 public:
  template <class... Tensors>
  explicit OnDevice(const Tensor&, const Tensors&...) {}
  static void* stream() { return nullptr; }
};

}  // namespace syncbn::torch_layer
