// SPDX-License-Identifier: Apache-2.0
#include "comm/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#include <limits>

namespace syncbn {

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value,
                std::chrono::milliseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(limit.count() / 1000);
  time.tv_nsec = static_cast<decltype(time.tv_nsec)>(limit.count() % 1000 * 1000000);
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

}  // namespace syncbn
