// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

// What fuzz targets share: choices read from the fuzzer's bytes. Behind the last byte everything is
// 0, so 0 must stand for a usual choice.
namespace syncbn::fuzz {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  template <class T>
  T take() {
    T value{};
    const auto left = static_cast<std::size_t>(end_ - at_);
    const std::size_t size = left < sizeof(T) ? left : sizeof(T);
    std::memcpy(&value, at_, size);
    at_ += size;
    return value;
  }
  /// 0 to count - 1.
  std::int64_t below(std::int64_t count) { return take<std::uint8_t>() % count; }
  /// True for one byte in 16.
  bool seldom() { return take<std::uint8_t>() >= 240; }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

/// Ends the program, for libFuzzer to keep the input.
[[noreturn]] inline void fail(const std::string& text) {
  std::fprintf(stderr, "syncbn: %s\n", text.c_str());
  std::abort();
}

inline void require(bool condition, const char* what) {
  if (!condition) {
    fail(what);
  }
}

}  // namespace syncbn::fuzz
