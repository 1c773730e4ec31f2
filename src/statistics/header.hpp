// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/host_device.hpp"
#include "statistics/scalar.hpp"
#include "syncbn/message.hpp"
#include "syncbn/options.hpp"

// The words in front of a message (docs/numerics.md, section 2), all of them summed over ranks.
namespace syncbn {

inline constexpr int kHeaderCount = 0;
inline constexpr int kHeaderFingerprint = 1;
inline constexpr int kHeaderSquare = 2;

// The flags word holds five 12-bit counters of ranks: at bit 0 those that refused their input, then
// those with samples of each dtype. A rank without samples counts in none, so that its dtype, which
// autocast may have left different, does not matter. This is why the fingerprint leaves dtype out.
inline constexpr int kCounterBits = 12;
inline constexpr std::int64_t kCounterMask = (std::int64_t{1} << kCounterBits) - 1;
static_assert((1 + kDtypeCount) * kCounterBits < 64, "a counter for each dtype");

SYNCBN_HD constexpr std::int64_t dtype_flag(DType dtype) {
  return std::int64_t{1} << (kCounterBits * (1 + static_cast<int>(dtype)));
}

SYNCBN_HD inline void write_header(std::int64_t* message, std::int64_t count,
                                   std::uint32_t fingerprint, std::int64_t flags,
                                   std::int64_t backward = 0) {
  const std::int64_t h = fingerprint;
  message[kHeaderCount] = count;
  message[kHeaderFingerprint] = h;
  message[kHeaderSquare] = h * h;
  message[kHeaderFlags] = flags;
  message[kHeaderBackward] = backward;
  for (int spare = kHeaderBackward + 1; spare < kHeaderWords; ++spare) {
    message[spare] = 0;
  }
}

/// Reads the header of a message summed over `ranks` ranks.
SYNCBN_HD inline MessageInfo header_info(const std::int64_t* merged, int ranks) {
  MessageInfo info;
  info.count = merged[kHeaderCount];
  const std::int64_t sum = merged[kHeaderFingerprint];
  // Equality in Cauchy-Schwarz: all fingerprints are the same. Both sides are below 2^62, and
  // unsigned because another program's words may be anything.
  const auto root = static_cast<std::uint64_t>(sum);
  const auto square = static_cast<std::uint64_t>(merged[kHeaderSquare]);
  info.agree = static_cast<std::uint64_t>(ranks) * square == root * root;
  const std::int64_t flags = merged[kHeaderFlags];
  info.any_rejected = (flags & kCounterMask) != 0;
  for (int number = 0; number < kDtypeCount; ++number) {
    const auto dtype = static_cast<DType>(number);
    if ((flags & (dtype_flag(dtype) * kCounterMask)) == 0) {
      continue;
    }
    if (info.any_data) {
      info.agree = false;
    }
    info.any_data = true;
    info.dtype = dtype;
  }
  return info;
}

/// Whether what came with this header may be used: all ranks agree, none has refused, and the count
/// is within the limits.
SYNCBN_HD inline bool usable(const MessageInfo& info) {
  return info.agree && !info.any_rejected && info.count >= 0 && info.count <= kMaxCount;
}

/// Throws DivergenceError unless backward is of as many elements per channel as forward was.
void check_count(std::int64_t backward, std::int64_t forward);

inline constexpr std::uint64_t kContractVersion = 2;
inline constexpr int kFingerprintBits = 20;

/// SplitMix64's finalizer (Steele, Lea and Flood 2014) over a running value.
SYNCBN_HD inline std::uint64_t mix(std::uint64_t state, std::uint64_t value) {
  state += value + 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

SYNCBN_HD inline std::uint32_t fingerprint_of(std::uint64_t state) {
  return static_cast<std::uint32_t>(state >> (64 - kFingerprintBits));
}

/// int64 words per channel of a message.
int words_per_channel(DType dtype);

enum class Direction : std::uint8_t { kForward, kBackward };

/// 20 bits that all ranks of one exchange must share. `layer` and `call` are the caller's names for
/// the layer and for the how-manieth call of it this is.
SYNCBN_HD inline std::uint32_t fingerprint(std::uint64_t layer, std::uint64_t call,
                                           Direction direction, std::int64_t channels, double eps) {
  std::uint64_t state = mix(kContractVersion, layer);
  state = mix(state, call);
  state = mix(state, static_cast<std::uint64_t>(direction));
  state = mix(state, static_cast<std::uint64_t>(channels));
  return fingerprint_of(mix(state, option_bits(eps)));
}

/// The backward exchange's fingerprint, derived from the forward one's.
SYNCBN_HD inline std::uint32_t backward_fingerprint(std::uint32_t forward) {
  return fingerprint_of(
      mix(mix(kContractVersion, forward), static_cast<std::uint64_t>(Direction::kBackward)));
}

}  // namespace syncbn
