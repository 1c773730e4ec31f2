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
    machine->kernel.thread();
  } catch (...) {
    machine->error = std::current_exception();
  }
  thread.ended = true;
  --thread.block->live;
  thread.fiber->suspend(true);
}

std::unique_ptr<Block> start_block(unsigned index) {
  const KernelLaunch& kernel = machine->kernel;
  const unsigned threads = kernel.threads;
  const std::size_t shared_bytes = kernel.shared_bytes;
  auto block = std::make_unique<Block>();
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
    ++block->warps[i / kWarp].expected;
    if (spare_fibers.empty()) {
      thread.fiber = std::make_unique<Fiber>();
    } else {
      thread.fiber = std::move(spare_fibers.back());
      spare_fibers.pop_back();
    }
    thread.fiber->start(&run_thread, &thread);
    machine->runnable.push_back(&thread);
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
    spare_fibers.push_back(std::move(thread.fiber));
  }
}

[[noreturn]] void report_deadlock() {
  std::string text = "no thread can go on:";
  int shown = 0;
  for (const auto& block : machine->resident) {
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
  throw KernelError(text);
}

/// Lets some thread run until it waits.
void step() {
  std::vector<Thread*>& runnable = machine->runnable;
  std::swap(runnable[machine->random.below(runnable.size())], runnable.back());
  current = runnable.back();
  runnable.pop_back();
  current->fiber->resume();
  if (machine->error) {
    std::rethrow_exception(machine->error);
  }
  Block* const block = current->block;
  if (current->ended && block->live == 0) {
    end_block(*block);
    std::erase_if(machine->resident, [&](const auto& one) { return one.get() == block; });
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
      machine->runnable.push_back(&other);
    }
  }
  pause();
}

void run_machine(const KernelLaunch& kernel) {
  Machine mine{.kernel = kernel, .random = testing::Random(settings().seed)};
  machine = &mine;
  const unsigned last = settings().last_blocks;
  const unsigned skipped = last == 0 || last > kernel.blocks ? 0 : kernel.blocks - last;
  mine.order.resize(kernel.blocks - skipped);
  std::iota(mine.order.begin(), mine.order.end(), skipped);
  mine.random.shuffle(mine.order);
  while (true) {
    while (mine.next_block < mine.order.size() && mine.resident.size() < settings().resident) {
      mine.resident.push_back(start_block(mine.order[mine.next_block++]));
    }
    if (mine.resident.empty()) {
      return;
    }
    if (mine.runnable.empty()) {
      report_deadlock();
    }
    step();
  }
}

}  // namespace syncbn::emulation
