#include "cpu/scratch.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>
#include <utility>

#include "cpu/kernels.hpp"

namespace syncbn::cpu {
namespace {

/// A thread keeps four blocks, as many as one direction has at a time, each of at most
/// this size (that of the sums of 3,000 channels).
constexpr std::size_t kMostBytes = std::size_t{256} << 10;
constexpr auto kLine = static_cast<std::size_t>(kCacheLine);

struct Block {
  void* data = nullptr;
  std::size_t bytes = 0;
};

struct KeptBlocks {
  std::array<Block, 4> blocks;
  ~KeptBlocks() {
    for (const Block& block : blocks) {
      std::free(block.data);
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
  data_ = std::aligned_alloc(kLine, bytes_);
  if (data_ == nullptr) {
    throw std::bad_alloc();
  }
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
  std::free(data_);
}

}  // namespace syncbn::cpu
