#include "cuda/elements.cuh"
#include "cuda/loading.hpp"

// y = activation((x - mean) * rstd * weight + bias + residual), and the mask of the activation.
namespace syncbn::cuda {

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

void normalize(const TensorView& x, const MaskView& mask, const double* mean, const double* rstd,
               const TensorView& weight, const TensorView& bias, const TensorView& residual,
               const MutableTensorView& y, std::uint8_t* activation_mask,
               const Activation& activation, const Stream& stream) {
  check_samples("x", x);
  check_device("x", x);
  check_mask(mask, x);
  check_like("y", y, x);
  check_per_channel("weight", weight, x.sizes[1], x.device);
  check_per_channel("bias", bias, x.sizes[1], x.device);
  if (!residual.absent()) {
    check_like("residual", residual, x);
  }
  check_activation(activation);
  const SampleView from(x, mask);
  if (from.empty() || from.channels == 0) {
    return;
  }
  const SampleView to(y);
  const SampleView added(residual.absent() ? x : residual);
  ElementArguments a;
  a.x = operand("x", from);
  if (!residual.absent()) {
    a.other = operand("residual", added);
  }
  a.out = operand("y", to);
  a.written = mask_bits(activation_mask, from);
  a.pullback.activation = activation;
  a.pullback.affine = {mean, rstd, channel_array(weight, 1.0), channel_array(bias, 0.0)};
  a.counts = from.mask;
  a.samples = from.samples;
  a.channels = from.channels;
  a.plane = from.plane;
  start_elements<NormalizePass>("normalize", x.dtype, Plan({&from, &added, &to}, activation_mask),
                                a, stream);
}

}  // namespace syncbn::cuda
