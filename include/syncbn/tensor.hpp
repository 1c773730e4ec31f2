#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "syncbn/error.hpp"
#include "syncbn/export.hpp"

namespace syncbn {

/// Element types. bfloat16 and float16 are passed as their 16-bit patterns.
enum class DType : std::uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };
inline constexpr int kDtypeCount = 4;  ///< how many there are

enum class Device : std::uint8_t { kCpu, kCuda };

/// "float16", "bfloat16", "float32" or "float64"; throws InvalidArgument for another number.
SYNCBN_API const char* name(DType dtype);

/// Bytes per element; throws InvalidArgument for another number.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
  }
  throw InvalidArgument("dtype: got number " + std::to_string(static_cast<int>(dtype)) +
                        ", expected less than " + std::to_string(kDtypeCount));
}

/// A tensor that somebody else owns: a pointer to element (0, ..., 0), the sizes, and the strides
/// in elements. A view with data == nullptr and no sizes stands for "absent" (no weight, no bias).
template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  Device device = Device::kCpu;

  BasicTensorView() = default;

  /// A contiguous (row-major) tensor.
  BasicTensorView(Void* tensor_data, DType tensor_dtype, std::vector<std::int64_t> tensor_sizes)
      : data(tensor_data),
        dtype(tensor_dtype),
        sizes(std::move(tensor_sizes)),
        strides(sizes.size()) {
    std::uint64_t step = 1;  // unsigned: sizes are not checked yet
    for (std::size_t i = sizes.size(); i-- > 0; step *= static_cast<std::uint64_t>(sizes[i])) {
      strides[i] = static_cast<std::int64_t>(step);
    }
  }

  BasicTensorView(Void* tensor_data, DType tensor_dtype, std::vector<std::int64_t> tensor_sizes,
                  std::vector<std::int64_t> tensor_strides, Device tensor_device = Device::kCpu)
      : data(tensor_data),
        dtype(tensor_dtype),
        sizes(std::move(tensor_sizes)),
        strides(std::move(tensor_strides)),
        device(tensor_device) {}

  /// A writable view serves where a read-only one is wanted.
  operator BasicTensorView<const void>() const {
    return BasicTensorView<const void>(data, dtype, sizes, strides, device);
  }

  bool absent() const { return data == nullptr && sizes.empty(); }

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (const std::int64_t s : sizes) {
      n *= s;
    }
    return n;
  }
};

using TensorView = BasicTensorView<const void>;
using MutableTensorView = BasicTensorView<void>;

/// Which elements of a tensor (N, C, spatial...) count: contiguous bytes of shape (N, spatial...),
/// shared by all channels, 0 for an element that does not count. Not to be confused with an
/// activation mask. A view with data == nullptr and no sizes stands for "absent": all count.
struct MaskView {
  const std::uint8_t* data = nullptr;
  std::vector<std::int64_t> sizes;
  Device device = Device::kCpu;

  bool absent() const { return data == nullptr && sizes.empty(); }
};

}  // namespace syncbn
