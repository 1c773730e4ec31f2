// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/host_device.hpp"
#include "statistics/scalar.hpp"

// The fixed units and sizes of docs/numerics.md, section 2.
namespace syncbn {

/// A sum is an integer multiple of 2^-unit. `digits`: radix-2^52 digits on the wire; `slots`:
/// radix-2^32 slots of a local accumulator.
struct SumFormat {
  int unit;
  int digits;
  int slots;
};

struct Format {
  SumFormat first;
  SumFormat second;
  SYNCBN_HD constexpr int words() const { return first.digits + second.digits + 1; }
  SYNCBN_HD constexpr int slots() const { return first.slots + second.slots; }
};

inline constexpr Format kHalfFormat{{24, 2, 3}, {48, 3, 4}};
inline constexpr Format kSingleFormat{{149, 6, 10}, {298, 12, 19}};
inline constexpr Format kDoubleFormat{{1074, 41, 67}, {1074, 41, 67}};

/// Bits of a flags word; each is the lowest bit of a 15-bit counter of ranks.
inline constexpr std::int64_t kFirstNan = std::int64_t{1} << 0;
inline constexpr std::int64_t kFirstPlusInf = std::int64_t{1} << 15;
inline constexpr std::int64_t kFirstMinusInf = std::int64_t{1} << 30;
inline constexpr std::int64_t kSecondNonFinite = std::int64_t{1} << 45;
inline constexpr std::int64_t kFlagCounter = 0x7fff;

SYNCBN_HD inline std::int64_t first_sum_flag(double partial) {
  return partial != partial ? kFirstNan : partial > 0 ? kFirstPlusInf : kFirstMinusInf;
}

/// Elements of one segment and the lanes it is dealt to (section 1).
inline constexpr int kSegment = 512;
inline constexpr int kLanes = 16;

}  // namespace syncbn
