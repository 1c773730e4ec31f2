// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_memory.hpp"
#include "cuda/passes.hpp"
#include "step/device.hpp"

namespace syncbn {
namespace {

cuda::Stream on(const Execution& execution) { return {execution.stream}; }

void sums(const ForwardStep& step, std::int64_t* message, const Execution& execution) {
  const ForwardPass& p = step.pass;
  cuda::ForwardCall call{step.layer, step.call, p.eps, step.backward};
  if (step.statistics == Statistics::kWelford) {
    const std::int64_t words = welford_words(p.x.dtype, p.x.sizes[1]);
    call.place = step.rank * words;
    if (step.ranks > 1) {
      cuda::zero_on(execution.stream, message + kHeaderWords,
                    static_cast<std::size_t>(step.ranks * words) * sizeof(std::int64_t));
    }
    cuda::local_welford(p.x, p.mask, call, message, on(execution));
  } else {
    cuda::local_moments(p.x, p.mask, call, message, step.workspace, on(execution));
  }
}

void update(const ForwardStep& step, const Execution& execution) {
  cuda::update_running_statistics(step.running, step.pass.mean, step.pass.var, step.info,
                                  step.pass.x.sizes[1], on(execution));
}

void statistics(const ForwardStep& step, const Merged& merged, const Execution& execution) {
  const ForwardPass& p = step.pass;
  const std::int64_t channels = p.x.sizes[1];
  if (step.statistics == Statistics::kWelford) {
    cuda::merge_welford(merged.header, merged.dtype, merged.ranks, p.mean, p.var, p.rstd, step.info,
                        channels, p.eps, on(execution));
    update(step, execution);
  } else {
    cuda::finalize_moments(merged.header, merged.dtype, merged.ranks, p.mean, p.var, p.rstd,
                           step.info, channels, p.eps, step.running, on(execution));
  }
}

constexpr DevicePasses kPasses = {
    .forward_sums = sums,
    .forward_statistics = statistics,
    .update = update,
    .normalize = [](const Normalization& p, const Execution& e) { cuda::normalize(p, on(e)); },
    .evaluation_statistics =
        [](const TensorView& running_mean, const TensorView& running_var, double* mean, double* var,
           double* rstd, double eps, const Execution& e) {
          if (var != nullptr) {
            cuda::evaluation_statistics(running_var, running_var, var, rstd, eps, on(e));
          }
          cuda::evaluation_statistics(running_mean, running_var, mean, rstd, eps, on(e));
        },
    .recover_input = [](const InputRecovery& p,
                        const Execution& e) { cuda::recover_input(p, on(e)); },
    .gradient_sums =
        [](const BackwardStep& step, const GradientSums& p, std::int64_t* message,
           std::int64_t* copy, const Execution& e) {
          cuda::local_gradients(p, step.info, message, step.workspace, on(e), copy);
        },
    .gradients =
        [](const BackwardStep& step, const ParameterGradients& to, const std::int64_t* own,
           const Merged& merged, const Execution& e) {
          cuda::finalize_gradients(merged.header, merged.dtype, merged.ranks, own, step.info, to,
                                   on(e));
        },
    .shares =
        [](const ParameterGradients& to, const std::int64_t* own, DType dtype, const Execution& e) {
          cuda::finalize_gradients(own, dtype, 1, nullptr, nullptr, to, on(e));
        },
    .input_gradient = [](const InputGradient& p,
                         const Execution& e) { cuda::input_gradient(p, on(e)); },
    .evaluation_input_gradient =
        [](const TensorView& u, const MaskView& mask, const double* rstd, const TensorView& weight,
           const MutableTensorView& dx, const Execution& e) {
          cuda::evaluation_input_gradient(u, mask, rstd, weight, dx, on(e));
        },
    .workspace_words = cuda::workspace_words,
    .allocate = cuda::allocate_on,
    .release = cuda::release_on,
    .zero = cuda::zero_on,
    .copy = cuda::copy_on,
    .fetch = cuda::fetch_on,
    .bring = cuda::bring_on,
    .stream_number = cuda::stream_number,
};

}  // namespace

const DevicePasses& cuda_passes() { return kPasses; }

}  // namespace syncbn
