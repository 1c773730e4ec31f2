// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "syncbn/error.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn::torch_layer {

/// The first dtype whose messages have that length; words: a function of dtype and channels.
template <class Words>
DType dtype_of_length(const char* name, std::int64_t length, std::int64_t channels,
                      const Words& words) {
  for (int number = 0; number < kDtypeCount; ++number) {
    if (const auto dtype = static_cast<DType>(number); length == words(dtype, channels)) {
      return dtype;
    }
  }
  throw InvalidArgument(std::string(name) + ": got " + std::to_string(length) +
                        " words, expected a whole message of " + std::to_string(channels) +
                        " channels");
}

}  // namespace syncbn::torch_layer
