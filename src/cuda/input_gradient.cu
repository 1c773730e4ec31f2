// SPDX-License-Identifier: Apache-2.0
#include "cuda/elements.cuh"
#include "cuda/loading.hpp"

namespace syncbn::cuda {

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

/// coefficients: null for constant statistics.
static void start_gradient(const TensorView& dy, const TensorView& x, const MaskView& mask,
                           const MutableTensorView& dx, const PullbackArrays& pullback,
                           const double* coefficients, const Stream& stream) {
  const SampleView samples(x, mask);
  if (samples.empty() || samples.channels == 0) {
    return;
  }
  const SampleView gradient(dy);
  const SampleView to(dx);
  ElementArguments a = element_arguments("x", samples, "dx", to, nullptr);
  a.other = operand("dy", gradient);
  a.pullback = pullback;
  a.coefficients = coefficients;
  start_elements<InputGradientPass>(
      "input_gradient", x.dtype, Plan({&samples, &gradient, &to}, pullback.mask.data), a, stream);
}

void load_input_gradient(DType dtype) { load_elements<InputGradientPass>(dtype); }

void input_gradient(const InputGradient& p, const Stream& stream) {
  start_gradient(p.dy, p.x, p.mask, p.dx,
                 pullback_arrays(p.through, p.mean, p.rstd, SampleView(p.x)), p.coefficients,
                 stream);
}

void evaluation_input_gradient(const TensorView& u, const MaskView& mask, const double* rstd,
                               const TensorView& weight, const MutableTensorView& dx,
                               const Stream& stream) {
  PullbackArrays scale;
  scale.affine.rstd = rstd;
  scale.affine.weight = channel_array(weight, 1.0);
  start_gradient(u, u, mask, dx, scale, nullptr, stream);
}

}  // namespace syncbn::cuda
