// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_memory.hpp"

#include <cstring>
#include <new>

// Memory of the emulated device: the host's. Kernels are done when their launch returns.
namespace syncbn::cuda {

void* allocate_on(void*, std::size_t bytes) { return ::operator new(bytes, std::align_val_t{256}); }
void release_on(void*, void* memory) noexcept { ::operator delete(memory, std::align_val_t{256}); }
void zero_on(void*, void* memory, std::size_t bytes) { std::memset(memory, 0, bytes); }
void copy_on(void*, void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void fetch_on(void*, void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
void bring_on(void*, void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

std::uint64_t stream_number(void* stream) noexcept {
  return 1 + reinterpret_cast<std::uintptr_t>(stream);
}

}  // namespace syncbn::cuda
