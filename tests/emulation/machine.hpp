// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "emulator.hpp"
#include "fiber.hpp"
#include "random.hpp"
#include "weak_memory.hpp"

// Devices, blocks and threads, and the order in which they run.
namespace syncbn::emulation {

inline constexpr std::size_t kCanaryBytes = 64;

struct Block;
struct Device;

struct Thread {
  Place at{};
  Block* block = nullptr;
  std::optional<Observer> observer;  ///< of memory that devices share
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
  Device* device = nullptr;
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

struct Device {
  std::span<const KernelLaunch> launches;  ///< the first is under way, if `begun`
  bool begun = false;
  std::vector<unsigned> order;  ///< of its blocks, and how many have begun
  std::size_t next_block = 0;
  std::vector<std::unique_ptr<Block>> resident;
  std::vector<Thread*> runnable;
  std::uint64_t number = 0;
  std::uint64_t sleeps_until = 0;
  View known;  ///< to kernels that have ended
};

struct Machine {
  std::vector<Device> devices;
  std::uint64_t steps = 0;
  std::optional<WeakMemory> memory;
  std::exception_ptr error;
  std::uint64_t blocks = 0, threads = 0;  ///< so far
  testing::Random random;

  explicit Machine(std::uint64_t seed) : random(seed) {}
};

/// What runs now.
extern Machine* machine;
extern Thread* current;

/// Runs all launches to their end. shared: the devices have memory in common.
void run_machine(std::span<const Launches> launches, bool shared);

const char* name(Operation operation);
std::string text_of(const Thread& thread);
/// Lets the current thread wait until `expected` threads have arrived.
void meet(Meeting& meeting, Operation operation, const std::source_location& at);
[[noreturn]] void refuse_race(const char* what, const std::source_location& at);

}  // namespace syncbn::emulation
