// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/torch/device.hpp"
#include "bindings/torch/no_memory.hpp"
#include "syncbn/error.hpp"
#include "syncbn/options.hpp"
#include "syncbn/tensor.hpp"

// Between PyTorch's tensors and the core's views.
namespace syncbn::torch_layer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// Tensors that are one argument of an operator, each of which may be absent.
using Tensors = std::vector<std::optional<Tensor>>;

template <std::size_t kCount>
std::array<std::optional<Tensor>, kCount> each(const char* name, Tensors& tensors) {
  if (tensors.size() != kCount) {
    throw InvalidArgument(std::string(name) + ": got " + std::to_string(tensors.size()) +
                          " tensors, expected " + std::to_string(kCount));
  }
  std::array<std::optional<Tensor>, kCount> out;
  std::move(tensors.begin(), tensors.end(), out.begin());
  return out;
}

inline DType dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      throw InvalidArgument(std::string(name) + ": got dtype " +
                            torch::headeronly::toString(tensor.scalar_type()) +
                            ", expected float16, bfloat16, float32 or float64");
  }
}

/// Throws unless the tensor's entries lie in its storage, which may have been resized.
inline void check_storage(const char* name, const Tensor& tensor) {
  if (tensor.numel() == 0) {
    return;
  }
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t axis = 0; axis < tensor.dim(); ++axis) {
    last += (tensor.size(axis) - 1) * tensor.stride(axis);
  }
  const std::int64_t needed = (last + 1) * static_cast<std::int64_t>(tensor.element_size());
  std::int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  if (bytes < needed) {
    throw InvalidArgument(std::string(name) + ": got a storage of " + std::to_string(bytes) +
                          " bytes, expected at least " + std::to_string(needed));
  }
}

inline TensorView view(const char* name, const Tensor& tensor) {
  const Device device = device_of(name, tensor);
  check_storage(name, tensor);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return TensorView(tensor.const_data_ptr(), dtype_of(name, tensor), {sizes.begin(), sizes.end()},
                    {strides.begin(), strides.end()}, device);
}

inline TensorView view(const char* name, const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? view(name, *tensor) : TensorView();
}

inline MutableTensorView mutable_view(const char* name, Tensor& tensor) {
  const TensorView v = view(name, tensor);
  return MutableTensorView(tensor.mutable_data_ptr(), v.dtype, v.sizes, v.strides, v.device);
}

inline MutableTensorView mutable_view(const char* name, std::optional<Tensor>& tensor) {
  return tensor.has_value() ? mutable_view(name, *tensor) : MutableTensorView();
}

/// Which elements count: contiguous bools or bytes, or none.
inline MaskView mask_view(const std::optional<Tensor>& mask) {
  if (!mask.has_value()) {
    return {};
  }
  if (mask->scalar_type() != ScalarType::Bool && mask->scalar_type() != ScalarType::Byte) {
    throw InvalidArgument(std::string("mask: got dtype ") +
                          torch::headeronly::toString(mask->scalar_type()) +
                          ", expected bool or uint8");
  }
  if (!mask->is_contiguous()) {
    throw InvalidArgument("mask: got strides with gaps, expected a contiguous tensor");
  }
  check_storage("mask", *mask);
  const auto sizes = mask->sizes();
  return {static_cast<const std::uint8_t*>(mask->const_data_ptr()),
          {sizes.begin(), sizes.end()},
          device_of("mask", *mask)};
}

/// A new contiguous tensor on x's device.
inline Tensor empty(const Tensor& x, std::int64_t size, ScalarType dtype) {
  if (size < 0) {
    throw InvalidArgument("size: got " + std::to_string(size) + ", expected at least 0");
  }
  std::int32_t device_type = 0;
  std::int32_t device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device_index));
  const auto code = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(dtype));
  const std::int64_t stride = 1;
  AtenTensorHandle out = nullptr;  // without the dispatcher's boxed call, which takes as long again
  if (aoti_torch_empty_strided(1, &size, &stride, code, device_type, device_index, &out) != 0) {
    throw NoMemory(static_cast<std::uint64_t>(size) *
                   aoti_torch_dtype_element_size(static_cast<std::int32_t>(code)));
  }
  return Tensor(out);
}

inline std::int64_t* int64_data(const char* name, Tensor& tensor, std::int64_t at_least,
                                Device device = Device::kCpu) {
  if (device_of(name, tensor) != device || tensor.scalar_type() != ScalarType::Long ||
      !tensor.is_contiguous() || tensor.numel() < at_least) {
    throw InvalidArgument(std::string(name) + ": expected a contiguous int64 tensor of at least " +
                          std::to_string(at_least) + " entries on " +
                          (device == Device::kCpu ? "the CPU" : "CUDA"));
  }
  check_storage(name, tensor);
  return static_cast<std::int64_t*>(tensor.mutable_data_ptr());
}

inline const std::int64_t* int64_data(const char* name, const Tensor& tensor, std::int64_t at_least,
                                      Device device = Device::kCpu) {
  return int64_data(name, const_cast<Tensor&>(tensor), at_least, device);
}

inline const double* double_data(const char* name, const Tensor& tensor, std::int64_t size,
                                 Device device = Device::kCpu) {
  if (device_of(name, tensor) != device || tensor.scalar_type() != ScalarType::Double ||
      !tensor.is_contiguous() || tensor.numel() != size) {
    throw InvalidArgument(std::string(name) + ": expected a contiguous float64 tensor of " +
                          std::to_string(size) + " entries on " +
                          (device == Device::kCpu ? "the CPU" : "CUDA"));
  }
  check_storage(name, tensor);
  return static_cast<const double*>(tensor.const_data_ptr());
}

/// A rank, or a number of them, for the core, which refuses what is none.
inline int ranks_of(std::int64_t ranks) {
  using Limits = std::numeric_limits<int>;
  return static_cast<int>(std::clamp<std::int64_t>(ranks, Limits::min(), Limits::max()));
}

inline double* double_data(Tensor& tensor) {
  return static_cast<double*>(tensor.mutable_data_ptr());
}

}  // namespace syncbn::torch_layer
