// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/torch/layer.hpp"
#include "bindings/torch/new_output.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/cuda_passes.hpp"

// Tensors on CUDA that operators are given, and that they make.
namespace syncbn::torch_layer {

inline std::int64_t* cuda_int64(const char* name, Tensor& tensor, std::int64_t at_least) {
  return int64_data(name, tensor, at_least, Device::kCuda);
}
inline const std::int64_t* cuda_int64(const char* name, const Tensor& tensor,
                                      std::int64_t at_least) {
  return int64_data(name, tensor, at_least, Device::kCuda);
}
inline const double* cuda_double(const char* name, const Tensor& tensor, std::int64_t size) {
  return double_data(name, tensor, size, Device::kCuda);
}

/// Scratch memory of one pass, zero: the stream's, or, in a captured graph, the call's own.
class Workspace {
 public:
  Workspace(const Tensor& x, DType dtype, const cuda::Stream& stream)
      : words_(cuda::stream_workspace(dtype, channels_of(x), stream)) {
    if (words_ == nullptr) {
      const std::array<std::int64_t, 1> size{cuda::workspace_words(dtype, channels_of(x))};
      own_ = torch::stable::new_zeros(x, size, ScalarType::Long);
      words_ = cuda_int64("workspace", *own_, 0);
    }
  }
  std::int64_t* words() const { return words_; }

 private:
  std::int64_t* words_;
  std::optional<Tensor> own_;
};

/// Zeros: what no element uses has to be equal from run to run as well.
inline Tensor new_zero_mask(const Tensor& x, bool wanted) {
  const std::array<std::int64_t, 1> bytes{wanted ? room_for_activation_mask(x) : 0};
  return torch::stable::new_zeros(x, bytes, ScalarType::Byte);
}

/// Room for the statistics of a batch.
struct DeviceStatistics {
  explicit DeviceStatistics(const Tensor& x)
      : mean(empty(x, channels_of(x), ScalarType::Double)),
        var(empty(x, channels_of(x), ScalarType::Double)),
        rstd(empty(x, channels_of(x), ScalarType::Double)),
        info(empty(x, cuda::kInfoWords, ScalarType::Long)) {}
  explicit DeviceStatistics(const std::vector<Tensor>& room)
      : mean(room[1]), var(room[2]), rstd(room[3]), info(room[4]) {}
  Tensor mean, var, rstd, info;
};

using Normalized = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// What a forward gives; the activation mask is empty unless backward needs it.
struct Outputs : DeviceStatistics {
  Outputs(const Tensor& x, bool with_activation_mask)
      : DeviceStatistics(x),
        y(new_output(x)),
        activation_mask(new_zero_mask(x, with_activation_mask)) {}
  /// room: what forward_outputs gave, or none.
  Outputs(const Room& room, const Tensor& x, const std::optional<Tensor>& residual,
          const Activation& activation)
      : Outputs(room.has_value() ? Outputs(*room)
                                 : Outputs(x, residual.has_value() &&
                                                  activation.kind != ActivationKind::kNone)) {}
  Tensor y, activation_mask;

 private:
  explicit Outputs(const std::vector<Tensor>& room)
      : DeviceStatistics(room), y(room[0]), activation_mask(room[5]) {}
};

inline std::int64_t* counter(const char* name, std::optional<Tensor>& tensor) {
  return tensor.has_value() ? cuda_int64(name, *tensor, 1) : nullptr;
}

inline cuda::RunningStatistics running_statistics(std::optional<Tensor>& mean,
                                                  std::optional<Tensor>& var,
                                                  std::optional<Tensor>& num_batches_tracked,
                                                  std::optional<Tensor>& call) {
  return {mutable_view("running_mean", mean), mutable_view("running_var", var),
          counter("num_batches_tracked", num_batches_tracked), counter("call", call)};
}

}  // namespace syncbn::torch_layer
