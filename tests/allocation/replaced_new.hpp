// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

// What the replaced operator new of this program counts and refuses.
namespace syncbn::testing {

/// Allocations of this thread until one fails; negative: none does.
inline thread_local std::int64_t until_failure = -1;

/// Allocations of all threads.
inline std::atomic<std::int64_t> allocations = 0;

}  // namespace syncbn::testing
