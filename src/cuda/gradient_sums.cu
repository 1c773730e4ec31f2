#include "cuda/sum_launch.cuh"

// Sums of u and u*x, u being dy come back through the activation.
namespace syncbn::cuda {

void local_gradients(const TensorView& dy, const TensorView& x, const MaskView& mask,
                     const double* mean, const double* rstd, const ActivationGradient& through,
                     const MutableTensorView& u, const std::int64_t* info, std::int64_t* message,
                     std::int64_t* workspace, const Stream& stream, std::int64_t* copy) {
  check_samples("x", x);
  check_device("x", x);
  check_mask(mask, x);
  check_like("dy", dy, x);
  check_pullback(through, x);
  if (!u.absent()) {
    check_like("u", u, x);
  }
  const SampleView samples(x, mask);
  const SampleView gradient(dy);
  const SampleView kept(u.absent() ? x : TensorView(u));
  SumsArguments a;
  a.u = operand("dy", gradient);
  a.v = operand("x", samples);
  if (!u.absent()) {
    a.kept = operand("u", kept);
  }
  a.pullback = pullback_arrays(through, mean, rstd, samples);
  a.copy = copy;
  MessageHeader header;
  header.direction = Direction::kBackward;
  header.info = info;
  if (prepare_sums(a, samples, header, message, workspace, stream)) {
    start_sums<true>(x.dtype, Plan({&samples, &gradient, &kept}, through.activation_mask), a,
                     stream);
  }
}

void load_gradient_sums(DType dtype) { load_sums<true>(dtype); }

}  // namespace syncbn::cuda
