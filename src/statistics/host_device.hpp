// SPDX-License-Identifier: Apache-2.0
#pragma once

// The numeric contract (docs/numerics.md) is written once, for host and device compilers.
#if defined(__CUDACC__)
#define SYNCBN_HD __host__ __device__
// In front of a template that calls what it is given, on the host or on the device.
#define SYNCBN_CALLS_ANY _Pragma("nv_exec_check_disable")
#else
#define SYNCBN_HD
#define SYNCBN_CALLS_ANY
#endif

// Functions that files compiled for one instruction set call, too: always in place, because such a
// file must not hold a copy that the linker could take for everybody.
#if defined(__CUDACC__)
#define SYNCBN_HD_IN_PLACE __host__ __device__ __forceinline__
#else
#define SYNCBN_HD_IN_PLACE __attribute__((always_inline)) inline
#endif

// The end of a switch over kinds: an error on the host, which checks what it gives to kernels.
#if defined(__CUDA_ARCH__)
#define SYNCBN_NO_SUCH_KIND(refusal) __builtin_unreachable()
#else
#define SYNCBN_NO_SUCH_KIND(refusal) refusal
#endif

// Integers of many limbs live in memory, not in registers: unrolled loops over them would spill.
#if defined(__CUDA_ARCH__)
#define SYNCBN_NO_UNROLL _Pragma("unroll 1")
#else
#define SYNCBN_NO_UNROLL
#endif

#if defined(__FAST_MATH__)
#error "docs/numerics.md fixes every bit: syncbn must not be compiled with -ffast-math"
#endif
