// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "statistics/format.hpp"
#include "statistics/host_device.hpp"
#include "statistics/scalar.hpp"

// docs/numerics.md, section 1: the lanes of a segment.
namespace syncbn {

/// One lane: a double for inputs of at most 32 bits, a compensated pair for float64.
template <class T>
struct Lane {
  static constexpr bool kPair = false;
  double sum = 0.0;
  SYNCBN_HD void add(double u) { sum += u; }
  SYNCBN_HD void add_product(double u, double v) { sum = std::fma(u, v, sum); }
  SYNCBN_HD void fold(const Lane& other) { sum += other.sum; }
  SYNCBN_HD double rest() const { return 0.0; }
};

template <>
struct Lane<double> {
  static constexpr bool kPair = true;
  double sum = 0.0;
  double carry = 0.0;
  SYNCBN_HD void add(double u) {
    const TwoSumResult t = two_sum(sum, u);
    sum = t.sum;
    carry += t.error;
  }
  SYNCBN_HD void add_product(double u, double v) {
    const double product = u * v;
    const double error = std::fma(u, v, -product);
    const TwoSumResult t = two_sum(sum, product);
    sum = t.sum;
    carry += error + t.error;
  }
  SYNCBN_HD void fold(const Lane& other) {
    const TwoSumResult t = two_sum(sum, other.sum);
    sum = t.sum;
    carry = (carry + other.carry) + t.error;
  }
  SYNCBN_HD double rest() const { return carry; }
};

/// The segment's partial(s) end up in lanes[0].
template <class LaneType>
SYNCBN_HD inline void fold(LaneType* lanes, int count = kLanes) {
  for (int h = count / 2; h >= 1; h /= 2) {
    for (int l = 0; l < h; ++l) {
      lanes[l].fold(lanes[l + h]);
    }
  }
}

/// The flag that a partial raises: 0 if it is finite and therefore added.
SYNCBN_HD inline std::int64_t partial_flag(double sum, bool first) {
  return is_finite(sum) ? 0 : first ? first_sum_flag(sum) : kSecondNonFinite;
}

}  // namespace syncbn
