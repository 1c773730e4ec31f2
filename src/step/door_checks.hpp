// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "statistics/header.hpp"
#include "syncbn/step.hpp"
#include "tensors/activation_mask.hpp"
#include "tensors/checks.hpp"
#include "tensors/sample_view.hpp"

// What each door of syncbn/step.hpp checks, on both devices, before anything is written. What is
// behind the doors takes arguments as they are.
namespace syncbn {

/// The statistics that normalize.
inline void check_normalizer(const double* mean, const double* rstd, std::int64_t channels) {
  check_array("mean", mean, channels);
  check_array("rstd", rstd, channels);
}

/// Of the CPU, whose header says which words there are. Without elements there may be none.
inline void check_merged(const Merged& merged, const TensorView& x, Statistics statistics) {
  check_ranks(merged.ranks);
  check_dtype("merged.dtype", merged.dtype);
  if (merged.header == nullptr || x.device != Device::kCpu) {
    return;
  }
  const MessageInfo info = header_info(merged.header, merged.ranks);
  if (!usable(info) || info.count == 0) {
    return;
  }
  if (statistics == Statistics::kWelford) {
    check_array("records", merged.words, merged.ranks);
  } else {
    check_array("words", merged.words, x.sizes[1] * words_per_channel(info.dtype));
  }
}

/// A rank alone needs no words on the CPU, and only `message` on CUDA.
inline void check_group(const GroupSum& group, const TensorView& x) {
  check_ranks(group.ranks);
  if (group.ranks > 1) {
    check_array("sum", group.sum, 1);
  }
  check_timeout(group.slice, "slice", 0);
  const std::int64_t expected = message_words(x.dtype, x.sizes[1]);
  const auto check_words = [&](const char* name, std::span<std::int64_t> words) {
    if (static_cast<std::int64_t>(words.size()) != expected) {
      refuse(name, std::to_string(words.size()) + " words", std::to_string(expected));
    }
  };
  if (group.sum != nullptr || x.device == Device::kCuda) {
    check_words("message", group.message);
  }
  if (group.sum != nullptr) {
    check_words("merged", group.merged);
  }
}

// Forward.

/// All numbers of a step, before any of them is used or tells the device.
inline void check_step(const ForwardStep& step) {
  const TensorView& x = step.pass.x;
  const Running& running = step.running;
  check_samples("x", x);
  check_statistics(step.statistics);
  check_eps(step.pass.eps);
  check_activation(step.pass.activation);
  check_entries("running_mean", running.mean, x);
  check_entries("running_var", running.var, x);
  if (running.momentum.has_value()) {
    check_momentum(*running.momentum);
  }
  check_counter(running, x.device);
}

/// What y is written from, and y.
inline void check_normalize(const ForwardPass& p) {
  check_mask(p.mask, p.x);
  check_whole_output("y", p.y, p.x);
  check_parameters(p);
  check_normalizer(p.mean, p.rstd, p.x.sizes[1]);
}

/// Where statistics are written to.
inline void check_moments(const ForwardStep& step) {
  check_array("info", step.info, kInfoWords);
  check_normalizer(step.pass.mean, step.pass.rstd, step.pass.x.sizes[1]);
  check_array("var", step.pass.var, step.pass.x.sizes[1]);
}

inline void check_forward_begin(const ForwardStep& step, const std::int64_t* message) {
  const TensorView& x = step.pass.x;
  check_step(step);
  check_ranks(step.ranks);
  check_rank(step.rank, step.ranks);
  check_mask(step.pass.mask, x);
  check_array("message", message, forward_words(step.statistics, x.dtype, x.sizes[1], step.ranks));
}

inline void check_forward_finish(const ForwardStep& step, const Merged& merged) {
  check_step(step);
  check_merged(merged, step.pass.x, step.statistics);
  if (merged.header != nullptr) {
    check_moments(step);
  }
  if (merged.header == nullptr || !step.pass.y.absent()) {
    check_normalize(step.pass);
  }
}

inline void check_forward_update(const ForwardStep& step) {
  const TensorView& x = step.pass.x;
  check_step(step);
  check_array("info", step.info, kInfoWords);
  if (x.device == Device::kCpu) {
    check_elements_over_ranks("count", step.info[0]);
  }
  check_array("mean", step.pass.mean, step.running.mean.absent() ? 0 : x.sizes[1]);
  check_array("var", step.pass.var, step.running.var.absent() ? 0 : x.sizes[1]);
}

inline void check_forward_at_once(const ForwardStep& step, const GroupSum& group) {
  check_step(step);
  check_group(group, step.pass.x);
  check_moments(step);
  check_normalize(step.pass);
}

inline void check_evaluation(const TensorView& running_mean, const TensorView& running_var,
                             const double* mean, const double* rstd, double eps) {
  if (running_mean.sizes.size() != 1) {
    refuse("running_mean", std::to_string(running_mean.sizes.size()) + " axes", "1");
  }
  const std::int64_t channels = running_mean.sizes[0];
  check_channels(channels);
  check_per_channel("running_mean", running_mean, channels, running_mean.device);
  check_per_channel("running_var", running_var, channels, running_mean.device);
  check_array("running_var", running_var.data, channels);
  check_normalizer(mean, rstd, channels);
  check_eps(eps);
}

inline void check_recovery(const InputRecovery& p) {
  check_samples("y", p.y);
  check_per_channel("weight", p.weight, p.y.sizes[1], p.y.device);
  check_per_channel("bias", p.bias, p.y.sizes[1], p.y.device);
  check_normalizer(p.mean, p.rstd, p.y.sizes[1]);
  check_whole_output("x", p.x, p.y);
  if (p.negative_slope == 0 || p.negative_slope - p.negative_slope != 0) {
    refuse("negative_slope", std::to_string(p.negative_slope), "a finite number other than 0");
  }
  const ActivationMaskLayout layout{SampleView(p.y)};
  check_array("activation_mask", p.activation_mask, layout.bytes);
  if (ActivationMaskLayout(SampleView(p.x)).by_rows != layout.by_rows) {
    refuse("x", "strides of another order than y's", "y's");
  }
}

// Backward.

inline void check_step(const BackwardStep& step) {
  check_samples("x", step.pass.x);
  check_activation(step.pass.through.activation);
  if (step.info != nullptr && step.pass.x.device == Device::kCpu) {
    check_elements_over_ranks("info", step.info[0]);
  }
}

inline void check_through(const BackwardPass& p) {
  check_per_channel("weight", p.through.weight, p.x.sizes[1], p.x.device);
  check_per_channel("bias", p.through.bias, p.x.sizes[1], p.x.device);
}

/// What is summed.
inline void check_gradient_inputs(const BackwardPass& p) {
  check_mask(p.mask, p.x);
  check_like("dy", p.dy, p.x);
  check_through(p);
  if (!p.u.absent()) {
    check_whole_output("u", p.u, p.x);
  }
  const ActivationGradient& through = p.through;
  if (through.activation.kind != ActivationKind::kNone && through.activation_mask == nullptr) {
    check_normalizer(p.mean, p.rstd, p.x.sizes[1]);  // the signs are computed again
  }
}

/// Where gradients of weight and bias are written to. On the CPU those of a rank's own samples come
/// without coefficients.
inline void check_parameter_gradients(const BackwardStep& step, bool coefficients) {
  const BackwardPass& p = step.pass;
  check_normalizer(p.mean, p.rstd, p.x.sizes[1]);
  check_entries("dweight", p.dweight, p.x);
  check_entries("dbias", p.dbias, p.x);
  if (coefficients || p.x.device == Device::kCuda) {
    check_array("coefficients", step.coefficients, 3 * p.x.sizes[1]);
  }
}

/// Where dx is written to, and what it is multiplied with.
inline void check_input_gradient(const BackwardPass& p) {
  check_array("rstd", p.rstd, p.x.sizes[1]);
  check_per_channel("weight", p.weight, p.x.sizes[1], p.x.device);
  check_whole_output("dx", p.dx, p.x);
}

inline void check_backward_begin(const BackwardStep& step, const std::int64_t* message) {
  const TensorView& x = step.pass.x;
  check_step(step);
  check_gradient_inputs(step.pass);
  check_array("message", message, message_words(x.dtype, x.sizes[1]));
}

inline void check_backward_finish(const BackwardStep& step, const std::int64_t* own,
                                  const Merged& merged) {
  const BackwardPass& p = step.pass;
  const bool summed = merged.header != nullptr;
  check_step(step);
  check_merged(merged, p.x, Statistics::kReproducible);
  if (summed && p.share && own == nullptr && !(p.dweight.absent() && p.dbias.absent())) {
    refuse("own", "null", "the message that this rank sent, which has its share");
  }
  if (summed || own != nullptr) {
    check_parameter_gradients(step, summed);
  }
  if (summed || !p.dx.absent()) {
    check_mask(p.mask, p.x);
    check_like(p.u.absent() ? "dy" : "u", p.u.absent() ? p.dy : TensorView(p.u), p.x);
    check_input_gradient(p);
  }
  if (summed && p.u.absent()) {
    check_through(p);
  }
}

inline void check_backward_at_once(const BackwardStep& step, const GroupSum& group) {
  check_step(step);
  check_group(group, step.pass.x);
  check_array("info", step.info, kInfoWords);
  check_gradient_inputs(step.pass);
  check_parameter_gradients(step, false);
  check_input_gradient(step.pass);
}

}  // namespace syncbn
