// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "cuda/check.hpp"
#include "device.hpp"

namespace syncbn::testing {

bool have_device() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

int device_cases() { return 400; }

void* device_allocate(std::size_t bytes) {
  void* memory = nullptr;
  SYNCBN_CUDA_CHECK(cudaMalloc(&memory, bytes));
  return memory;
}

void device_free(void* memory) { cudaFree(memory); }

void copy_to_device(void* to, const void* from, std::size_t bytes) {
  SYNCBN_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  SYNCBN_CUDA_CHECK(cudaDeviceSynchronize());  // pageable memory may still be on its way
}

void copy_from_device(void* to, const void* from, std::size_t bytes) {
  SYNCBN_CUDA_CHECK(cudaDeviceSynchronize());
  SYNCBN_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

DeviceTurn::DeviceTurn() = default;
DeviceTurn::~DeviceTurn() {}

std::unique_ptr<cuda::Communicator> device_communicator(Communicator& host) {
  return cuda::staged_communicator(host);
}

}  // namespace syncbn::testing
