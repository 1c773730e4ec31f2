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
#include "tensors/checks.hpp"
#include "tensors/sample_view.hpp"

// Arguments of the CPU's passes: checks, and the backend's form of them.
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

/// The statistics that a pass reads.
inline void check_normalizer(const double* mean, const double* rstd, std::int64_t channels) {
  check_array("mean", mean, channels);
  check_array("rstd", rstd, channels);
}

inline void check_through(const ActivationGradient& through, const TensorView& x) {
  check_activation(through.activation);
  check_per_channel("weight", through.weight, x.sizes[1], x.device);
  check_per_channel("bias", through.bias, x.sizes[1], x.device);
}

/// What normalize takes, but for the statistics.
template <class Pass>
void check_normalize(const Pass& p) {
  check_samples("x", p.x);
  check_mask(p.mask, p.x);
  check_whole_output("y", p.y, p.x);
  check_parameters(p);
  check_activation(p.activation);
}

inline void check_moments(const double* mean, const double* var, const double* rstd, double eps,
                          std::int64_t channels) {
  check_eps(eps);
  check_array("mean", mean, channels);
  check_array("var", var, channels);
  check_array("rstd", rstd, channels);
}

/// What is summed in backward. u may be absent.
template <class Pass>
void check_gradient_inputs(const Pass& p) {
  check_samples("x", p.x);
  check_mask(p.mask, p.x);
  check_like("dy", p.dy, p.x);
  check_through(p.through, p.x);
  if (!p.u.absent()) {
    check_whole_output("u", p.u, p.x);
  }
}

inline void check_affine(const MutableTensorView& dweight, const MutableTensorView& dbias,
                         std::int64_t channels) {
  check_per_channel("dweight", dweight, channels, Device::kCpu);
  check_per_channel("dbias", dbias, channels, Device::kCpu);
  check_output("dweight", dweight);
  check_output("dbias", dbias);
}

/// What follows sums in backward.
template <class Pass>
void check_finalize_gradients(const Pass& p, const TensorView& x) {
  check_normalizer(p.mean, p.rstd, x.sizes[1]);
  check_per_channel("weight", p.weight, x.sizes[1], x.device);
  check_affine(p.dweight, p.dbias, x.sizes[1]);
}

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
