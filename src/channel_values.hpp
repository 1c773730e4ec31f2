#pragma once

#include <cstdint>
#include <vector>

#include "statistics/dtype.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn {

/// Entry i of a one-axis tensor of any dtype, as binary64 (exact).
inline double channel_value(const TensorView& tensor, std::int64_t i) {
  return load_entry(tensor.dtype, tensor.data, i * tensor.strides[0]);
}

/// Rounds once to the tensor's dtype.
inline void set_channel_value(const MutableTensorView& tensor, std::int64_t i, double value) {
  store_entry(tensor.dtype, tensor.data, i * tensor.strides[0], value);
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
