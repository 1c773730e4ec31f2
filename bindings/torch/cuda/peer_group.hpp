// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bindings/torch/tensors.hpp"
#include "syncbn/cuda_peers.hpp"

namespace syncbn::torch_layer {

/// A group of ranks whose devices exchange, as Python hands it on (peer_memory.py): int64 words on
/// the host, which are the fields of PeerGroup in their order, with the memory of each rank last.
inline cuda::PeerGroup peer_group(const char* name, const Tensor& words) {
  constexpr std::int64_t kFields = 7;
  const bool plain = words.is_cpu() && words.scalar_type() == ScalarType::Long &&
                     words.is_contiguous() && words.numel() > kFields;
  const auto* fields = plain ? static_cast<const std::int64_t*>(words.const_data_ptr()) : nullptr;
  if (!plain || fields[1] < 1 || fields[1] > cuda::kMostPeers ||
      words.numel() != kFields + fields[1]) {
    throw InvalidArgument(std::string(name) + ": got " + std::to_string(words.numel()) +
                          " words, expected those of a group whose devices exchange, on the CPU");
  }
  const auto pointer = [&](std::int64_t field) {
    return reinterpret_cast<std::int64_t*>(fields[field]);
  };
  cuda::PeerGroup group;
  group.rank = ranks_of(fields[0]);
  group.ranks = ranks_of(fields[1]);
  group.blocks = ranks_of(fields[2]);
  group.slot_words = fields[3];
  group.timeout = fields[4];
  group.state = pointer(5);
  group.mark = pointer(6);
  for (int rank = 0; rank < group.ranks; ++rank) {
    group.memory[rank] = pointer(kFields + rank);
  }
  return group;
}

/// What lies behind a merged message on CUDA: nothing, or the group in which this rank's message,
/// in the place of the merged one, has yet to be exchanged.
inline std::optional<cuda::PeerGroup> peers_of(const std::optional<Tensor>& rest) {
  return rest.has_value() ? std::optional(peer_group("rest", *rest)) : std::nullopt;
}

}  // namespace syncbn::torch_layer
