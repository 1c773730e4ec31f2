// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "statistics/activation.hpp"
#include "statistics/finalize.hpp"
#include "statistics/host_device.hpp"
#include "statistics/scalar.hpp"
#include "syncbn/tensor.hpp"

// docs/numerics.md, sections 4 and 6: what is done to one element.
namespace syncbn {

/// The arithmetic's type: binary64 for float64, else binary32.
template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, double, float>;

SYNCBN_HD inline double widened(double v) { return v; }
template <class T>
SYNCBN_HD inline float widened(T v) {
  return to_float(v);
}

template <class T>
SYNCBN_HD inline T rounded(Wide<T> v) {
  if constexpr (sizeof(T) == 8) {
    return v;
  } else {
    T out;
    from_float(v, out);
    return out;
  }
}

/// v of one channel before residual and activation.
template <class T>
class Affine {
 public:
  Affine() = default;
  SYNCBN_HD Affine(double mean, double rstd, double weight, double bias) {
    if constexpr (sizeof(T) == 8) {
      mean_ = mean;
      scale_ = weight * rstd;
      shift_ = bias;
    } else {
      const AffineF32 p = affine_f32(mean, rstd, weight, bias);
      mean_ = p.mean_high;
      mean_low_ = p.mean_low;
      scale_ = p.a;
      shift_ = p.b;
    }
  }
  SYNCBN_HD Wide<T> operator()(T x) const { return of_centered(centered(x)); }
  /// t = x - mean, which InputGradientOf has in common.
  SYNCBN_HD Wide<T> centered(T x) const {
    const Wide<T> t = widened(x) - mean_;
    return sizeof(T) == 8 ? t : t - mean_low_;
  }
  SYNCBN_HD Wide<T> of_centered(Wide<T> t) const { return std::fma(scale_, t, shift_); }
  /// x from v, up to rounding.
  SYNCBN_HD T inverse(Wide<T> v) const {
    return rounded<T>(std::fma(1 / scale_, v - shift_, mean_low_) + mean_);
  }

 private:
  Wide<T> mean_ = 0;
  Wide<T> mean_low_ = 0;
  Wide<T> scale_ = 0;
  Wide<T> shift_ = 0;
};

/// The activation of the layer, and what it makes of a gradient.
template <class T>
class ActivationOf {
 public:
  SYNCBN_HD explicit ActivationOf(const AppliedActivation& activation)
      : rest_(activation.rest), slope_(static_cast<Wide<T>>(activation.slope)) {}
  /// Where the gradient passes unchanged.
  SYNCBN_HD bool passes(Wide<T> v) const { return rest_ == NotPositive::kZero ? !(v <= 0) : v > 0; }
  SYNCBN_HD Wide<T> value(Wide<T> v) const {
    if (rest_ == NotPositive::kKept || passes(v)) {
      return v;
    }
    return rest_ == NotPositive::kZero ? Wide<T>(0) : v * slope_;
  }
  SYNCBN_HD T gradient(T dy, bool passing) const {
    if (rest_ == NotPositive::kKept || passing) {
      return dy;
    }
    return rounded<T>(rest_ == NotPositive::kZero ? Wide<T>(0) : widened(dy) * slope_);
  }

 private:
  NotPositive rest_;
  Wide<T> slope_;
};

/// dx of one channel from u, the gradient come back through the activation.
template <class T>
class InputGradientOf {
 public:
  InputGradientOf() = default;
  SYNCBN_HD InputGradientOf(double mean, double rstd, const Coefficients& c) {
    if constexpr (sizeof(T) == 8) {
      mean_ = mean;
      c1_ = c.c1;
      c2_ = c.c2;
      c3_ = c.c3;
    } else {
      const GradientF32 p = gradient_f32(mean, rstd, c);
      mean_ = p.mean_high;
      mean_low_ = p.mean_low;
      c1_ = p.c1;
      c2_ = p.c2;
      c3_ = p.c3;
      power_ = p.power;
    }
  }
  SYNCBN_HD T operator()(T u, T x) const {
    const Wide<T> t = widened(x) - mean_;
    return of_centered(widened(u), sizeof(T) == 8 ? t : t - mean_low_);
  }
  SYNCBN_HD T of_centered(Wide<T> u, Wide<T> t) const {
    const Wide<T> scaled = sizeof(T) == 8 ? t : t * power_;
    return rounded<T>(std::fma(c1_, u, std::fma(c2_, scaled, c3_)));
  }

 private:
  Wide<T> mean_ = 0;
  Wide<T> mean_low_ = 0;
  Wide<T> c1_ = 0;
  Wide<T> c2_ = 0;
  Wide<T> c3_ = 0;
  Wide<T> power_ = 0;
};

}  // namespace syncbn
