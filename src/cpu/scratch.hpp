#pragma once

#include <cstddef>

namespace syncbn::cpu {

/// Uninitialized memory for the time of a call, at a cache line's begin. Its thread keeps it for
/// the next call: memory of this size that goes back to the system each time costs more than the
/// sums of a small tensor.
class Scratch {
 public:
  /// Throws std::bad_alloc.
  explicit Scratch(std::size_t bytes);
  /// May run on another thread, which then keeps it.
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return data_; }

 private:
  void* data_;
  std::size_t bytes_;
};

}  // namespace syncbn::cpu
