// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/torch/new_output.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/passes.hpp"

// What the layer's operators share.
namespace syncbn::torch_layer {

/// A message as the exchange left it: the first part, and the words beyond the frame, if any.
class Merged {
 public:
  Merged(const Tensor& first, const std::optional<Tensor>& rest, std::int64_t ranks,
         std::int64_t channels)
      : info(read_header(int64_data("merged", first, kHeaderWords), ranks_of(ranks))) {
    check_header(info);
    const std::int64_t needed = info.any_data ? message_words(info.dtype, channels) : kHeaderWords;
    if (!rest.has_value()) {
      words_ = int64_data("merged", first, needed) + kHeaderWords;
      return;
    }
    const std::int64_t* first_words = int64_data("merged", first, kHeaderWords);
    const std::int64_t framed = std::min(first.numel(), needed);
    const std::int64_t* rest_words = int64_data("rest", *rest, needed - framed);
    joined_.assign(first_words + kHeaderWords, first_words + framed);
    joined_.insert(joined_.end(), rest_words, rest_words + needed - framed);
    words_ = joined_.data();
  }

  const std::int64_t* words() const { return words_; }
  MessageInfo info;

 private:
  const std::int64_t* words_;
  std::vector<std::int64_t> joined_;
};

inline std::int64_t channels_of(const Tensor& x) {
  if (x.dim() < 2) {
    throw InvalidArgument("x: got " + std::to_string(x.dim()) +
                          " axes, expected at least 2 (N, C, spatial...)");
  }
  return x.size(1);
}

/// Of a forward of that layer; `call` counts them, where they are counted.
inline std::uint32_t forward_fingerprint(std::int64_t layer, const std::optional<Tensor>& call,
                                         std::int64_t channels, double eps) {
  const std::int64_t number = call.has_value() ? *int64_data("call", *call, 1) : 0;
  return fingerprint(static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(number),
                     Direction::kForward, channels, eps);
}

/// Room for the activation mask of any tensor of x's shape, whatever its layout, so that a shape
/// alone decides it.
inline std::int64_t room_for_activation_mask(const Tensor& x) {
  const std::int64_t samples = x.size(0);
  const std::int64_t channels = x.size(1);
  std::int64_t plane = 1;
  for (std::int64_t axis = 2; axis < x.dim(); ++axis) {
    plane *= x.size(axis);
  }
  return samples * std::max(channels * ((plane + 7) / 8), plane * ((channels + 7) / 8));
}

/// The arguments that say how dy comes back through the activation.
inline ActivationGradient through(const Tensor& x, const std::optional<Tensor>& weight,
                                  const std::optional<Tensor>& bias,
                                  const std::optional<Tensor>& activation_mask,
                                  std::int64_t activation, double negative_slope) {
  ActivationGradient out{activation_of(activation, negative_slope), view("weight", weight),
                         view("bias", bias)};
  if (activation_mask.has_value() && activation_mask->numel() > 0) {
    if (activation_mask->scalar_type() != ScalarType::Byte || !activation_mask->is_contiguous() ||
        activation_mask->is_cpu() != x.is_cpu() ||
        activation_mask->numel() != room_for_activation_mask(x)) {
      throw InvalidArgument("activation_mask: expected what normalize returned for this input");
    }
    check_storage("activation_mask", *activation_mask);
    out.activation_mask = static_cast<const std::uint8_t*>(activation_mask->const_data_ptr());
  }
  return out;
}

/// dweight or dbias: C entries, or none if nobody asks for it.
inline Tensor new_parameter_gradient(const Tensor& x, std::optional<ScalarType> dtype) {
  return empty(x, dtype ? channels_of(x) : 0, dtype.value_or(ScalarType::Float));
}

inline MutableTensorView wanted(const char* name, Tensor& tensor, std::optional<ScalarType> dtype) {
  return dtype ? mutable_view(name, tensor) : MutableTensorView();
}

inline std::uint8_t* byte_data(Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<std::uint8_t*>(tensor.mutable_data_ptr());
}

/// Zeros: what no element uses has to be equal from run to run as well.
inline Tensor new_activation_mask(const Tensor& x, bool wanted) {
  Tensor out = empty(x, wanted ? room_for_activation_mask(x) : 0, ScalarType::Byte);
  if (wanted) {
    std::fill_n(byte_data(out), out.numel(), std::uint8_t{0});
  }
  return out;
}

/// Tensors that an operator writes to, made before an exchange: after it there may be no memory,
/// and the other ranks go on.
using Room = std::optional<std::vector<Tensor>>;

inline void check_room(const std::vector<Tensor>& room, std::size_t size) {
  if (room.size() != size) {
    throw InvalidArgument("room: got " + std::to_string(room.size()) + " tensors, expected " +
                          std::to_string(size));
  }
}

/// Statistics of a batch that all ranks share.
struct Statistics {
  explicit Statistics(const Tensor& x)
      : mean(empty(x, channels_of(x), ScalarType::Double)),
        var(empty(x, channels_of(x), ScalarType::Double)),
        rstd(empty(x, channels_of(x), ScalarType::Double)),
        info(empty(x, 2, ScalarType::Long)) {}
  /// Of these tensors, of which the first is an output.
  Statistics(const std::vector<Tensor>& room, std::int64_t channels)
      : mean(room[1]), var(room[2]), rstd(room[3]), info(room[4]) {
    for (const Tensor* tensor : {&mean, &var, &rstd}) {
      (void)double_data("room", *tensor, channels);
    }
    (void)int64_data("room", info, 2);
  }

