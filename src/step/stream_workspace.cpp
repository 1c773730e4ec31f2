// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <vector>

#include "step/device.hpp"

namespace syncbn {
namespace {

struct Memory {
  /// The last one is large enough. Those before stay: a thread may be about to launch a pass with
  /// one.
  std::vector<std::int64_t*> blocks;
  std::int64_t words = 0;  ///< of the last one
};

/// Streams, and devices, are few. Never destroyed: at the end of the process CUDA may be gone.
std::map<std::uint64_t, Memory>& memory_of_streams() {
  static auto* const kMemory = new std::map<std::uint64_t, Memory>();
  return *kMemory;
}

}  // namespace

std::int64_t* stream_workspace(DType dtype, std::int64_t channels, void* stream) {
  static std::mutex mutex;
  const std::int64_t words = workspace_words(dtype, channels);
  const DevicePasses& device = cuda_passes();
  const std::uint64_t number = device.stream_number(stream);
  if (number == 0) {
    return nullptr;
  }
  const std::lock_guard lock(mutex);
  Memory& memory = memory_of_streams()[number];
  if (memory.words < words) {
    const std::int64_t more = std::max(words, 2 * memory.words);
    const std::size_t bytes = static_cast<std::size_t>(more) * sizeof(std::int64_t);
    try {
      memory.blocks.push_back(nullptr);
      void* const fresh = device.allocate(stream, bytes);
      memory.blocks.back() = static_cast<std::int64_t*>(fresh);
      device.zero(stream, fresh, bytes);
      memory.words = more;
    } catch (const std::exception&) {  // the caller's allocator may have some, or says why not
      return nullptr;
    }
  }
  return memory.blocks.back();
}

}  // namespace syncbn
