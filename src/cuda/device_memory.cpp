// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_memory.hpp"

#include <cuda_runtime_api.h>

#include <new>

#include "cuda/check.hpp"

namespace syncbn::cuda {
namespace {

cudaStream_t handle(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

void* allocate_on(void* stream, std::size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocAsync(&memory, bytes, handle(stream));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw std::bad_alloc();
  }
  check_call(error, "cudaMallocAsync", __FILE__, __LINE__);
  return memory;
}

void release_on(void* stream, void* memory) noexcept {
  (void)cudaFreeAsync(memory, handle(stream));
}

void zero_on(void* stream, void* memory, std::size_t bytes) {
  SYNCBN_CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, handle(stream)));
}

void copy_on(void* stream, void* to, const void* from, std::size_t bytes) {
  SYNCBN_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, handle(stream)));
}

void fetch_on(void* stream, void* to, const void* from, std::size_t bytes) {
  SYNCBN_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, handle(stream)));
  SYNCBN_CUDA_CHECK(cudaStreamSynchronize(handle(stream)));
}

void bring_on(void* stream, void* to, const void* from, std::size_t bytes) {
  SYNCBN_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, handle(stream)));
  SYNCBN_CUDA_CHECK(cudaStreamSynchronize(handle(stream)));
}

std::uint64_t stream_number(void* stream) noexcept {
  // Another stream may get the handle of one that was destroyed, and runs beside what is left of
  // it.
  cudaStreamCaptureStatus captured = cudaStreamCaptureStatusActive;
  unsigned long long id = 0;
  int device = 0;
  const bool known = cudaStreamIsCapturing(handle(stream), &captured) == cudaSuccess &&
                     captured == cudaStreamCaptureStatusNone &&
                     cudaStreamGetId(handle(stream), &id) == cudaSuccess &&
                     cudaGetDevice(&device) == cudaSuccess;
  if (!known) {
    (void)cudaGetLastError();
    return 0;
  }
  return id * 1024 + static_cast<unsigned>(device) + 1;
}

}  // namespace syncbn::cuda
