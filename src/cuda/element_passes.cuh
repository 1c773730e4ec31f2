// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/element_kernels.cuh"

// What training does to one element, for the kernels of element_kernels.cuh and others.
namespace syncbn::cuda {

/// y = activation((x - mean) * rstd * weight + bias + residual), and the mask of the activation.
template <class T, class AnyOrPlain>
struct NormalizePass {
  using Options = AnyOrPlain;
  static constexpr bool kHasPlain = true;
  static constexpr bool kReadsOther = false;  // of plain options
  static constexpr int kMostChannels = Options::kPlain ? 8 : 4;
  static bool is_plain(const ElementArguments& a) { return a.other.data == nullptr; }
  struct alignas(16) Channel {
    Affine<T> affine;
    Channel() = default;
    SYNCBN_DEVICE Channel(const ElementArguments& a, std::int64_t c)
        : affine(a.pullback.affine.channel<T>(c)) {}
  };
  SYNCBN_DEVICE static T apply(const ElementArguments& a, const ActivationOf<T>& activation,
                               const Channel& channel, unsigned, T x, T residual, bool& passes) {
    Wide<T> v = channel.affine(x);
    if (!Options::kPlain && a.other.data != nullptr) {
      v += widened(residual);
    }
    passes = activation.passes(v);
    return rounded<T>(activation.value(v));
  }
};

/// dx = c1*u + c2*(x - mean) + c3, u being dy come back through the activation; and weight * rstd *
/// u for constant statistics.
template <class T, class AnyOrPlain>
struct InputGradientPass {
  using Options = AnyOrPlain;
  static constexpr bool kHasPlain = true;
  static constexpr bool kReadsOther = true;
  static constexpr int kMostChannels = Options::kPlain ? 8 : 4;
  static bool is_plain(const ElementArguments& a) { return a.coefficients != nullptr; }
  struct alignas(16) Channel {
    ChannelPullback<T> pullback;
    InputGradientOf<T> gradient;
    Wide<T> scale = 0;
    Channel() = default;
    SYNCBN_DEVICE Channel(const ElementArguments& a, std::int64_t c) : pullback(a.pullback, c) {
      const AffineArrays& affine = a.pullback.affine;
      if (!Options::kPlain && a.coefficients == nullptr) {
        scale = static_cast<Wide<T>>(affine.weight.get(c) * affine.rstd[c]);
        return;
      }
      const double* k = a.coefficients + c;
      gradient = InputGradientOf<T>(affine.mean[c], affine.rstd[c],
                                    {k[0], k[a.channels], k[2 * a.channels]});
    }
  };
  SYNCBN_DEVICE static T apply(const ElementArguments& a, const ActivationOf<T>& activation,
                               const Channel& channel, unsigned bits, T x, T dy, bool&) {
    if (!Options::kPlain && a.coefficients == nullptr) {
      return rounded<T>(channel.scale * widened(dy));
    }
    if constexpr (Options::kPlain) {
      if (Options::kRest == NotPositive::kKept) {
        return channel.gradient(dy, x);
      }
      const Affine<T>& affine = channel.pullback.affine();
      const Wide<T> t = affine.centered(x);
      const bool passing = activation.passes(affine.of_centered(t));
      return channel.gradient.of_centered(passing ? widened(dy) : Wide<T>(0), t);
    }
    return channel.gradient(channel.pullback(a.pullback, activation, bits, dy, x), x);
  }
};

}  // namespace syncbn::cuda
