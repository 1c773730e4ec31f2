// SPDX-License-Identifier: Apache-2.0
#include "block_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "emulator.hpp"

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#endif

namespace syncbn::ptx {

TrackedMemory::TrackedMemory(std::size_t bytes) : bytes_(bytes, std::byte{0xff}), written_(bytes) {}

bool TrackedMemory::written(std::uint64_t offset, std::size_t bytes) const {
  const auto from = written_.begin() + static_cast<std::ptrdiff_t>(offset);
  return std::all_of(from, from + static_cast<std::ptrdiff_t>(bytes),
                     [](std::uint8_t byte) { return byte != 0; });
}

void TrackedMemory::mark(std::uint64_t offset, std::size_t bytes, bool defined) {
  const auto from = written_.begin() + static_cast<std::ptrdiff_t>(offset);
  std::fill(from, from + static_cast<std::ptrdiff_t>(bytes), static_cast<std::uint8_t>(defined));
}

std::string SharedMemory::note(std::uint64_t offset, std::size_t bytes, const Access& access,
                               bool writes) {
  const std::uint32_t warp = access.thread / emulation::kWarp;
  const auto ordered = [&](const Access& before, std::uint32_t thread, std::uint32_t of_warp) {
    return thread == kNobody || thread == access.thread ||
           before.block_barriers != access.block_barriers ||
           (of_warp == warp && before.warp_barriers < access.warp_barriers);
  };
  for (std::uint64_t i = offset; i < offset + bytes; ++i) {
    Byte& byte = last_[i];
    if (!ordered(byte.writer, byte.writer.thread, byte.writer.thread / emulation::kWarp)) {
      return std::string(writes ? "a write" : "a read") +
             " of shared memory without a barrier after a write by thread " +
             std::to_string(byte.writer.thread);
    }
    if (writes) {
      if (!ordered(byte.reader, byte.reader.thread, byte.readers_warp)) {
        return "a write to shared memory without a barrier after a read by " +
               (byte.reader.thread == kSeveral ? std::string("other threads")
                                               : "thread " + std::to_string(byte.reader.thread));
      }
      byte.writer = access;
      byte.reader.thread = kNobody;
      continue;
    }
    if (byte.reader.thread == kNobody || byte.reader.block_barriers != access.block_barriers) {
      byte.reader = access;
      byte.readers_warp = warp;
    } else {
      byte.reader.thread = byte.reader.thread == access.thread ? access.thread : kSeveral;
      byte.readers_warp = byte.readers_warp == warp ? warp : kSeveral;
      byte.reader.warp_barriers = std::max(byte.reader.warp_barriers, access.warp_barriers);
    }
  }
  return "";
}

bool AllocatedMemory::holds(std::uintptr_t address, std::size_t bytes) {
  static const auto kPage = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t page = address / kPage;  // accesses are aligned: never of two pages
  std::uintptr_t& known = mapped_[page % kPages];
  if (page == 0) {
    return false;
  }
  if (known != page) {
    unsigned char resident = 0;
    if (mincore(reinterpret_cast<void*>(page * kPage), 1, &resident) != 0) {
      return false;
    }
    known = page;
  }
#if __has_include(<sanitizer/asan_interface.h>)
  return __asan_address_is_poisoned(reinterpret_cast<const void*>(address)) == 0 &&
         __asan_address_is_poisoned(reinterpret_cast<const void*>(address + bytes - 1)) == 0;
#else
  return bytes > 0;
#endif
}

}  // namespace syncbn::ptx
