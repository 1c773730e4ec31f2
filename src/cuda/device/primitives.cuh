#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

// All that kernels know of CUDA. tests/emulation has a file of the same name that runs the same
// kernels on a CPU; this one is for nvcc.
#define SYNCBN_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
#define SYNCBN_DEVICE __device__ __forceinline__
#define SYNCBN_PRAGMA(text) _Pragma(#text)
#define SYNCBN_UNROLL(n) SYNCBN_PRAGMA(unroll n)

namespace syncbn::device {

inline constexpr unsigned kWarp = 32;

SYNCBN_DEVICE unsigned thread_index() { return threadIdx.x; }
SYNCBN_DEVICE unsigned block_index() { return blockIdx.x; }
SYNCBN_DEVICE unsigned block_size() { return blockDim.x; }
SYNCBN_DEVICE unsigned grid_size() { return gridDim.x; }

/// The block's shared memory, 16-byte aligned, of the size given to launch.
template <class T>
SYNCBN_DEVICE T* shared() {
  extern __shared__ __align__(16) unsigned char syncbn_shared_memory[];
  return reinterpret_cast<T*>(syncbn_shared_memory);
}

/// All threads of the block (warp) must arrive; writes before are seen after.
SYNCBN_DEVICE void block_barrier() { __syncthreads(); }
SYNCBN_DEVICE void warp_barrier() { __syncwarp(); }

/// Orders this thread's accesses to global memory before it against those after it, for all threads
/// of the device.
SYNCBN_DEVICE void memory_fence() { __threadfence(); }

/// All 32 threads of the warp take part.
template <class T>
SYNCBN_DEVICE T shuffle_xor(T value, unsigned mask) {
  return __shfl_xor_sync(0xffffffffu, value, static_cast<int>(mask));
}
template <class T>
SYNCBN_DEVICE T shuffle_index(T value, unsigned lane) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(lane));
}
SYNCBN_DEVICE bool any(bool predicate) { return __any_sync(0xffffffffu, predicate) != 0; }

/// Return what was there before.
SYNCBN_DEVICE std::int64_t atomic_add(std::int64_t* address, std::int64_t value) {
  return static_cast<std::int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(address),
                                             static_cast<unsigned long long>(value)));
}
SYNCBN_DEVICE std::int64_t atomic_or(std::int64_t* address, std::int64_t value) {
  return static_cast<std::int64_t>(atomicOr(reinterpret_cast<unsigned long long*>(address),
                                            static_cast<unsigned long long>(value)));
}

/// What other blocks wrote: read from where atomics take effect, past this processor's cache.
SYNCBN_DEVICE std::int64_t load_fresh(const std::int64_t* address) {
  return static_cast<std::int64_t>(__ldcg(reinterpret_cast<const long long*>(address)));
}

/// kSize neighbours, one access of at most 16 bytes, aligned to its size.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Vector {
  T at[kSize];
};
template <int kSize, class T>
SYNCBN_DEVICE Vector<T, kSize> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, kSize>*>(from);
}
template <int kSize, class T>
SYNCBN_DEVICE void store_vector(T* to, const Vector<T, kSize>& value) {
  *reinterpret_cast<Vector<T, kSize>*>(to) = value;
}

/// Starts the kernel on the stream (a cudaStream_t). Null, or why it could not be started.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                   std::size_t shared_bytes, void* stream, const Arguments&... arguments) {
  kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Parameters>(arguments)...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/// Multiprocessors of the current device; on failure 0 and why.
inline int multiprocessors(const char** why) {
  int device = 0;
  int count = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // the next launch must not report it again
  }
  *why = error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  return error == cudaSuccess ? count : 0;
}

}  // namespace syncbn::device
