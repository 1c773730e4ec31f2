// Elements that a mask leaves out, over the vector type of one level. Included inside a level
// file's unnamed namespace, before level_elements.hpp, whose rules hold here too.

/// to = from where an element counts, else +0. to may be from.
template <class T>
inline void keep_counting(const T* from, T* to, const std::uint8_t* mask, std::int64_t count) {
  const FloatV zero = broadcast(0.0f);
  std::int64_t i = 0;
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    store(to + i, select(nonzero_bytes(mask + i), load(from + i), zero));
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
