// SPDX-License-Identifier: Apache-2.0
#include "cuda/elements.cuh"
#include "cuda/loading.hpp"

// x and the activation mask from y = leaky_relu((x - mean) * rstd * weight + bias), which was
// written over x.
namespace syncbn::cuda {

template <class T, class>
struct RecoverPass {
  static constexpr bool kHasPlain = false;
  static constexpr int kMostChannels = 8;
  struct Channel {
    Affine<T> affine;
    Channel() = default;
    SYNCBN_DEVICE Channel(const ElementArguments& a, std::int64_t c)
        : affine(a.pullback.affine.channel<T>(c)) {}
  };
  SYNCBN_DEVICE static T apply(const ElementArguments& a, const ActivationOf<T>&,
                               const Channel& channel, unsigned, T y, T, bool& passes) {
    const Wide<T> v = widened(y);
    passes = v > 0;
    const Wide<T> factor = 1 / static_cast<Wide<T>>(a.pullback.activation.slope);
    return channel.affine.inverse(passes ? v : v * factor);
  }
};

void load_recover_input(DType dtype) { load_elements<RecoverPass>(dtype); }

void recover_input(const InputRecovery& p, const Stream& stream) {
  const SampleView from(p.y);
  const SampleView to(p.x);
  if (from.empty() || from.channels == 0) {
    return;
  }
  ElementArguments a = element_arguments("y", from, "x", to, p.activation_mask);
  a.pullback.activation.slope = p.negative_slope;
  a.pullback.affine = {p.mean, p.rstd, channel_array(p.weight, 1.0), channel_array(p.bias, 0.0)};
  start_elements<RecoverPass>("recover_input", p.y.dtype, Plan({&from, &to}, p.activation_mask), a,
                              stream);
}

}  // namespace syncbn::cuda
