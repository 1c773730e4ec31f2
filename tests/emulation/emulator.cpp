// SPDX-License-Identifier: Apache-2.0
#include "emulator.hpp"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "machine.hpp"

namespace syncbn::emulation {
namespace {

Counts counted;
std::set<std::pair<int, const void*>> loaded;  // device and kernel

}  // namespace

Settings& settings() {
  static Settings value;
  return value;
}

const Counts& counts() { return counted; }
void note_launch(const void* kernel) {
  ++counted.launches;
  counted.launches_of_unloaded += loaded.count({settings().device, kernel}) == 0 ? 1 : 0;
}
void note_load(const void* kernel) {
  ++counted.loads;
  loaded.insert({settings().device, kernel});
}
void note_access(int elements) {
  ++(elements > 1 ? counted.vector_accesses : counted.single_accesses);
}

void run(const KernelLaunch& kernel) {
  const bool fits =
      kernel.threads > 0 && kernel.threads <= 1024 && kernel.shared_bytes <= (48 << 10);
  if (kernel.blocks == 0 || !fits) {
    throw KernelError("a launch of " + std::to_string(kernel.blocks) + " blocks of " +
                      std::to_string(kernel.threads) + " threads with " +
                      std::to_string(kernel.shared_bytes) + " bytes of shared memory");
  }
  if (settings().resident > 0) {
    run_machine(kernel);
  }
}

const Place& place() { return current->at; }
void* shared_memory() { return current->block->shared(); }

void meet_block(const std::source_location& at) {
  meet(current->block->whole, Operation::kBlockBarrier, at);
}

const std::uint64_t* meet_warp(Operation operation, std::uint64_t value,
                               const std::source_location& at) {
  const unsigned index = current->at.thread / kWarp;
  Meeting& meeting = current->block->warps[index];
  const auto begin = current->block->threads.begin() + index * kWarp;
  for (auto other = begin; meeting.arrived > 0 && other != begin + meeting.expected; ++other) {
    const bool waits = other->waits_at != Operation::kNone &&
                       other->waits_at != Operation::kBlockBarrier && &*other != current;
    if (waits && (other->waits_at != operation || other->site.line() != at.line())) {
      throw KernelError("threads of a warp at different operations: " + text_of(*other) +
                        ", thread " + std::to_string(current->at.thread) + " at " +
                        name(operation) + " in line " + std::to_string(at.line()));
    }
  }
  if (operation != Operation::kWarpBarrier && meeting.expected != kWarp) {
    throw KernelError("a shuffle or vote in a warp of " + std::to_string(meeting.expected) +
                      " threads");
  }
  auto& values = meeting.values[meeting.rounds % 2];
  values[current->at.thread % kWarp] = value;
  meet(meeting, operation, at);
  return values.data();
}

void pause() {
  machine->runnable.push_back(current);
  current->fiber->suspend(false);
}

void check_aligned(const void* address, std::size_t alignment, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
    throw KernelError(std::string(what) + " of " + std::to_string(alignment) +
                      " bytes at an address that is not a multiple of it");
  }
}

}  // namespace syncbn::emulation
