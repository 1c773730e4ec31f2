// SPDX-License-Identifier: Apache-2.0
#include "cuda/elements.cuh"
#include "cuda/loading.hpp"

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

void load_normalize(DType dtype) { load_elements<NormalizePass>(dtype); }

void normalize(const Normalization& p, const Stream& stream) {
  const SampleView from(p.x, p.mask);
  if (from.empty() || from.channels == 0) {
    return;
  }
  const SampleView to(p.y);
  const SampleView added(p.residual.absent() ? p.x : p.residual);
  ElementArguments a = element_arguments("x", from, "y", to, p.activation_mask);
  if (!p.residual.absent()) {
    a.other = operand("residual", added);
  }
  a.pullback.activation = p.activation;
  a.pullback.affine = {p.mean, p.rstd, channel_array(p.weight, 1.0), channel_array(p.bias, 0.0)};
  start_elements<NormalizePass>("normalize", p.x.dtype,
                                Plan({&from, &added, &to}, p.activation_mask), a, stream);
}

}  // namespace syncbn::cuda
