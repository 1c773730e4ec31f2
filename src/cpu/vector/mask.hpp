// SPDX-License-Identifier: Apache-2.0
// Elements that a mask leaves out, over the vector type of one level. Included inside a level
// file's unnamed namespace, before elements.hpp, whose rules hold here too.

constexpr unsigned kAllLanes = (1u << kFloatLanes) - 1;

inline bool all_count(const std::uint8_t* mask, std::int64_t count) {
  constexpr std::uint64_t kLowest = 0x0101010101010101;
  std::uint64_t zeros = 0;  // has a byte's top bit where a byte was zero, and perhaps above that
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    std::uint64_t bytes;
    __builtin_memcpy(&bytes, mask + i, sizeof(bytes));
    zeros |= (bytes - kLowest) & ~bytes & kLowest << 7;
  }
  bool all = zeros == 0;
  for (; i < count; ++i) {
    all = all && mask[i] != 0;
  }
  return all;
}

/// Bit i: mask[i] != 0. n is at most that of lanes.
inline unsigned counting(const std::uint8_t* mask, std::int64_t n) {
  unsigned bits = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    bits |= static_cast<unsigned>(mask[i] != 0) << i;
  }
  return bits;
}

/// Bit i: mask[i] != 0, for a whole vector of T.
template <class T>
inline unsigned counting_lanes(const std::uint8_t* mask) {
  unsigned bits = 0;
  for (int i = 0; i < kLanesOf<T>; i += kFloatLanes) {
    bits |= bits_of(nonzero_bytes(mask + i)) << i;
  }
  return bits;
}

/// to = from where an element counts, else +0. to may be from.
template <class T>
inline void keep_counting(const T* from, T* to, const std::uint8_t* mask, std::int64_t count) {
  const FloatV zero = broadcast(0.0f);
  std::int64_t i = 0;
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    const MaskV counts = nonzero_bytes(mask + i);
    if (to != from || bits_of(counts) != kAllLanes) {
      store(to + i, select(counts, load(from + i), zero));
    }
  }
  for (; i < count; ++i) {
    to[i] = mask[i] != 0 ? from[i] : T{};
  }
}

/// `count` times +0.
template <class T>
inline void clear(T* to, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    store(to + i, broadcast(0.0f));
  }
  for (; i < count; ++i) {
    to[i] = T{};
  }
}
