// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the welford mode promises of mean and variance.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "syncbn/tensor.hpp"

namespace syncbn::testing {

struct Moments {
  double mean = 0;
  double var = 0;
};

inline Moments exact(const std::vector<double>& values) {
  long double sum = 0;
  for (const double v : values) {
    sum += static_cast<long double>(v);
  }
  const auto n = static_cast<long double>(values.size());
  const long double mean = sum / n;
  long double squares = 0;
  for (const double v : values) {
    squares += (static_cast<long double>(v) - mean) * (static_cast<long double>(v) - mean);
  }
  return {static_cast<double>(mean), static_cast<double>(squares / n)};
}

inline double unit_of(DType dtype) { return dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24; }

/// Chan, Golub and LeVeque 1983: the relative error of M2 by such updates is at most about
/// n kappa u, kappa = sqrt(1 + mean^2 / var). n counts additions in a row: a lane's, then merges.
/// The mean's error follows by the same argument: n u (|mean| + deviation).
inline void expect_close(const Moments& got, const Moments& expected, double n, DType dtype) {
  const double u = unit_of(dtype);
  const double deviation = std::sqrt(expected.var);
  const double kappa = std::sqrt(1 + expected.mean * expected.mean / expected.var);
  EXPECT_LE(std::abs(got.mean - expected.mean), 4 * n * u * (std::abs(expected.mean) + deviation));
  EXPECT_LE(std::abs(got.var - expected.var), 4 * n * kappa * u * expected.var);
}

}  // namespace syncbn::testing
