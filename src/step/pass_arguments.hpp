// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "cpu/cpu_passes.hpp"
#include "cpu/finalize.hpp"
#include "statistics/float_environment.hpp"
#include "step/passes.hpp"
#include "tensors/channel_values.hpp"
#include "tensors/sample_view.hpp"

// Arguments of the CPU's passes in the backend's form.
namespace syncbn {

/// The pass's arguments in the backend's form; keeps the parameters that it points to.
class PullbackArguments {
 public:
  PullbackArguments(const ActivationGradient& through, const double* mean, const double* rstd,
                    std::int64_t channels)
      : activation_(through.activation),
        mean_(mean),
        rstd_(rstd),
        activation_mask_(through.activation_mask) {
    if (activation_.kind != ActivationKind::kNone && activation_mask_ == nullptr) {
      affine_.emplace(through.weight, through.bias, channels);
    }
  }
  cpu::Pullback view() const {
    return {
        activation_,
        {mean_, rstd_, affine_ ? affine_->scale() : nullptr, affine_ ? affine_->shift() : nullptr},
        activation_mask_};
  }

 private:
  Activation activation_;
  const double* mean_;
  const double* rstd_;
  const std::uint8_t* activation_mask_;
  std::optional<AffineValues> affine_;
};

inline std::optional<SampleView> optional_view(const TensorView& tensor) {
  return tensor.absent() ? std::nullopt : std::optional<SampleView>(tensor);
}

/// What stands for statistics where there are none: zeros of no elements, or NaN of ranks that
/// disagree.
inline void fill_moments(bool agree, double* mean, double* var, double* rstd,
                         std::int64_t channels) {
  for (double* array : {mean, var, rstd}) {
    std::fill_n(array, channels, agree ? 0.0 : std::numeric_limits<double>::quiet_NaN());
  }
}
inline void fill_gradients(bool agree, const cpu::Gradients& to, std::int64_t begin,
                           std::int64_t end) {
  const double v = agree ? 0.0 : std::numeric_limits<double>::quiet_NaN();
  for (std::int64_t c = begin; c < end; ++c) {
    to.store({v, v, v, v, !agree}, c);
  }
}

}  // namespace syncbn
