// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// What a block or thread has for itself: which bytes were written, and of shared memory, which
// accesses nothing orders.
namespace syncbn::ptx {

/// Who accesses shared memory, and after how many barriers.
struct Access {
  std::uint32_t thread = 0;
  std::uint32_t block_barriers = 0;
  std::uint32_t warp_barriers = 0;
};

/// Memory whose bytes have to be written before they are read.
class TrackedMemory {
 public:
  explicit TrackedMemory(std::size_t bytes);
  std::size_t size() const { return bytes_.size(); }
  std::byte* at(std::uint64_t offset) { return bytes_.data() + offset; }
  bool inside(std::uint64_t offset, std::size_t bytes) const {
    return offset <= bytes_.size() && bytes <= bytes_.size() - offset;
  }
  bool written(std::uint64_t offset, std::size_t bytes) const;
  void mark(std::uint64_t offset, std::size_t bytes, bool defined);

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::uint8_t> written_;
};

/// Two accesses of the same byte by different threads, one of them a write, need a barrier of their
/// block, or of their warp, in between.
class SharedMemory : public TrackedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : TrackedMemory(bytes), last_(bytes) {}
  /// Empty, or with whose access this one races.
  std::string note(std::uint64_t offset, std::size_t bytes, const Access& access, bool writes);

 private:
  static constexpr std::uint32_t kNobody = 0xffffffffu;
  static constexpr std::uint32_t kSeveral = 0xfffffffeu;
  struct Byte {
    Access writer{kNobody, 0, 0};
    Access reader{kNobody, 0, 0};  ///< of the latest time between two barriers of the block
    std::uint32_t readers_warp = kNobody;
  };
  std::vector<Byte> last_;
};

/// Whether the bytes are memory that the program has allocated.
class AllocatedMemory {
 public:
  bool holds(std::uintptr_t address, std::size_t bytes);

 private:
  static constexpr std::size_t kPages = 512;
  std::uintptr_t mapped_[kPages] = {};
};

}  // namespace syncbn::ptx
