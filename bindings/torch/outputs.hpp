// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/torch/new_output.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/step.hpp"

// What the operators of a step make, and how they read what an earlier one made.
namespace syncbn::torch_layer {

inline std::int64_t channels_of(const Tensor& x) {
  if (x.dim() < 2) {
    throw InvalidArgument("x: got " + std::to_string(x.dim()) +
                          " axes, expected at least 2 (N, C, spatial...)");
  }
  return x.size(1);
}

/// The core's arrays of a tensor on x's device.
inline std::uint8_t* byte_data(std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->numel() > 0
             ? static_cast<std::uint8_t*>(tensor->mutable_data_ptr())
             : nullptr;
}
inline std::int64_t* optional_int64(const char* name, std::optional<Tensor>& tensor,
                                    Device device) {
  return tensor.has_value() ? int64_data(name, *tensor, 1, device) : nullptr;
}

/// What a forward knows of its batch: mean, var and rstd of C channels each, then two integers, as
/// ForwardStep::info has them. One float64 tensor of 3 C + kInfoWords entries, because each tensor
/// costs.
class Saved {
 public:
  explicit Saved(const Tensor& x) : Saved(empty(x, size_for(x), ScalarType::Double), x) {}
  Saved(Tensor given, const Tensor& x)
      : tensor(std::move(given)),
        channels_(channels_of(x)),
        data_(const_cast<double*>(double_data("saved", tensor, size_for(x), device_of("x", x)))) {}

  double* mean() const { return data_; }
  double* var() const { return data_ + channels_; }
  double* rstd() const { return data_ + 2 * channels_; }
  std::int64_t* info() const { return reinterpret_cast<std::int64_t*>(data_ + 3 * channels_); }

  Tensor tensor;

 private:
  static std::int64_t size_for(const Tensor& x) { return 3 * channels_of(x) + kInfoWords; }
  std::int64_t channels_;
  double* data_;
};

/// Room for the activation mask of any tensor of x's shape, whatever its layout, so that a shape
/// alone decides it.
inline std::int64_t room_for_activation_mask(const Tensor& x) {
  const std::int64_t samples = x.size(0);
  const std::int64_t channels = x.size(1);
  std::int64_t plane = 1;
  for (std::int64_t axis = 2; axis < x.dim(); ++axis) {
    plane *= x.size(axis);
  }
  return samples * std::max(channels * ((plane + 7) / 8), plane * ((channels + 7) / 8));
}

/// Zeros: what no element uses has to be equal from run to run as well.
inline Tensor new_activation_mask(const Tensor& x) {
  if (device_of("x", x) == Device::kCuda) {
    const std::array<std::int64_t, 1> bytes{room_for_activation_mask(x)};
    return torch::stable::new_zeros(x, bytes, ScalarType::Byte);
  }
  Tensor out = empty(x, room_for_activation_mask(x), ScalarType::Byte);
  std::fill_n(static_cast<std::uint8_t*>(out.mutable_data_ptr()), out.numel(), std::uint8_t{0});
  return out;
}

/// The arguments that say how dy comes back through the activation.
inline ActivationGradient through(const Tensor& x, const std::optional<Tensor>& weight,
                                  const std::optional<Tensor>& bias,
                                  const std::optional<Tensor>& activation_mask,
                                  const Activation& activation) {
  ActivationGradient out{activation, view("weight", weight), view("bias", bias)};
  if (activation_mask.has_value()) {
    if (activation_mask->scalar_type() != ScalarType::Byte || !activation_mask->is_contiguous() ||
        activation_mask->is_cpu() != x.is_cpu() ||
        activation_mask->numel() != room_for_activation_mask(x)) {
      throw InvalidArgument("activation_mask: expected what forward_begin returned for this input");
    }
    check_storage("activation_mask", *activation_mask);
    out.activation_mask = static_cast<const std::uint8_t*>(activation_mask->const_data_ptr());
  }
  return out;
}

/// dweight or dbias: C entries, if somebody asks for it.
inline std::optional<Tensor> new_parameter_gradient(const Tensor& x,
                                                    std::optional<ScalarType> dtype) {
  return dtype.has_value() ? std::optional(empty(x, channels_of(x), *dtype)) : std::nullopt;
}

/// The dtype of messages of `length` words each by `words` (a function of dtype and channels),
/// which their length tells. It is x's, unless this rank has no samples and autocast gave it
/// another one than the others.
template <class Words>
DType dtype_of_messages(const char* name, std::int64_t length, const Tensor& x,
                        const Words& words) {
  const std::int64_t channels = channels_of(x);
  if (const DType dtype = dtype_of("x", x); length == words(dtype, channels)) {
    return dtype;
  }
  for (int number = 0; number < kDtypeCount; ++number) {
    if (const auto dtype = static_cast<DType>(number); length == words(dtype, channels)) {
      return dtype;
    }
  }
  throw InvalidArgument(std::string(name) + ": got " + std::to_string(length) +
                        " words, expected a whole message of " + std::to_string(channels) +
                        " channels");
}

/// A message as the exchange left it: the first part, and the words beyond the frame.
class MergedTensors {
 public:
  MergedTensors(const std::optional<Tensor>& merged, const std::optional<Tensor>& rest,
                const Tensor& x, Statistics statistics, std::int64_t ranks) {
    if (!merged.has_value()) {  // the statistics are there
      return;
    }
    const Tensor& first = *merged;
    const std::int64_t channels = channels_of(x);
    const Device device = device_of("x", x);
    merged_.ranks = ranks_of(ranks);
    merged_.header = int64_data("merged", first, kHeaderWords, device);
    merged_.words = merged_.header + kHeaderWords;
    if (device == Device::kCuda) {
      on_cuda(first, rest, x, statistics);
      return;
    }
    const MessageInfo info = read_header(merged_.header, merged_.ranks);
    check_header(info);
    const std::int64_t needed = info.any_data
                                    ? forward_words(statistics, info.dtype, channels, merged_.ranks)
                                    : std::int64_t{kHeaderWords};
    if (!rest.has_value()) {
      (void)int64_data("merged", first, needed);
      return;
    }
    const std::int64_t framed = std::min(first.numel(), needed);
    const std::int64_t* rest_words = int64_data("rest", *rest, needed - framed);
    joined_.assign(merged_.words, merged_.header + framed);
    joined_.insert(joined_.end(), rest_words, rest_words + needed - framed);
    merged_.words = joined_.data();
  }
  MergedTensors(const MergedTensors&) = delete;
  MergedTensors& operator=(const MergedTensors&) = delete;

  const Merged& get() const { return merged_; }

 private:
  /// Merged messages lie in one piece of exactly the group's length.
  void on_cuda(const Tensor& first, const std::optional<Tensor>& rest, const Tensor& x,
               Statistics statistics) {
    if (rest.has_value()) {
      throw InvalidArgument("rest: got " + std::to_string(rest->numel()) +
                            " words, expected none on CUDA");
    }
    merged_.dtype =
        dtype_of_messages("merged", first.numel(), x, [&](DType dtype, std::int64_t channels) {
          return forward_words(statistics, dtype, channels, merged_.ranks);
        });
  }

  Merged merged_;
  std::vector<std::int64_t> joined_;
};

}  // namespace syncbn::torch_layer
