#pragma once

#include <cstdint>
#include <vector>

#include "statistics/scalar.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn {

/// Entry i of a one-axis tensor of any dtype, as binary64 (exact).
inline double channel_value(const TensorView& tensor, std::int64_t i) {
  i *= tensor.strides[0];
  switch (tensor.dtype) {
    case DType::kFloat16:
      return to_double(static_cast<const Half*>(tensor.data)[i]);
    case DType::kBFloat16:
      return to_double(static_cast<const BFloat16*>(tensor.data)[i]);
    case DType::kFloat32:
      return to_double(static_cast<const float*>(tensor.data)[i]);
    case DType::kFloat64:
      break;
  }
  return static_cast<const double*>(tensor.data)[i];
}

/// Rounds once to the tensor's dtype.
inline void set_channel_value(const MutableTensorView& tensor, std::int64_t i, double value) {
  i *= tensor.strides[0];
  switch (tensor.dtype) {
    case DType::kFloat16:
      return from_double(value, static_cast<Half*>(tensor.data)[i]);
    case DType::kBFloat16:
      return from_double(value, static_cast<BFloat16*>(tensor.data)[i]);
    case DType::kFloat32:
      return from_double(value, static_cast<float*>(tensor.data)[i]);
    case DType::kFloat64:
      return from_double(value, static_cast<double*>(tensor.data)[i]);
  }
}

/// All entries as binary64; `absent_value` for each if the tensor is absent.
inline std::vector<double> channel_values(const TensorView& tensor, std::int64_t channels,
                                          double absent_value) {
  std::vector<double> values(static_cast<std::size_t>(channels), absent_value);
  if (!tensor.absent()) {
    for (std::int64_t i = 0; i < channels; ++i) {
      values[static_cast<std::size_t>(i)] = channel_value(tensor, i);
    }
  }
  return values;
}

}  // namespace syncbn
