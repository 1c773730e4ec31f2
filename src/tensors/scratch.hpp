// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace syncbn::cpu {

inline constexpr std::int64_t kCacheLine = 64;

/// Uninitialized memory for the time of a call, at a cache line's begin. Its thread keeps it for
/// the next call, which so allocates nothing: memory of this size that goes back to the system each
/// time costs more than the sums of a small tensor.
class Scratch {
 public:
  /// Throws std::bad_alloc.
  explicit Scratch(std::size_t bytes);
  /// May run on another thread, which then keeps it.
  ~Scratch();
  Scratch(Scratch&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Scratch& operator=(Scratch&&) = delete;

  void* data() const { return data_; }

 private:
  void* data_;
  std::size_t bytes_;
};

/// Default-initialized objects in such memory: numbers have no value yet.
template <class T>
class ScratchArray {
 public:
  explicit ScratchArray(std::size_t size) : memory_(size * sizeof(T)), size_(size) {
    std::uninitialized_default_construct_n(data(), size_);
  }
  ~ScratchArray() { std::destroy_n(data(), size_); }
  ScratchArray(const ScratchArray&) = delete;
  ScratchArray& operator=(const ScratchArray&) = delete;

  T* data() const { return static_cast<T*>(memory_.data()); }
  std::size_t size() const { return size_; }
  T* begin() const { return data(); }
  T* end() const { return data() + size_; }
  T& operator[](std::size_t i) const { return data()[i]; }

 private:
  Scratch memory_;
  std::size_t size_;
};

}  // namespace syncbn::cpu
