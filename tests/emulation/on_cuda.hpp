// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "syncbn/tensor.hpp"

namespace syncbn {

/// The same view of memory that an emulated device has.
template <class View>
View on_cuda(View view) {
  view.device = Device::kCuda;
  return view;
}

}  // namespace syncbn
