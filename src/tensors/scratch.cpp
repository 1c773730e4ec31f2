// SPDX-License-Identifier: Apache-2.0
#include "tensors/scratch.hpp"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

namespace syncbn::cpu {
namespace {

/// A thread keeps so many blocks, more than one direction has at a time, each of at most this size
/// (that of a message of 12,000 channels of float32, 3,000 of float64).
constexpr std::size_t kMostBlocks = 16;
constexpr std::size_t kMostBytes = std::size_t{2} << 20;
constexpr auto kLine = static_cast<std::size_t>(kCacheLine);

void release(void* data) { ::operator delete(data, std::align_val_t(kLine)); }

struct Block {
  void* data = nullptr;
  std::size_t bytes = 0;
};

struct KeptBlocks {
  std::array<Block, kMostBlocks> blocks;
  ~KeptBlocks() {
    for (const Block& block : blocks) {
      release(block.data);
    }
  }
};
thread_local KeptBlocks kept;

}  // namespace

Scratch::Scratch(std::size_t bytes) : bytes_(std::max(bytes + kLine - 1, kLine) / kLine * kLine) {
  Block* best = nullptr;
  for (Block& block : kept.blocks) {
    if (block.bytes >= bytes_ && (best == nullptr || block.bytes < best->bytes)) {
      best = &block;
    }
  }
  if (best != nullptr) {
    data_ = std::exchange(best->data, nullptr);
    bytes_ = std::exchange(best->bytes, 0);
    return;
  }
  data_ = ::operator new(bytes_, std::align_val_t(kLine));
}

Scratch::~Scratch() {
  if (bytes_ <= kMostBytes) {
    // In the place of the smallest, which is often an empty one.
    Block& least =
        *std::min_element(kept.blocks.begin(), kept.blocks.end(),
                          [](const Block& a, const Block& b) { return a.bytes < b.bytes; });
    if (least.bytes < bytes_) {
      std::swap(least.data, data_);
      least.bytes = bytes_;
    }
  }
  release(data_);
}

}  // namespace syncbn::cpu
