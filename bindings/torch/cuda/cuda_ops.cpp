// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <optional>

#include "bindings/torch/cuda/on_device.hpp"
#include "bindings/torch/step_ops.hpp"

// The operators on CUDA: on PyTorch's current stream, with memory of PyTorch's allocator. The host
// reads nothing, so `header` does not exist here: messages have no frame, and merged ones lie in
// one piece of exactly the group's length.
namespace syncbn::torch_layer {
namespace {

/// Scratch memory of one pass, zero: the stream's, or, in a captured graph, the call's own.
class Workspace {
 public:
  Workspace(const Tensor& x, DType dtype, void* stream)
      : words_(stream_workspace(dtype, channels_of(x), stream)) {
    if (words_ == nullptr) {
      const std::array<std::int64_t, 1> size{workspace_words(dtype, channels_of(x))};
      own_ = torch::stable::new_zeros(x, size, ScalarType::Long);
      words_ = int64_data("workspace", *own_, 0, Device::kCuda);
    }
  }
  std::int64_t* words() const { return words_; }

 private:
  std::int64_t* words_;
  std::optional<Tensor> own_;
};

/// Tensors of one device, and the caller's stream there.
class OnCuda : public OnDevice {
 public:
  static constexpr Device kDevice = Device::kCuda;
  using OnDevice::OnDevice;

  Execution execution() const { return Execution::on_stream(stream()); }
  Workspace workspace(const Tensor& x, DType dtype) const { return {x, dtype, stream()}; }
};

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  syncbn::torch_layer::register_step<syncbn::torch_layer::OnCuda>(m);
}
