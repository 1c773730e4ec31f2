// SPDX-License-Identifier: Apache-2.0
#include "emulator.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "machine.hpp"

namespace syncbn::emulation {
namespace {

Counts counted;
std::set<std::pair<int, const void*>> loaded;  // device and kernel

void (*other_runner)(std::span<const Launches>, bool) = nullptr;
Launches* kept = nullptr;  // where launches go instead
std::int64_t clock_steps = 0;

void run_launches(std::span<const Launches> launches, bool shared) {
  (other_runner == nullptr ? &run_machine : other_runner)(launches, shared);
}

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

void set_runner(void (*runner)(std::span<const Launches> devices, bool shared)) {
  other_runner = runner;
}

void run(KernelLaunch kernel) {
  const bool fits =
      kernel.threads > 0 && kernel.threads <= 1024 && kernel.shared_bytes <= (48 << 10);
  if (kernel.blocks == 0 || !fits) {
    throw KernelError("a launch of " + std::to_string(kernel.blocks) + " blocks of " +
                      std::to_string(kernel.threads) + " threads with " +
                      std::to_string(kernel.shared_bytes) + " bytes of shared memory");
  }
  if (kept != nullptr) {
    kept->push_back(std::move(kernel));
  } else if (settings().resident > 0) {
    Launches alone;
    alone.push_back(std::move(kernel));
    run_launches({&alone, 1}, false);
  }
}

void run_devices(unsigned devices, const std::function<void(unsigned)>& enqueue) {
  std::vector<Launches> launches(devices);
  for (unsigned d = 0; d < devices; ++d) {
    kept = &launches[d];
    try {
      enqueue(d);
    } catch (...) {
      kept = nullptr;
      throw;
    }
    kept = nullptr;
  }
  run_launches(launches, true);
}

std::int64_t nanoseconds() { return clock_steps * settings().step_nanoseconds; }
void tick() { ++clock_steps; }

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

std::int64_t load_shared(const std::int64_t* address, const Order& order,
                         const std::source_location& at) {
  check_aligned(address, sizeof(*address), "load_shared");
  if (order.strong) {
    pause();
  }
  std::int64_t value = *address;
  std::optional<Observer>& observer = current->observer;
  if (machine->memory.has_value() && observer.has_value()) {
    std::uint64_t got = 0;
    if (machine->memory->read(*observer, reinterpret_cast<std::uintptr_t>(address), sizeof(value),
                              order, &got)) {
      refuse_race("reads", at);
    }
    value = static_cast<std::int64_t>(got);
  }
  return value;
}

void store_shared(std::int64_t* address, std::int64_t value, const Order& order,
                  const std::source_location& at) {
  check_aligned(address, sizeof(*address), "store_shared");
  if (order.strong) {
    pause();
  }
  std::optional<Observer>& observer = current->observer;
  if (!machine->memory.has_value() || !observer.has_value()) {
    *address = value;
    return;
  }
  (void)*static_cast<const volatile std::int64_t*>(address);  // for the address sanitizer
  if (machine->memory->write(*observer, reinterpret_cast<std::uintptr_t>(address), sizeof(value),
                             order, static_cast<std::uint64_t>(value))) {
    refuse_race("writes", at);
  }
}

void pause() {
  current->block->device->runnable.push_back(current);
  current->fiber->suspend(false);
}

void check_aligned(const void* address, std::size_t alignment, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
    throw KernelError(std::string(what) + " of " + std::to_string(alignment) +
                      " bytes at an address that is not a multiple of it");
  }
}

}  // namespace syncbn::emulation
