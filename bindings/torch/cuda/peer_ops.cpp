// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <tuple>

#include "bindings/torch/cuda/message_dtype.hpp"
#include "bindings/torch/cuda/on_device.hpp"
#include "bindings/torch/cuda/peer_group.hpp"
#include "syncbn/passes.hpp"

// What groups whose devices exchange take besides the operators of a step.
namespace syncbn::torch_layer {
namespace {

/// Words of each rank's memory, of its state and of its mark; and where its abort word lies.
std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> peer_words(
    std::int64_t ranks, std::int64_t blocks, std::int64_t slot_words) {
  cuda::PeerGroup group;
  group.ranks = ranks_of(ranks);
  group.blocks = ranks_of(blocks);
  group.slot_words = slot_words;
  return {group.memory_words(), cuda::kPeerStateWords, cuda::kPeerMarkWords, cuda::kAbortWord};
}

void load_peer_exchange(const Tensor& like, std::int64_t blocks) {
  const OnDevice device(like);
  for (int number = 0; number < kDtypeCount; ++number) {
    cuda::load_peer_exchange(static_cast<DType>(number), static_cast<int>(blocks));
  }
}

void exchange_sums(Tensor message, std::int64_t channels, const Tensor& group) {
  const OnDevice device(message);
  std::int64_t* const words = int64_data("message", message, kHeaderWords, Device::kCuda);
  const DType dtype = dtype_of_length("message", message.numel(), channels, message_words);
  cuda::exchange_sums(words, dtype, peer_group("group", group), channels, device.stream());
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def("peer_words(int ranks, int blocks, int slot_words) -> (int, int, int, int)");
  m.def("load_peer_exchange(Tensor like, int blocks) -> ()");
  m.def("exchange_sums(Tensor(a!) message, int channels, Tensor group) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CompositeExplicitAutograd, m) {
  m.impl("peer_words", TORCH_BOX(&syncbn::torch_layer::peer_words));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  using namespace syncbn::torch_layer;
  m.impl("load_peer_exchange", TORCH_BOX(&load_peer_exchange));
  m.impl("exchange_sums", TORCH_BOX(&exchange_sums));
}
