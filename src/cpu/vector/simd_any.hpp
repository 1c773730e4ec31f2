// SPDX-License-Identifier: Apache-2.0
// What all vector types have in common. Included first by each of the other simd_*.hpp.

// Where a call per four partials costs as much as the work: the compiler's own limits depend on how
// much else there is in the file.
#define SYNCBN_INLINE __attribute__((always_inline)) inline

template <class V, class E>
SYNCBN_INLINE V load_any(const E* from) {
  V to;
  __builtin_memcpy(&to, from, sizeof(V));
  return to;
}
template <class E, class V>
SYNCBN_INLINE void store_any(E* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// Always inline: GCC drops calls of a function that does nothing else.
SYNCBN_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
SYNCBN_INLINE void prefetch_second(const void* p) { __builtin_prefetch(p, 0, 2); }
