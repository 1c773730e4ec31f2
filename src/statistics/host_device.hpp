#pragma once

// The numeric contract (docs/numerics.md) is written once, for host and device compilers.
#if defined(__CUDACC__)
#define SYNCBN_HD __host__ __device__
#else
#define SYNCBN_HD
#endif

#if defined(__FAST_MATH__)
#error "docs/numerics.md fixes every bit: syncbn must not be compiled with -ffast-math"
#endif
