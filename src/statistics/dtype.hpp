// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/format.hpp"
#include "statistics/host_device.hpp"
#include "statistics/scalar.hpp"
#include "syncbn/tensor.hpp"

// Everything that depends on an element type, in one place. A dtype without a place here does not
// compile, or is refused at run time: it is never taken for another one.
namespace syncbn {

template <class T>
struct ElementTraits;

template <>
struct ElementTraits<Half> {
  static constexpr const Format& kFormat = kHalfFormat;
  using SameFormat = Half;                   ///< stands for all that have this format
  static constexpr int kFraction = 10;       ///< bits of the significand after the leading one
  static constexpr bool kVectorized = true;  ///< whether the vector kernels of src/cpu take it
};
template <>
struct ElementTraits<BFloat16> {
  static constexpr const Format& kFormat = kSingleFormat;
  using SameFormat = float;
  static constexpr int kFraction = 7;
  static constexpr bool kVectorized = true;
};
template <>
struct ElementTraits<float> {
  static constexpr const Format& kFormat = kSingleFormat;
  using SameFormat = float;
  static constexpr int kFraction = 23;
  static constexpr bool kVectorized = true;
};
template <>
struct ElementTraits<double> {
  static constexpr const Format& kFormat = kDoubleFormat;
  using SameFormat = double;
  static constexpr int kFraction = 52;
  static constexpr bool kVectorized = false;
};

/// Calls function with a value of the dtype's element type: what every choice by dtype goes
/// through.
SYNCBN_CALLS_ANY
template <class Function>
SYNCBN_HD constexpr decltype(auto) dispatch_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function(Half{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat32:
      return function(float{});
    case DType::kFloat64:
      return function(double{});
  }
  SYNCBN_NO_SUCH_KIND(refuse_dtype(dtype));
}

/// The same for the dtypes that the vector kernels take.
template <class Function>
void dispatch_vectorized(DType dtype, const Function& function) {
  dispatch_dtype(dtype, [&](auto type) {
    if constexpr (ElementTraits<decltype(type)>::kVectorized) {
      function(type);
    } else {
      refuse_dtype(dtype);
    }
  });
}

constexpr const Format& format_of(DType dtype) {
  return dispatch_dtype(
      dtype, [](auto type) -> const Format& { return ElementTraits<decltype(type)>::kFormat; });
}

inline bool is_vectorized(DType dtype) {
  return dispatch_dtype(dtype,
                        [](auto type) { return ElementTraits<decltype(type)>::kVectorized; });
}

/// Entry i of an array of that dtype, as binary64 (exact).
SYNCBN_HD inline double load_entry(DType dtype, const void* data, std::int64_t i) {
  return dispatch_dtype(
      dtype, [&](auto type) { return to_double(static_cast<const decltype(type)*>(data)[i]); });
}

/// Rounds once to the dtype.
SYNCBN_HD inline void store_entry(DType dtype, void* data, std::int64_t i, double value) {
  dispatch_dtype(dtype,
                 [&](auto type) { from_double(value, static_cast<decltype(type)*>(data)[i]); });
}

}  // namespace syncbn
