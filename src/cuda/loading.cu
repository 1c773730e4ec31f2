// SPDX-License-Identifier: Apache-2.0
#include "cuda/loading.hpp"

#include <mutex>
#include <set>
#include <utility>

#include "cuda/launch.cuh"

namespace syncbn::cuda {

void load_kernels(DType dtype) {
  static std::mutex mutex;
  static std::set<std::pair<int, DType>> loaded;
  int number = 0;
  require("finding the device", device::current_device(&number));
  {
    const std::scoped_lock lock(mutex);
    if (loaded.contains({number, dtype})) {
      return;
    }
  }
  // Without the lock: this may wait for another rank, which may be a thread of this process.
  load_moments(dtype);
  load_gradient_sums(dtype);
  load_welford(dtype);
  load_finalize(dtype);
  load_normalize(dtype);
  load_input_gradient(dtype);
  load_recover_input(dtype);
  const std::scoped_lock lock(mutex);
  loaded.insert({number, dtype});
}

}  // namespace syncbn::cuda
