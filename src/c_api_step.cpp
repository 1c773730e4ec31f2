// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "c_api_arguments.hpp"
#include "cpu/scratch.hpp"
#include "layer.hpp"
#include "syncbn/message.hpp"
#include "syncbn/step.hpp"

// A layer's calls in two halves: its checks around the step's doors. No arithmetic.
namespace syncbn::c_api {
namespace {

/// What a forward hands to its backward.
void check_kept(const syncbn_step& s, const BatchNorm::Options& options, bool residual) {
  require_array("mean", s.mean, options.channels);
  require_array("rstd", s.rstd, options.channels);
  require_array("info", s.info, kInfoWords);
  const bool needs_mask = residual && options.activation.kind != ActivationKind::kNone;
  require_array("activation_mask", s.activation_mask, needs_mask ? 1 : 0);
}

ForwardStep forward_step(const syncbn_step& s, const BatchNorm::Options& options,
                         const syncbn_forward_arguments* arguments) {
  const BatchNorm::Forward f = forward_of(arguments);
  check_layer_forward(options, f);
  check_on_cpu(f.x.device);
  const bool residual = !f.residual.absent();
  check_kept(s, options, residual);
  required("call", s.call);
  require_array("var", s.var, options.channels);
  const std::uint64_t layer =
      layer_identity(number_of(std::string(options.name)), options.activation, options.statistics,
                     residual, !f.weight.absent(), !f.bias.absent());
  return {{f.x, f.mask, f.weight, f.bias, f.residual, f.y, s.activation_mask, s.mean, s.var, s.rstd,
           options.eps, options.activation},
          options.statistics,
          layer,
          s.call,
          0,
          {f.running_mean, f.running_var, f.num_batches_tracked, s.call, nullptr, options.momentum},
          s.info};
}

BackwardStep backward_step(const syncbn_step& s, const BatchNorm::Options& options,
                           const syncbn_backward_arguments* arguments) {
  const BatchNorm::Backward b = backward_of(arguments);
  check_backward(b);
  check_on_cpu(b.x.device);
  if (b.x.sizes[1] != options.channels) {
    refuse("x", std::to_string(b.x.sizes[1]) + " channels",
           "those of the layer, " + std::to_string(options.channels));
  }
  check_kept(s, options, !b.dresidual.absent());
  const ActivationGradient through{options.activation, b.weight, b.bias, s.activation_mask};
  return {{b.dy, b.x, b.mask, s.mean, s.rstd, through, b.weight, b.dresidual, b.dx, b.dweight,
           b.dbias, b.affine == AffineGradients::kShare},
          s.info};
}

Merged merged_of(const syncbn_step& s, const std::int64_t* words) {
  return {.header = &required("merged", words), .words = words + kHeaderWords, .ranks = s.ranks};
}

/// body(step, options): a half of a call; errors carry the layer. message: of the first half; what
/// goes wrong there the others learn from it.
template <class Body>
syncbn_status half(const syncbn_step* given, const char* direction, std::int64_t* message,
                   const Body& body) {
  const syncbn_status status = guarded([&] {
    const syncbn_step& s = sized("step", given);
    const BatchNorm::Options options = options_of(s.options);
    const bool numbered = std::string_view(direction) == "forward" && s.call != nullptr;
    in_call(std::string(options.name), numbered ? *s.call : -1, direction, [&] {
      check_layer(options, s.ranks);
      body(s, options);
    });
  });
  if (status != SYNCBN_OK && message != nullptr) {
    rejection_header(message);
  }
  return status;
}

}  // namespace
}  // namespace syncbn::c_api

// What follows is C.
using namespace syncbn;
using namespace syncbn::c_api;

syncbn_status syncbn_step_sizes(const syncbn_tensor* x, int32_t statistics, int64_t* forward,
                                int64_t* backward, int64_t* activation_mask) {
  return guarded([&] {
    const TensorView view = samples("x", x);
    const int64_t bytes = activation_mask_bytes(view);
    const int64_t words = forward_words(statistics_of(statistics), view.dtype, view.sizes[1]);
    const int64_t words_back = message_words(view.dtype, view.sizes[1]);
    for (const auto& [to, size] :
         {std::pair(forward, words), {backward, words_back}, {activation_mask, bytes}}) {
      if (to != nullptr) {
        *to = size;
      }
    }
  });
}

syncbn_status syncbn_forward_begin(const syncbn_step* step,
                                   const syncbn_forward_arguments* arguments, int64_t* message,
                                   syncbn_executor* executor) {
  return half(step, "forward", message, [&](const auto& s, const auto& options) {
    forward_begin(forward_step(s, options, arguments), &required("message", message),
                  execution_of(executor));
  });
}

syncbn_status syncbn_forward_finish(const syncbn_step* step,
                                    const syncbn_forward_arguments* arguments,
                                    const int64_t* merged, syncbn_executor* executor) {
  return half(step, "forward", nullptr, [&](const auto& s, const auto& options) {
    forward_finish(forward_step(s, options, arguments), merged_of(s, merged),
                   execution_of(executor));
  });
}

syncbn_status syncbn_backward_begin(const syncbn_step* step,
                                    const syncbn_backward_arguments* arguments, int64_t* message,
                                    syncbn_executor* executor) {
  return half(step, "backward", message, [&](const auto& s, const auto& options) {
    backward_begin(backward_step(s, options, arguments), &required("message", message), nullptr,
                   execution_of(executor));
  });
}

syncbn_status syncbn_backward_finish(const syncbn_step* step,
                                     const syncbn_backward_arguments* arguments, const int64_t* own,
                                     const int64_t* merged, syncbn_executor* executor) {
  return half(step, "backward", nullptr, [&](const auto& s, const auto& options) {
    BackwardStep back = backward_step(s, options, arguments);
    const cpu::ScratchArray<double> coefficients(static_cast<std::size_t>(3 * options.channels));
    back.coefficients = coefficients.data();
    backward_finish(back, own, merged_of(s, merged), execution_of(executor));
  });
}
