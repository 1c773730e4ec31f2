// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "statistics/dtype.hpp"
#include "syncbn/tensor.hpp"
#include "tensors/scratch.hpp"

namespace syncbn {

/// Entry i of a one-axis tensor of any dtype, as binary64 (exact).
inline double channel_value(const TensorView& tensor, std::int64_t i) {
  return load_entry(tensor.dtype, tensor.data, i * tensor.strides[0]);
}

/// Rounds once to the tensor's dtype.
inline void set_channel_value(const MutableTensorView& tensor, std::int64_t i, double value) {
  store_entry(tensor.dtype, tensor.data, i * tensor.strides[0], value);
}

/// `count` entries from `begin` on as binary64; `absent_value` for each if the tensor is absent.
inline void load_channel_values(const TensorView& tensor, std::int64_t begin, std::int64_t count,
                                double absent_value, double* values) {
  if (tensor.absent()) {
    std::fill_n(values, count, absent_value);
    return;
  }
  dispatch_dtype(tensor.dtype, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(tensor.data);
    const std::int64_t stride = tensor.strides[0];
    for (std::int64_t i = 0; i < count; ++i) {
      values[i] = to_double(from[(begin + i) * stride]);
    }
  });
}

/// The other way round: each is rounded once to the tensor's dtype, if there is a tensor.
inline void store_channel_values(const MutableTensorView& tensor, std::int64_t begin,
                                 std::int64_t count, const double* values) {
  if (tensor.absent()) {
    return;
  }
  dispatch_dtype(tensor.dtype, [&](auto type) {
    auto* to = static_cast<decltype(type)*>(tensor.data);
    const std::int64_t stride = tensor.strides[0];
    for (std::int64_t i = 0; i < count; ++i) {
      from_double(values[i], to[(begin + i) * stride]);
    }
  });
}

/// Weight and bias as binary64, ones and zeros where they are absent.
class AffineValues {
 public:
  AffineValues(const TensorView& weight, const TensorView& bias, std::int64_t channels)
      : values_(static_cast<std::size_t>(2 * channels)), channels_(channels) {
    load_channel_values(weight, 0, channels, 1.0, values_.data());
    load_channel_values(bias, 0, channels, 0.0, values_.data() + channels);
  }
  const double* scale() const { return values_.data(); }
  const double* shift() const { return values_.data() + channels_; }

 private:
  cpu::ScratchArray<double> values_;
  std::int64_t channels_;
};

/// All entries.
inline std::vector<double> channel_values(const TensorView& tensor, std::int64_t channels,
                                          double absent_value) {
  std::vector<double> values(static_cast<std::size_t>(channels));
  load_channel_values(tensor, 0, channels, absent_value, values.data());
  return values;
}

}  // namespace syncbn
