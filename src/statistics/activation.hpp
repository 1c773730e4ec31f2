// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/host_device.hpp"
#include "syncbn/options.hpp"

// What the passes know of an activation; CONTRIBUTING.md lists the few other places. An activation
// without a place here does not compile, or is refused at run time.
namespace syncbn {

/// What becomes of a value that is not positive, and of its gradient. The others are handed on.
struct ActivationTraits {
  const char* name;
  bool zero;    ///< it becomes 0; NaN is handed on
  bool scaled;  ///< it is multiplied by negative_slope
};

/// Throws InvalidArgument.
[[noreturn]] void refuse_activation(ActivationKind kind);

constexpr ActivationTraits traits_of(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kNone:
      return {"none", false, false};
    case ActivationKind::kRelu:
      return {"relu", true, false};
    case ActivationKind::kLeakyRelu:
      return {"leaky_relu", false, true};
  }
  refuse_activation(kind);
}

/// What becomes of values that are not positive. One value, not two flags: kernels have few
/// registers left.
enum class NotPositive : std::uint8_t { kKept, kZero, kScaled };

/// An activation as kernels are given it, which then know no kinds.
struct AppliedActivation {
  NotPositive rest = NotPositive::kKept;
  double slope = 1.0;

  AppliedActivation() = default;
  /* implicit */ AppliedActivation(const Activation& activation)
      : rest(traits_of(activation.kind).zero     ? NotPositive::kZero
             : traits_of(activation.kind).scaled ? NotPositive::kScaled
                                                 : NotPositive::kKept),
        slope(activation.negative_slope) {}
  SYNCBN_HD bool changes() const { return rest != NotPositive::kKept; }
};

}  // namespace syncbn
