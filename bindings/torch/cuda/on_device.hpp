// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdint>
#include <optional>
#include <string>

#include "bindings/torch/tensors.hpp"

namespace syncbn::torch_layer {

/// The device of one operator's tensors, current while this lives, and the caller's stream there.
/// The stream orders all work: whoever allocates and frees through PyTorch on it is safe.
class OnDevice {
 public:
  /// x names the device; the others, where they are there, must be on it too.
  template <class... Tensors>
  explicit OnDevice(const Tensor& x, const Tensors&... others)
      : index_(index_of(x)), guard_(index_) {
    (check(others), ...);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream_));
  }

  void* stream() const { return stream_; }

 private:
  void check(const Tensor& tensor) const {
    if (!tensor.is_cuda() || tensor.get_device_index() != index_) {
      throw InvalidArgument("got tensors on several devices, expected all of them on cuda:" +
                            std::to_string(index_));
    }
  }
  void check(const std::optional<Tensor>& tensor) const {
    if (tensor.has_value()) {
      check(*tensor);
    }
  }
  static torch::stable::accelerator::DeviceIndex index_of(const Tensor& x) {
    if (!x.is_cuda()) {
      throw InvalidArgument("x: got a tensor that is not on CUDA, expected all tensors on CUDA");
    }
    return static_cast<torch::stable::accelerator::DeviceIndex>(x.get_device_index());
  }

  torch::stable::accelerator::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace syncbn::torch_layer
