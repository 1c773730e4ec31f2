// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#include "statistics/finalize.hpp"
#include "statistics/float_environment.hpp"
#include "statistics/header.hpp"
#include "step/device.hpp"
#include "tensors/channel_values.hpp"

namespace syncbn {
namespace {

std::uint32_t tag_of(const ForwardStep& step) {
  const std::uint64_t call = step.call == nullptr ? 0 : static_cast<std::uint64_t>(*step.call);
  return fingerprint(step.layer, call, Direction::kForward, step.pass.x.sizes[1], step.pass.eps);
}
std::uint32_t tag_of(const BackwardStep& step) {
  return step.info == nullptr ? 0 : backward_fingerprint(static_cast<std::uint32_t>(step.info[1]));
}

void sums(const ForwardStep& step, std::int64_t* message, const Execution& execution) {
  const ForwardPass& p = step.pass;
  const std::uint32_t tag = tag_of(step);
  if (step.statistics == Statistics::kWelford) {
    local_welford(p.x, p.mask, message, tag, execution);
    const std::int64_t words = welford_words(p.x.dtype, p.x.sizes[1]);
    std::int64_t* const records = message + kHeaderWords;
    std::fill(records + words, records + step.ranks * words, 0);
    if (step.rank > 0) {
      std::swap_ranges(records, records + words, records + step.rank * words);
    }
  } else {
    local_moments(p.x, p.mask, message, tag, execution);
  }
  message[kHeaderBackward] = step.backward;
}

void update(const ForwardStep& step, const Execution&) {
  const Running& r = step.running;
  const std::int64_t elements = step.info[0];
  const std::int64_t before = r.batches == nullptr ? 0 : *r.batches;
  const double factor =
      r.momentum.has_value() ? *r.momentum : cumulative_factor(static_cast<double>(before));
  update_running_statistics(r.mean, r.var, step.pass.mean, step.pass.var, step.pass.x.sizes[1],
                            elements, factor);
  if (r.batches != nullptr && elements > 0) {  // last: the call before may lack memory
    *r.batches = before + 1;
  }
  if (r.call != nullptr) {
    *r.call = static_cast<std::int64_t>(static_cast<std::uint64_t>(*r.call) + 1);
  }
  if (r.count != nullptr) {
    *r.count = elements;
  }
}

void statistics(const ForwardStep& step, const Merged& merged, const Execution& execution) {
  const ForwardPass& p = step.pass;
  const std::int64_t channels = p.x.sizes[1];
  const MessageInfo info = header_info(merged.header, merged.ranks);
  check_header(info);
  if (step.statistics == Statistics::kWelford) {
    const DType dtype = info.any_data ? info.dtype : p.x.dtype;
    merge_welford(info, merged.words, p.mean, p.var, p.rstd, channels, merged.ranks,
                  welford_words(dtype, channels), p.eps);
  } else {
    finalize_moments(info, merged.words, p.mean, p.var, p.rstd, channels, p.eps, execution);
  }
  step.info[0] = info.count;
  step.info[1] = merged.header[kHeaderFingerprint] / merged.ranks;  // all ranks have this one
  update(step, execution);
}

void statistics_of_evaluation(const TensorView& running_mean, const TensorView& running_var,
                              double* mean, double* var, double* rstd, double eps,
                              const Execution&) {
  const cpu::FloatEnvironment environment;
  const std::int64_t channels = running_mean.sizes[0];
  load_channel_values(running_mean, 0, channels, 0.0, mean);
  load_channel_values(running_var, 0, channels, 1.0, rstd);
  if (var != nullptr) {
    std::copy_n(rstd, channels, var);
  }
  for (std::int64_t c = 0; c < channels; ++c) {
    rstd[c] = rstd_of(rstd[c], eps);
  }
}

void shares(const ParameterGradients& to, const std::int64_t* own, DType dtype,
            const Execution& execution) {
  affine_gradient_shares(own + kHeaderWords, dtype, to, execution);
}

void gradients(const BackwardStep& step, const ParameterGradients& to, const std::int64_t* own,
               const Merged& merged, const Execution& execution) {
  const MessageInfo info = header_info(merged.header, merged.ranks);
  check_header(info);
  if (step.info != nullptr) {
    check_count(info.count, step.info[0]);
  }
  ParameterGradients global = to;
  if (own != nullptr) {
    shares(to, own, step.pass.x.dtype, execution);
    global.dweight = global.dbias = {};
  }
  finalize_gradients(info, merged.words, global, info.count, execution);
}

Reached whole_forward(const ForwardStep& step, GroupSum& group, const Execution& execution) {
  const std::uint32_t tag = tag_of(step);
  Reached reached = Reached::kOutput;
  if (group.sum != nullptr) {
    reached = forward_in_group(step.pass, group, tag, step.backward, execution);
  } else {
    group.info = forward_of_one_rank(step.pass, execution);
    reached = group.accept && !group.accept(group.info) ? Reached::kExchange : Reached::kOutput;
  }
  step.info[1] = tag;
  if (reached == Reached::kOutput) {
    step.info[0] = group.info.count;
    update(step, execution);
  }
  return reached;
}

Reached whole_backward(const BackwardStep& step, GroupSum& group, const Execution& execution) {
  BackwardPass pass = step.pass;
  pass.count = step.info[0];
  if (group.sum != nullptr) {
    return backward_in_group(pass, group, tag_of(step), execution);
  }
  group.info = backward_of_one_rank(pass, execution);
  return Reached::kOutput;
}

constexpr std::align_val_t kAlignment{64};

constexpr DevicePasses kPasses = {
    .forward_sums = sums,
    .forward_statistics = statistics,
    .update = update,
    .normalize = normalize,
    .evaluation_statistics = statistics_of_evaluation,
    .recover_input = recover_input_on_cpu,
    .gradient_sums =
        [](const BackwardStep& step, const GradientSums& pass, std::int64_t* message, std::int64_t*,
           const Execution& execution) { local_gradients(pass, message, tag_of(step), execution); },
    .gradients = gradients,
    .shares = shares,
    .input_gradient = input_gradient,
    .evaluation_input_gradient = evaluation_input_gradient_on_cpu,
    .forward_at_once = whole_forward,
    .backward_at_once = whole_backward,
    .allocate = [](void*, std::size_t bytes) { return ::operator new(bytes, kAlignment); },
    .release = [](void*, void* memory) noexcept { ::operator delete(memory, kAlignment); },
};

}  // namespace

const DevicePasses& cpu_passes() { return kPasses; }

}  // namespace syncbn
