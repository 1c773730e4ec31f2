// SPDX-License-Identifier: Apache-2.0
#include "layer/block.hpp"

#include <algorithm>
#include <new>

#include "step/device.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
void* Block::reserve(std::size_t bytes, Device device, void* stream) {
  bytes = std::max<std::size_t>(bytes, 1);  // an allocator need not give nothing
  if (bytes > bytes_ || device != device_) {
    release();
    if (allocator_.allocate != nullptr) {
      data_ = allocator_.allocate(allocator_.context, bytes, device, stream);
      if (data_ == nullptr) {
        throw std::bad_alloc();
      }
    } else {
      data_ = passes_of(device).allocate(stream, bytes);
    }
    bytes_ = bytes;
    device_ = device;
    if (device == Device::kCuda) {
      cuda_passes().zero(stream, data_, bytes);
    }
  }
  stream_ = stream;
  return data_;
}

void Block::release() noexcept {
  if (data_ == nullptr) {
    return;
  }
  if (allocator_.release != nullptr) {
    allocator_.release(allocator_.context, data_, bytes_, device_, stream_);
  } else {
    passes_of(device_).release(stream_, data_);
  }
  data_ = nullptr;
  bytes_ = 0;
}

void check_allocator(const Allocator& allocator) {
  if ((allocator.allocate == nullptr) != (allocator.release == nullptr)) {
    throw InvalidArgument("allocator: got one of allocate and release, expected both or neither");
  }
}

}  // namespace syncbn
