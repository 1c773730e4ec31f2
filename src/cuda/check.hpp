// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "syncbn/error.hpp"

namespace syncbn::cuda {

/// Throws Error with the call that failed and where it is. The next launch must not report it
/// again.
inline void check_call(cudaError_t error, const char* call, const char* file, int line) {
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    throw Error(std::string(call) + " failed at " + file + ":" + std::to_string(line) + ": " +
                cudaGetErrorString(error));
  }
}

}  // namespace syncbn::cuda

#define SYNCBN_CUDA_CHECK(call) ::syncbn::cuda::check_call((call), #call, __FILE__, __LINE__)
