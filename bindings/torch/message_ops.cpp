// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>

#include "bindings/torch/tensors.hpp"
#include "syncbn/step.hpp"

// The operators of messages between ranks. Shapes and dtypes stand beside their fakes in
// python/syncbn/operators.py.
namespace syncbn::torch_layer {

namespace {

Tensor rejection(const Tensor& like, std::int64_t frame) {
  Tensor message =
      empty(like, std::max<std::int64_t>(checked_frame(frame), kHeaderWords), ScalarType::Long);
  std::int64_t* data = int64_data("message", message, kHeaderWords);
  std::fill(data, data + message.numel(), 0);
  rejection_header(0, data);
  return message;
}

Tensor header(const Tensor& merged, std::int64_t ranks) {
  const MessageInfo info =
      syncbn::read_header(int64_data("merged", merged, kHeaderWords), ranks_of(ranks));
  Tensor out = empty(merged, 4, ScalarType::Long);
  std::int64_t* data = int64_data("out", out, 4);
  data[0] = info.count;
  data[1] = info.agree ? 1 : 0;
  data[2] = info.any_rejected ? 1 : 0;
  data[3] = info.any_data ? static_cast<std::int64_t>(info.dtype) : -1;
  return out;
}

Tensor remaining_words(const Tensor& message, const Tensor& merged, std::int64_t ranks,
                       std::int64_t channels, std::int64_t size) {
  const MessageInfo info =
      syncbn::read_header(int64_data("merged", merged, kHeaderWords), ranks_of(ranks));
  check_header(info);
  const std::int64_t most = message_words(DType::kFloat64, channels);
  if (channels > message.numel() || size > most) {
    throw InvalidArgument("channels, size: got " + std::to_string(channels) + " and " +
                          std::to_string(size) + ", expected those of the message");
  }
  const std::int64_t frame = merged.numel();
  if (size < 0) {
    size =
        info.any_data ? std::max<std::int64_t>(0, message_words(info.dtype, channels) - frame) : 0;
  }
  Tensor rest = empty(message, size, ScalarType::Long);
  std::int64_t* data = int64_data("rest", rest, size);
  const std::int64_t* from = int64_data("message", message, kHeaderWords);
  // A rank without samples, of another dtype than the group, brings zeros in the group's length.
  const std::int64_t have = std::clamp<std::int64_t>(message.numel() - frame, 0, size);
  std::copy(from + frame, from + frame + have, data);
  std::fill(data + have, data + size, 0);
  return rest;
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def("rejection(Tensor like, int frame) -> Tensor");
  m.def("header(Tensor merged, int ranks) -> Tensor");
  m.def(
      "remaining_words(Tensor message, Tensor merged, int ranks, int channels, int size) -> "
      "Tensor");
  m.def("cumulative_factor(float batches) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn::torch_layer;
  m.impl("rejection", TORCH_BOX(&rejection));
  m.impl("header", TORCH_BOX(&header));
  m.impl("remaining_words", TORCH_BOX(&remaining_words));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CompositeExplicitAutograd, m) {
  using namespace syncbn::torch_layer;
  m.impl("cumulative_factor", TORCH_BOX(&syncbn::cumulative_factor));
}
