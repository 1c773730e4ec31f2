// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

// All that kernels know of CUDA. tests/emulation has a file of the same name that runs the same
// kernels on a CPU; this one is for nvcc.
// At least 512 threads of a kernel fit a multiprocessor: 128 registers each.
#define SYNCBN_KERNEL(threads) SYNCBN_KERNEL_OF(threads, 512 / (threads))
/// At least `blocks` blocks of it fit one.
#define SYNCBN_KERNEL_OF(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define SYNCBN_DEVICE __device__ __forceinline__
#define SYNCBN_PRAGMA(text) _Pragma(#text)
#define SYNCBN_UNROLL(n) SYNCBN_PRAGMA(unroll n)

namespace syncbn::device {

inline constexpr unsigned kWarp = 32;

SYNCBN_DEVICE unsigned thread_index() { return threadIdx.x; }
SYNCBN_DEVICE unsigned block_index() { return blockIdx.x; }
SYNCBN_DEVICE unsigned block_size() { return blockDim.x; }
SYNCBN_DEVICE unsigned grid_size() { return gridDim.x; }

/// Whether a multiprocessor does few operations of binary64, conversions to it among them: 2 a
/// clock. (Code for 10.0 runs on 10.3, too, and cannot know.)
SYNCBN_DEVICE constexpr bool few_binary64_units() {
#if defined(__CUDA_ARCH__)
  return __CUDA_ARCH__ != 700 && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 &&
         __CUDA_ARCH__ != 1000;
#else
  return false;
#endif
}

/// For SYNCBN_UNROLL: how often loops are unrolled that add up vectors of `elements`. Four vectors
/// hide the latency of loads; with few units for binary64 one vector takes as long.
SYNCBN_DEVICE constexpr int vectors_ahead(int elements) {
  return elements > 1 && few_binary64_units() ? 1 : 4;
}

/// The block's shared memory, 16-byte aligned, of the size given to launch.
template <class T>
SYNCBN_DEVICE T* shared() {
  extern __shared__ __align__(16) unsigned char syncbn_shared_memory[];
  return reinterpret_cast<T*>(syncbn_shared_memory);
}

/// All threads of the block (warp) must arrive; writes before are seen after.
SYNCBN_DEVICE void block_barrier() { __syncthreads(); }
SYNCBN_DEVICE void warp_barrier() { __syncwarp(); }

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
/// Bit i: thread i's.
SYNCBN_DEVICE unsigned ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

/// Return what was there before.
SYNCBN_DEVICE std::int64_t atomic_add(std::int64_t* address, std::int64_t value) {
  return static_cast<std::int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(address),
                                             static_cast<unsigned long long>(value)));
}
SYNCBN_DEVICE std::int64_t atomic_or(std::int64_t* address, std::int64_t value) {
  return static_cast<std::int64_t>(atomicOr(reinterpret_cast<unsigned long long*>(address),
                                            static_cast<unsigned long long>(value)));
}

/// As atomic_add. What this thread wrote before, and what it knows of other threads' writes by a
/// barrier, is there for who comes later to the same address with this function, and by a barrier
/// after it for the other threads of that warp or block.
SYNCBN_DEVICE std::int64_t atomic_hand_over(std::int64_t* address, std::int64_t value) {
  std::int64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(address)), "l"(value)
               : "memory");
  return before;
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
  // nvcc splits plain stores of vectors into their elements.
  constexpr int kWords = sizeof(value) / sizeof(unsigned);
  if constexpr (kWords == 4 || kWords == 2) {
    unsigned words[kWords];
    memcpy(words, &value, sizeof(value));
    const std::size_t address = __cvta_generic_to_global(to);
    if constexpr (kWords == 4) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]),
                   "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    } else {
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(words[0]), "r"(words[1])
                   : "memory");
    }
  } else {
    *reinterpret_cast<Vector<T, kSize>*>(to) = value;
  }
}

/// Why a call failed; no text: it did not.
struct Failure {
  const char* text = nullptr;
  bool of_earlier_work = false;  ///< of what was enqueued before, and is reported late
};

inline bool reported_late(cudaError_t error) {
  switch (error) {
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorExternalDevice:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorNvlinkUncorrectable:
#if CUDART_VERSION >= 13000
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
#endif
      return true;
    default:
      return false;
  }
}

inline Failure failure_of(cudaError_t error) {
  if (error == cudaSuccess) {
    return {};
  }
  (void)cudaGetLastError();  // the next launch must not report it again
  return {cudaGetErrorString(error), reported_late(error)};
}

/// Starts the kernel on the stream (a cudaStream_t).
template <class... Parameters, class... Arguments>
Failure launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
               std::size_t shared_bytes, void* stream, const Arguments&... arguments) {
  // Not the last error, which another library may have left behind.
  const auto start = [&](Parameters... values) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&values))...};
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads),
                            pointers, shared_bytes, static_cast<cudaStream_t>(stream));
  };
  return failure_of(start(static_cast<Parameters>(arguments)...));
}

/// Brings the kernel's code to the current device, which its first launch would do otherwise.
template <class... Parameters>
Failure load(void (*kernel)(Parameters...)) {
  // Loading may allocate, which a capture in this thread forbids unless it is relaxed.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  return failure_of(error);
}

/// The number of the current device.
inline Failure current_device(int* device) { return failure_of(cudaGetDevice(device)); }

/// Multiprocessors of the current device.
inline Failure multiprocessors(int* count) {
  int device = 0;
  const Failure failure = current_device(&device);
  return failure.text != nullptr
             ? failure
             : failure_of(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
}

}  // namespace syncbn::device
