// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <new>
#include <string>

namespace syncbn::torch_layer {

/// PyTorch had no memory for a tensor; MemoryError in Python. Its own text does not pass the stable
/// ABI.
class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(std::uint64_t bytes)
      : text_("memory: got none for a tensor of " + std::to_string(bytes) + " bytes") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace syncbn::torch_layer