  /// merged: the messages' sum; message: this rank's. Throws on every rank if there is only one
  /// element.
  void set_info(const MessageInfo& merged, const Tensor& message) {
    if (merged.count == 1) {
      throw InvalidArgument(
          "x: got 1 value per channel over all ranks, expected more than 1 when training");
    }
    std::int64_t* values = int64_data("info", info, 2);
    values[0] = merged.count;
    values[1] = int64_data("message", message, kHeaderWords)[1];
  }
  Tensor mean, var, rstd;
  Tensor info;  ///< count and fingerprint
};

/// What a forward gives; the activation mask is empty unless backward needs it.
struct ForwardOutputs : Statistics {
  ForwardOutputs(const Tensor& x, bool with_activation_mask)
      : Statistics(x),
        y(new_output(x)),
        activation_mask(new_activation_mask(x, with_activation_mask)) {}
  ForwardOutputs(const std::vector<Tensor>& room, const Tensor& x, bool with_activation_mask)
      : Statistics(room, channels_of(x)), y(room[0]), activation_mask(room[5]) {
    const std::int64_t bytes = with_activation_mask ? room_for_activation_mask(x) : 0;
    if (activation_mask.scalar_type() != ScalarType::Byte || !activation_mask.is_cpu() ||
        !activation_mask.is_contiguous() || activation_mask.numel() != bytes) {
      throw InvalidArgument("room: expected what forward_outputs gave for this input");
    }
    check_storage("room", activation_mask);
  }
  Tensor y, activation_mask;
};

inline ForwardOutputs outputs_of(const Room& room, const Tensor& x,
                                 const std::optional<Tensor>& residual,
                                 const Activation& activation) {
  const bool with_mask = residual.has_value() && activation.kind != ActivationKind::kNone;
  if (!room.has_value()) {
    return ForwardOutputs(x, with_mask);
  }
  check_room(*room, 6);
  return ForwardOutputs(*room, x, with_mask);
}

/// y from the statistics in `out`, and all of it.
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> normalized(
    const Tensor& x, ForwardOutputs& out, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
    const Activation& activation, const std::optional<Tensor>& mask) {
  TorchExecutor executor;
  syncbn::normalize({view("x", x), mask_view(mask), double_data(out.mean), double_data(out.rstd),
                     view("weight", weight), view("bias", bias), view("residual", residual),
                     mutable_view("y", out.y), byte_data(out.activation_mask), activation},
                    executor);
  return {out.y, out.mean, out.var, out.rstd, out.info, out.activation_mask};
}

}  // namespace syncbn::torch_layer
