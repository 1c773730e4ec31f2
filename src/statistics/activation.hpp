#pragma once

#include "statistics/host_device.hpp"
#include "syncbn/passes.hpp"

// Everything that depends on an activation, in one place. An activation without a place here does
// not compile, or is refused at run time.
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

/// An activation as kernels are given it, which then know no kinds.
struct AppliedActivation {
  bool zero = false;
  bool scaled = false;
  double slope = 1.0;

  AppliedActivation() = default;
  /* implicit */ AppliedActivation(const Activation& activation)
      : zero(traits_of(activation.kind).zero),
        scaled(traits_of(activation.kind).scaled),
        slope(activation.negative_slope) {}
  SYNCBN_HD bool changes() const { return zero || scaled; }
};

}  // namespace syncbn
