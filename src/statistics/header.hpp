#pragma once

#include <cstdint>

#include "statistics/host_device.hpp"
#include "syncbn/passes.hpp"

// The four words in front of a message (docs/numerics.md, section 2), all of them summed over
// ranks.
namespace syncbn {

inline constexpr int kHeaderCount = 0;
inline constexpr int kHeaderFingerprint = 1;
inline constexpr int kHeaderSquare = 2;
inline constexpr int kHeaderFlags = 3;

// The flags word holds five 12-bit counters of ranks: at bit 0 those that refused their input, then
// those with samples of each dtype. A rank without samples counts in none, so that its dtype, which
// autocast may have left different, does not matter. This is why the fingerprint leaves dtype out.
inline constexpr int kCounterBits = 12;
inline constexpr std::int64_t kCounterMask = (std::int64_t{1} << kCounterBits) - 1;
inline constexpr std::int64_t kRejected = 1;

SYNCBN_HD constexpr std::int64_t dtype_flag(DType dtype) {
  return std::int64_t{1} << (kCounterBits * (1 + static_cast<int>(dtype)));
}

SYNCBN_HD inline void write_header(std::int64_t* message, std::int64_t count,
                                   std::uint32_t fingerprint, std::int64_t flags) {
  const std::int64_t h = fingerprint;
  message[kHeaderCount] = count;
  message[kHeaderFingerprint] = h;
  message[kHeaderSquare] = h * h;
  message[kHeaderFlags] = flags;
}

}  // namespace syncbn
