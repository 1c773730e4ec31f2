// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/torch/tensors.hpp"
#include "syncbn/cuda_passes.hpp"

// In the place of the header of the same name: no device, no stream.
namespace syncbn::torch_layer {

class OnDevice {
 public:
  template <class... Tensors>
  explicit OnDevice(const Tensor&, const Tensors&...) {}
  const cuda::Stream& stream() const { return stream_; }

 private:
  cuda::Stream stream_;
};

}  // namespace syncbn::torch_layer
