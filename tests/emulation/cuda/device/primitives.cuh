// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>

#include "emulator.hpp"

// The emulation of src/cuda/device/primitives.cuh, where each function is described.
#define SYNCBN_KERNEL(threads) void
#define SYNCBN_KERNEL_OF(threads, blocks) void
#define SYNCBN_DEVICE inline
#define SYNCBN_UNROLL(n)

namespace syncbn::device {

using Site = std::source_location;

inline constexpr unsigned kWarp = emulation::kWarp;

inline unsigned thread_index() { return emulation::place().thread; }
inline unsigned block_index() { return emulation::place().block; }
inline unsigned block_size() { return emulation::place().threads; }
inline unsigned grid_size() { return emulation::place().blocks; }

inline bool few_binary64_units() { return emulation::settings().few_binary64_units; }

template <class T>
T* shared() {
  return static_cast<T*>(emulation::shared_memory());
}

inline void block_barrier(const Site& at = Site::current()) { emulation::meet_block(at); }
inline void warp_barrier(const Site& at = Site::current()) {
  emulation::meet_warp(emulation::Operation::kWarpBarrier, 0, at);
}

template <class T>
T shuffle_from(T value, unsigned lane, const Site& at) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const std::uint64_t* all = emulation::meet_warp(emulation::Operation::kShuffle, bits, at);
  std::memcpy(&value, all + lane % kWarp, sizeof(T));
  return value;
}
template <class T>
T shuffle_xor(T value, unsigned mask, const Site& at = Site::current()) {
  return shuffle_from(value, thread_index() ^ mask, at);
}
template <class T>
T shuffle_index(T value, unsigned lane, const Site& at = Site::current()) {
  return shuffle_from(value, lane, at);
}
inline unsigned ballot(bool predicate, const Site& at = Site::current()) {
  const std::uint64_t* all = emulation::meet_warp(emulation::Operation::kVote, predicate, at);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    bits |= static_cast<unsigned>(all[lane] != 0) << lane;
  }
  return bits;
}
inline bool any(bool predicate, const Site& at = Site::current()) {
  return ballot(predicate, at) != 0;
}

inline std::int64_t atomic_add(std::int64_t* address, std::int64_t value) {
  emulation::check_aligned(address, sizeof(*address), "atomic_add");
  emulation::pause();
  const std::int64_t before = *address;
  *address = static_cast<std::int64_t>(static_cast<std::uint64_t>(before) +
                                       static_cast<std::uint64_t>(value));
  return before;
}
inline std::int64_t atomic_or(std::int64_t* address, std::int64_t value) {
  emulation::check_aligned(address, sizeof(*address), "atomic_or");
  emulation::pause();
  const std::int64_t before = *address;
  *address |= value;
  return before;
}
inline std::int64_t atomic_hand_over(std::int64_t* address, std::int64_t value) {
  return atomic_add(address, value);
}
inline std::int64_t load_fresh(const std::int64_t* address) {
  emulation::check_aligned(address, sizeof(*address), "load_fresh");
  return *address;
}

template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Vector {
  T at[kSize];
};
template <int kSize, class T>
Vector<T, kSize> load_vector(const T* from) {
  static_assert(sizeof(T) * kSize <= 16);
  emulation::check_aligned(from, sizeof(T) * kSize, "load_vector");
  emulation::note_access(kSize);
  Vector<T, kSize> value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
template <int kSize, class T>
void store_vector(T* to, const Vector<T, kSize>& value) {
  static_assert(sizeof(T) * kSize <= 16);
  emulation::check_aligned(to, sizeof(T) * kSize, "store_vector");
  emulation::note_access(kSize);
  std::memcpy(to, &value, sizeof(value));
}

using Failure = emulation::Failure;

template <class... Parameters, class... Arguments>
Failure launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
               std::size_t shared_bytes, void*, const Arguments&... arguments) {
  emulation::note_launch(reinterpret_cast<const void*>(kernel));
  const auto start = [&](Parameters... values) {
    emulation::run({blocks, threads, shared_bytes, [=] { kernel(values...); }});
  };
  if (emulation::settings().launch_failure.text == nullptr) {
    start(static_cast<Parameters>(arguments)...);
  }
  return emulation::settings().launch_failure;
}

template <class... Parameters>
Failure load(void (*kernel)(Parameters...)) {
  emulation::note_load(reinterpret_cast<const void*>(kernel));
  return emulation::settings().load_failure;
}

inline Failure current_device(int* device) {
  *device = emulation::settings().device;
  return {};
}
inline Failure multiprocessors(int* count) {
  *count = emulation::settings().multiprocessors;
  return {};
}

}  // namespace syncbn::device
