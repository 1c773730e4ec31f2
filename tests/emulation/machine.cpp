// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace syncbn::emulation {

Machine* machine = nullptr;
Thread* current = nullptr;

namespace {

constexpr std::byte kCanary{0xc5};

std::vector<std::unique_ptr<Fiber>> spare_fibers;

void run_thread(void* argument) {
  auto& thread = *static_cast<Thread*>(argument);
  try {
    thread.block->device->launches.front().thread();
  } catch (...) {
    machine->error = std::current_exception();
  }
  thread.ended = true;
  --thread.block->live;
  thread.fiber->suspend(true);
}

/// From the thread's warp or block, all of which have met.
void share_knowledge(std::vector<Thread>& threads, unsigned first, unsigned count) {
  std::vector<Observer*> all;
  for (unsigned i = first; i < first + count; ++i) {
    if (std::optional<Observer>& observer = threads[i].observer; observer.has_value()) {
      all.push_back(&*observer);
    }
  }
  WeakMemory::barrier(all);
}

std::unique_ptr<Block> start_block(Device& device, unsigned index) {
  const KernelLaunch& kernel = device.launches.front();
  const unsigned threads = kernel.threads;
  const std::size_t shared_bytes = kernel.shared_bytes;
  auto block = std::make_unique<Block>();
  const std::uint64_t number = ++machine->blocks;
  block->device = &device;
  block->live = threads;
  block->bytes = shared_bytes;
  block->memory.assign(shared_bytes + 2 * kCanaryBytes + 16, kCanary);
  // What a kernel reads before it wrote there is NaN, and a large integer.
  std::memset(block->shared(), 0xff, shared_bytes);
  block->whole.expected = threads;
  block->warps.resize((threads + kWarp - 1) / kWarp);
  block->threads.resize(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Thread& thread = block->threads[i];
    thread.at = {i, index, threads, kernel.blocks};
    thread.block = block.get();
    if (machine->memory.has_value()) {
      Observer& observer = thread.observer.emplace();
      observer.thread = ++machine->threads;
      observer.block = number;
      observer.device = device.number;
      observer.current = device.known;
    }
    ++block->warps[i / kWarp].expected;
    if (spare_fibers.empty()) {
      thread.fiber = std::make_unique<Fiber>();
    } else {
      thread.fiber = std::move(spare_fibers.back());
      spare_fibers.pop_back();
    }
    thread.fiber->start(&run_thread, &thread);
    device.runnable.push_back(&thread);
  }
  return block;
}

void end_block(Block& block) {
  const std::byte* shared = block.shared();
  const auto intact = [](const std::byte* from, std::size_t size) {
    return std::all_of(from, from + size, [](std::byte b) { return b == kCanary; });
  };
  if (!intact(block.memory.data(), static_cast<std::size_t>(shared - block.memory.data())) ||
      !intact(shared + block.bytes, kCanaryBytes)) {
    throw KernelError("a write outside of the block's " + std::to_string(block.bytes) +
                      " bytes of shared memory");
  }
  for (Thread& thread : block.threads) {
    if (thread.observer.has_value()) {
      block.device->known.join(thread.observer->current);
    }
    spare_fibers.push_back(std::move(thread.fiber));
  }
}

[[noreturn]] void report_deadlock() {
  std::string text = "no thread can go on:";
  int shown = 0;
  for (const Device& device : machine->devices) {
    for (const auto& block : device.resident) {
      // Threads that wait at different things explain it best.
      const Thread* last = nullptr;
      for (const Thread& thread : block->threads) {
        if (shown < 6 &&
            (last == nullptr || last->ended != thread.ended || last->waits_at != thread.waits_at ||
             last->site.line() != thread.site.line())) {
          text += (shown++ > 0 ? "; " : " ") + text_of(thread);
          last = &thread;
        }
      }
    }
  }
  throw KernelError(text);
}

/// Starts blocks, and the next kernel where one has ended. False: the device has nothing to do.
bool supply(Device& device) {
  if (device.begun && device.next_block == device.order.size() && device.resident.empty()) {
    device.launches = device.launches.subspan(1);
    device.begun = false;
  }
  if (device.launches.empty()) {
    return false;
  }
  const KernelLaunch& kernel = device.launches.front();
  if (!device.begun) {
    const unsigned last = settings().last_blocks;
    const unsigned skipped = last == 0 || last > kernel.blocks ? 0 : kernel.blocks - last;
    device.order.resize(kernel.blocks - skipped);
    std::iota(device.order.begin(), device.order.end(), skipped);
    machine->random.shuffle(device.order);
    device.next_block = 0;
    device.begun = true;
  }
  const bool together = machine->memory.has_value();
  while (device.next_block < device.order.size() &&
         (together || device.resident.size() < settings().resident)) {
    device.resident.push_back(start_block(device, device.order[device.next_block++]));
  }
  return true;
}

/// Some device that can go on and is awake, if there is one that is.
Device* next_device() {
  std::vector<Device>& all = machine->devices;
  bool work = false;
  Device* asleep = nullptr;
  const std::size_t first = all.size() == 1 ? 0 : machine->random.below(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    Device& device = all[(first + i) % all.size()];
    const bool killed = static_cast<int>(device.number) == settings().killed &&
                        machine->steps > settings().killed_after;
    if (killed || !supply(device)) {
      continue;
    }
    work = true;
    if (device.runnable.empty()) {
      continue;
    }
    if (device.sleeps_until <= machine->steps) {
      return &device;
    }
    asleep = &device;
  }
  if (work && asleep == nullptr) {
    report_deadlock();
  }
  return asleep;
}

/// Lets some thread of the device run until it waits.
void step(Device& device) {
  testing::Random& random = machine->random;
  std::swap(device.runnable[random.below(device.runnable.size())], device.runnable.back());
  current = device.runnable.back();
  device.runnable.pop_back();
  ++machine->steps;
  tick();
  current->fiber->resume();
  if (machine->error) {
    std::rethrow_exception(machine->error);
  }
  for (std::size_t i = 0; current->ended && i < device.resident.size(); ++i) {
    if (device.resident[i]->live == 0) {
      end_block(*device.resident[i]);
      device.resident.erase(device.resident.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
  }
  if (machine->memory.has_value()) {
    machine->memory->pause();
    if (random.one_in(3000)) {
      device.sleeps_until = machine->steps + random.below(10000);
    }
  }
}

}  // namespace

const char* name(Operation operation) {
  switch (operation) {
    case Operation::kNone:
      return "nothing";
    case Operation::kBlockBarrier:
      return "block_barrier";
    case Operation::kWarpBarrier:
      return "warp_barrier";
    case Operation::kShuffle:
      return "shuffle";
    case Operation::kVote:
      return "vote";
  }
  return "?";
}

std::string text_of(const Thread& thread) {
  std::string text =
      "thread " + std::to_string(thread.at.thread) + " of block " + std::to_string(thread.at.block);
  if (thread.ended) {
    return text + " has ended";
  }
  return text + " is at " + name(thread.waits_at) + " in line " +
         std::to_string(thread.site.line());
}

[[noreturn]] void refuse_race(const char* what, const std::source_location& at) {
  throw KernelError("a race, no flag or barrier orders it after another thread's write: thread " +
                    std::to_string(current->at.thread) + " of block " +
                    std::to_string(current->at.block) + " " + what + " in line " +
                    std::to_string(at.line()));
}

void meet(Meeting& meeting, Operation operation, const std::source_location& at) {
  Thread& me = *current;
  me.waits_at = operation;
  me.site = at;
  if (++meeting.arrived < meeting.expected) {
    me.fiber->suspend(false);
    return;
  }
  meeting.arrived = 0;
  ++meeting.rounds;
  me.waits_at = Operation::kNone;
  const bool warp = &meeting != &me.block->whole;
  const unsigned first = warp ? me.at.thread / kWarp * kWarp : 0;
  for (unsigned i = first; i < first + meeting.expected; ++i) {
    Thread& other = me.block->threads[i];
    if (&other != &me) {
      other.waits_at = Operation::kNone;
      me.block->device->runnable.push_back(&other);
    }
  }
  if (machine->memory.has_value() &&
      (operation == Operation::kBlockBarrier || operation == Operation::kWarpBarrier)) {
    share_knowledge(me.block->threads, first, meeting.expected);
  }
  pause();
}

void run_machine(std::span<const Launches> launches, bool shared) {
  Machine mine(settings().seed);
  machine = &mine;
  if (shared) {
    mine.memory.emplace(settings().seed);
  }
  mine.devices.resize(launches.size());
  for (std::size_t i = 0; i < launches.size(); ++i) {
    mine.devices[i].launches = launches[i];
    mine.devices[i].number = i;
  }
  while (Device* device = next_device()) {
    step(*device);
  }
  if (shared) {
    mine.memory->settle();
  }
}

}  // namespace syncbn::emulation
