// SPDX-License-Identifier: Apache-2.0
#include "comm/futex.hpp"

#include <algorithm>
#include <limits>

// What libc++'s std::atomic::wait calls; a public function with a time limit came with macOS 14.4.
extern "C" int __ulock_wait(std::uint32_t operation, void* word, std::uint64_t value,
                            std::uint32_t microseconds);
extern "C" int __ulock_wake(std::uint32_t operation, void* word, std::uint64_t value);

namespace syncbn {
namespace {

constexpr std::uint32_t kCompareAndWait = 1;
constexpr std::uint32_t kWakeAll = 0x100;

}  // namespace

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value,
                std::chrono::milliseconds limit) {
  constexpr std::int64_t kLongest = std::numeric_limits<std::uint32_t>::max() / 1000;
  // 0 would be for ever.
  const std::int64_t milliseconds = std::clamp<std::int64_t>(limit.count(), 1, kLongest);
  __ulock_wait(kCompareAndWait, &word, value, static_cast<std::uint32_t>(milliseconds * 1000));
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  __ulock_wake(kCompareAndWait | kWakeAll, &word, 0);
}

}  // namespace syncbn
