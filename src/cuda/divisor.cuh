// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/host_device.hpp"

namespace syncbn::cuda {

/// Division of numbers in [0, 2^63) by the same number, without a division: GPUs have none for
/// integers, and a subroutine stands for it.
/// q = floor(n * magic / 2^(63 + bits)), magic = ceil(2^(63 + bits) / d), 2^(bits - 1) < d <=
/// 2^bits; exact because magic * d - 2^(63 + bits) < d <= 2^bits (Granlund and Montgomery 1994,
/// theorem 4.2).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(std::int64_t divisor) : value_(divisor) {
    while ((std::uint64_t{1} << bits_) < static_cast<std::uint64_t>(divisor)) {
      ++bits_;
    }
    const unsigned __int128 power = static_cast<unsigned __int128>(1) << (63 + bits_);
    const auto d = static_cast<unsigned __int128>(divisor);
    magic_ = static_cast<std::uint64_t>((power + d - 1) / d);
  }
  SYNCBN_HD std::int64_t quotient(std::int64_t n) const {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(static_cast<std::uint64_t>(n)) * magic_;
    const auto high = static_cast<std::uint64_t>(product >> 64);
    return static_cast<std::int64_t>(bits_ == 0 ? static_cast<std::uint64_t>(n)
                                                : high >> (bits_ - 1));
  }
  SYNCBN_HD std::int64_t remainder(std::int64_t n) const { return n - quotient(n) * value_; }
  SYNCBN_HD std::int64_t value() const { return value_; }

 private:
  std::int64_t value_ = 1;
  std::uint64_t magic_ = std::uint64_t{1} << 63;
  int bits_ = 0;
};

/// Division of numbers in [0, 2^31) by the same number from 2 on: Divisor, in 32 bits.
class SmallDivisor {
 public:
  SmallDivisor() = default;
  explicit SmallDivisor(std::uint32_t divisor) {
    while ((std::uint64_t{1} << (shift_ + 1)) < divisor) {
      ++shift_;
    }
    magic_ =
        static_cast<std::uint32_t>(((std::uint64_t{1} << (32 + shift_)) + divisor - 1) / divisor);
  }
  SYNCBN_HD std::uint32_t quotient(std::uint32_t n) const {
#ifdef __CUDA_ARCH__
    return __umulhi(n, magic_) >> shift_;
#else
    return static_cast<std::uint32_t>((std::uint64_t{n} * magic_) >> 32) >> shift_;
#endif
  }

 private:
  std::uint32_t magic_ = 0;
  int shift_ = 0;
};

}  // namespace syncbn::cuda
