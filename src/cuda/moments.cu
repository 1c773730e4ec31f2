// SPDX-License-Identifier: Apache-2.0
#include "cuda/sum_launch.cuh"

// Sums of x and x*x as exact integers, packed into a message.
namespace syncbn::cuda {

void local_moments(const TensorView& x, const MaskView& mask, const ForwardCall& call,
                   std::int64_t* message, std::int64_t* workspace, const Stream& stream) {
  const SampleView samples(x, mask);
  SumsArguments a;
  a.u = operand("x", samples);
  a.v = a.u;
  if (prepare_sums(a, samples, header_of(call), message, workspace, stream)) {
    start_sums<false>(x.dtype, Plan({&samples}, nullptr), a, stream);
  }
}

void load_moments(DType dtype) { load_sums<false>(dtype); }

std::int64_t workspace_words(DType dtype, std::int64_t channels) {
  return channels * (format_of(dtype).slots() + 3);
}

}  // namespace syncbn::cuda
