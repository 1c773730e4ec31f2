// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

// Futexes with a time limit, between processes; those of std::atomic::wait and
// std::barrier are private to one process and never wake another.
namespace syncbn {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

/// Sleeps while word == value, for at most `limit`; may return early.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value,
                std::chrono::milliseconds limit);

void futex_wake_all(std::atomic<std::uint32_t>& word);

}  // namespace syncbn
