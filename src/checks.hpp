#pragma once

#include <cstdint>

#include "statistics/header.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/tensor.hpp"

// Argument checks. Each throws InvalidArgument with the argument's name, what was given and what is
// allowed; none changes anything.
namespace syncbn {

/// A tensor of samples: 2 to 64 axes, strides for each, a known dtype, data unless it is empty, at
/// most kMaxCount elements per channel.
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
void check_momentum(double momentum);

}  // namespace syncbn
