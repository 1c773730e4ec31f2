#pragma once

// The numeric contract (docs/numerics.md) is written once, for host and device compilers.
#if defined(__CUDACC__)
#define SYNCBN_HD __host__ __device__
#else
#define SYNCBN_HD
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
