// SPDX-License-Identifier: Apache-2.0
#include "cuda/sum_launch.cuh"

// Sums of u and u*x, u being dy come back through the activation.
namespace syncbn::cuda {

void local_gradients(const GradientSums& p, const std::int64_t* info, std::int64_t* message,
                     std::int64_t* workspace, const Stream& stream, std::int64_t* copy) {
  const SampleView samples(p.x, p.mask);
  const SampleView gradient(p.dy);
  const SampleView kept(p.u.absent() ? p.x : TensorView(p.u));
  SumsArguments a;
  a.u = operand("dy", gradient);
  a.v = operand("x", samples);
  if (!p.u.absent()) {
    a.kept = operand("u", kept);
  }
  a.pullback = pullback_arrays(p.through, p.mean, p.rstd, samples);
  a.copy = copy;
  MessageHeader header;
  header.direction = Direction::kBackward;
  header.info = info;
  if (prepare_sums(a, samples, header, message, workspace, stream)) {
    start_sums<true>(p.x.dtype, Plan({&samples, &gradient, &kept}, p.through.activation_mask), a,
                     stream);
  }
}

void load_gradient_sums(DType dtype) { load_sums<true>(dtype); }

}  // namespace syncbn::cuda
