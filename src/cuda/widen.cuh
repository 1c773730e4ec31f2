// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "statistics/scalar.hpp"

// Elements as binary64, for the sums.
namespace syncbn::cuda {

/// v, by operations on integers and in binary32: the bits lie three places further down, and the
/// exponent of a number is higher by 896. (Other ways to write it spill registers on sm_75.)
SYNCBN_DEVICE double widened_by_integers(float v) {
  const float magnitude = std::fabs(v);
  const bool small = magnitude < 1.0f;
  // Subnormal numbers, too, are normal 2^64 times as large.
  const auto bits = bit_copy<std::uint32_t>(v * (small ? 0x1p64f : 1.0f));
  std::uint32_t high = static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 3);
  high &= 0x8fffffffu;
  if (v != 0) {
    constexpr std::uint32_t kOne = 1u << 20;  // of the exponent
    const bool finite = magnitude <= 0x1.fffffep127f;
    high += small ? (896 - 64) * kOne : finite ? 896 * kOne : (2047 - 255) * kOne;
  }
  return bit_copy<double>(std::uint64_t{high} << 32 | bits << 29);
}

/// to_double, without a conversion to binary64 where the device has few units for that.
template <class T>
SYNCBN_DEVICE double as_double(T v) {
  if constexpr (sizeof(T) < sizeof(double)) {
    if (device::few_binary64_units()) {
      return widened_by_integers(to_float(v));
    }
  }
  return to_double(v);
}

}  // namespace syncbn::cuda
