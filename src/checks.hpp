// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "statistics/header.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/tensor.hpp"

// Argument checks. Each throws InvalidArgument with the argument's name, what was given and what is
// allowed; none changes anything.
namespace syncbn {

void check_dtype(const char* name, DType dtype);

/// "(2, 3, 4)".
std::string shape_text(const Extents& sizes);

/// "a, b or c", the names of kinds 0 to count - 1.
template <class Name>
std::string listed(int count, const Name& name) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += (i == 0 ? "" : i < count - 1 ? ", " : " or ") + std::string(name(i));
  }
  return text;
}

/// 0 to kMaxChannels.
void check_channels(std::int64_t channels);

/// An array of `entries` entries; may be null if there are none.
void check_array(const char* name, const void* array, std::int64_t entries);

/// Somewhere to write to: no two entries in one place (stride 0).
void check_output(const char* name, const MutableTensorView& tensor);

/// A tensor of samples: 2 to 12 axes, strides for each, a known dtype, data unless it is empty, at
/// most kMaxChannels channels and kMaxCount elements per channel.
void check_samples(const char* name, const TensorView& tensor);

/// The same sizes, dtype and device as x.
void check_like(const char* name, const TensorView& tensor, const TensorView& x);

/// Absent, or bytes of x's shape without its channels, on its device.
void check_mask(const MaskView& mask, const TensorView& x);

/// Absent, or one axis of `channels` entries on `device`.
void check_per_channel(const char* name, const TensorView& tensor, std::int64_t channels,
                       Device device);

/// Throws Unavailable for tensors on a device that this build has no passes for.
void check_available(Device device);

void check_eps(double eps, const char* name = "eps");
void check_activation(const Activation& activation);
void check_ranks(int ranks);

/// Without a number of its own a layer would meet any other of its shape.
void check_layer(const char* name, std::uint64_t layer, int ranks);

/// Of a group: 1 ms to kMaxTimeout.
void check_timeout(std::chrono::milliseconds timeout);
void check_momentum(double momentum);

}  // namespace syncbn
