// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "emulator.hpp"
#include "fiber.hpp"
#include "random.hpp"

// A kernel under way: its blocks and threads, and the order in which they run.
namespace syncbn::emulation {

inline constexpr std::size_t kCanaryBytes = 64;

struct Block;

struct Thread {
  Place at{};
  Block* block = nullptr;
  std::unique_ptr<Fiber> fiber;
  bool ended = false;
  Operation waits_at = Operation::kNone;
  std::source_location site;
};

/// Where threads wait for each other.
struct Meeting {
  unsigned expected = 0;
  unsigned arrived = 0;
  std::uint64_t rounds = 0;
  std::array<std::array<std::uint64_t, kWarp>, 2> values{};  ///< of this round and of the last
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Meeting> warps;
  Meeting whole;
  std::vector<std::byte> memory;  ///< canaries on both sides
  std::size_t bytes = 0;
  unsigned live = 0;

  std::byte* shared() {
    void* from = memory.data() + kCanaryBytes;
    std::size_t space = memory.size() - kCanaryBytes;
    return static_cast<std::byte*>(std::align(16, bytes, from, space));
  }
};

struct Machine {
  const KernelLaunch& kernel;
  testing::Random random;
  std::vector<unsigned> order = {};  ///< of the blocks, and how many have begun
  std::size_t next_block = 0;
  std::vector<std::unique_ptr<Block>> resident = {};
  std::vector<Thread*> runnable = {};
  std::exception_ptr error = {};
};

/// What runs now.
extern Machine* machine;
extern Thread* current;

/// Runs the kernel to its end.
void run_machine(const KernelLaunch& kernel);

const char* name(Operation operation);
std::string text_of(const Thread& thread);
/// Lets the current thread wait until `expected` threads have arrived.
void meet(Meeting& meeting, Operation operation, const std::source_location& at);

}  // namespace syncbn::emulation
