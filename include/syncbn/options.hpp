// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

/// Limits, and options of a layer that all interfaces of the library have.
namespace syncbn {

/// Limits of the message format (docs/numerics.md, section 2).
inline constexpr int kMaxRanks = 2048;
inline constexpr std::int64_t kMaxCount = std::int64_t{1} << 36;  ///< elements per channel
/// The largest number of channels. This limit keeps the length of a message far from overflow.
inline constexpr std::int64_t kMaxChannels = std::int64_t{1} << 31;
/// The number of channels of options in which it was forgotten, and which are refused.
inline constexpr std::int64_t kNoChannels = std::numeric_limits<std::int64_t>::min();

/// The kinds of an Activation.
enum class ActivationKind : std::uint8_t { kNone, kRelu, kLeakyRelu };
inline constexpr int kActivationCount = 3;  ///< the number of kinds

/// The function that is applied to the normalized value, after a residual has been added.
struct Activation {
  ActivationKind kind = ActivationKind::kNone;
  double negative_slope = 0.01;  ///< for kLeakyRelu; finite
};

/// How a training forward computes the statistics.
enum class Statistics : std::uint8_t {
  kReproducible,  ///< exact sums: the bits do not depend on the number of ranks
  kWelford,       ///< mean and M2 of each rank, merged in rank order (docs/options.md)
};

/// The samples whose sums dweight and dbias receive.
enum class AffineGradients : std::uint8_t {
  kShare,   ///< this rank's samples; the sum over all ranks is the whole gradient
  kGlobal,  ///< the samples of all ranks; every rank gets the same sums
};

}  // namespace syncbn
