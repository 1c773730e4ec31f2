// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn {

using testing::contains;
using testing::kDtypes;
using testing::kMemories;
using testing::Memory;
using testing::Random;
using testing::rough_values;
using testing::same_bits;
using testing::Tensor;
using testing::thrown_text;
using Words = std::vector<std::int64_t>;
using Doubles = std::vector<double>;

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// The same view of memory that an emulated device has.
template <class View>
View on_cuda(View view) {
  view.device = Device::kCuda;
  return view;
}

}  // namespace syncbn
