// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// Limits, and what a layer may be told in all interfaces of the library.
namespace syncbn {

/// Limits of the message format (docs/numerics.md, section 2).
inline constexpr int kMaxRanks = 2048;
inline constexpr std::int64_t kMaxCount = std::int64_t{1} << 36;  ///< elements per channel
/// Keeps the length of a message far from overflow.
inline constexpr std::int64_t kMaxChannels = std::int64_t{1} << 31;

enum class ActivationKind : std::uint8_t { kNone, kRelu, kLeakyRelu };
inline constexpr int kActivationCount = 3;  ///< how many there are

/// What is applied to the normalized value, after a residual has been added.
struct Activation {
  ActivationKind kind = ActivationKind::kNone;
  double negative_slope = 0.01;  ///< kLeakyRelu: finite
};

enum class Statistics : std::uint8_t {
  kReproducible,  ///< exact sums: the bits do not depend on the number of ranks
  kWelford,       ///< per rank mean and M2, gathered and merged (docs/options.md)
};

/// Which sum dweight and dbias hold.
enum class AffineGradients : std::uint8_t {
  kShare,   ///< this rank's own samples; summed over ranks they are the whole gradient
  kGlobal,  ///< all ranks' samples, the same on every rank
};

}  // namespace syncbn
