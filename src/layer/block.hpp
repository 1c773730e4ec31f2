// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "syncbn/batch_norm.hpp"

namespace syncbn {

/// Memory that outlives a call: grows, and is given back at the end.
class Block {
 public:
  explicit Block(const Allocator& allocator) : allocator_(allocator) {}
  ~Block() { release(); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  /// At least `bytes` bytes on the device, for what is enqueued on the stream. New memory is zero
  /// on CUDA; content is kept until the block grows or changes its device. Throws std::bad_alloc.
  void* reserve(std::size_t bytes, Device device, void* stream);

 private:
  void release() noexcept;

  Allocator allocator_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_ = Device::kCpu;
  void* stream_ = nullptr;
};

/// Throws InvalidArgument unless both functions are there, or none.
void check_allocator(const Allocator& allocator);

}  // namespace syncbn
