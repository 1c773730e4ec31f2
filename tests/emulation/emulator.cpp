#include "emulator.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "fiber.hpp"

namespace syncbn::emulation {
namespace {

constexpr std::byte kCanary{0xc5};
constexpr std::size_t kCanaryBytes = 64;

Counts counted;
std::set<std::pair<int, const void*>> loaded;  // device and kernel

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
  std::array<std::array<std::uint64_t, kWarp>, 2> values{};  // of this round and of the last
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Meeting> warps;
  Meeting whole;
  std::vector<std::byte> memory;  // canaries on both sides
  std::size_t bytes = 0;
  unsigned live = 0;

  std::byte* shared() {
    void* from = memory.data() + kCanaryBytes;
    std::size_t space = memory.size() - kCanaryBytes;
    return static_cast<std::byte*>(std::align(16, bytes, from, space));
  }
};

struct Launch {
  const std::function<void()>* kernel = nullptr;
  std::vector<Thread*> runnable;
  std::exception_ptr error;
  std::uint64_t state = 0;

  std::uint64_t random() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
};

void (*other_runner)(const KernelLaunch&) = nullptr;
Launch* launch = nullptr;
Thread* current = nullptr;
std::vector<std::unique_ptr<Fiber>> spare_fibers;

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

void run_thread(void* argument) {
  auto& thread = *static_cast<Thread*>(argument);
  try {
    (*launch->kernel)();
  } catch (...) {
    launch->error = std::current_exception();
  }
  thread.ended = true;
  --thread.block->live;
  thread.fiber->suspend(true);
}

/// Waits until `expected` threads have arrived. Returns the round's number.
std::uint64_t meet(Meeting& meeting, Operation operation, const std::source_location& at) {
  Thread& me = *current;
  me.waits_at = operation;
  me.site = at;
  const std::uint64_t round = meeting.rounds;
  if (++meeting.arrived < meeting.expected) {
    me.fiber->suspend(false);
    return round;
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
      launch->runnable.push_back(&other);
    }
  }
  pause();
  return round;
}

std::unique_ptr<Block> start_block(unsigned index, unsigned blocks, unsigned threads,
                                   std::size_t shared_bytes) {
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
    thread.at = {i, index, threads, blocks};
    thread.block = block.get();
    ++block->warps[i / kWarp].expected;
    if (spare_fibers.empty()) {
      thread.fiber = std::make_unique<Fiber>();
    } else {
      thread.fiber = std::move(spare_fibers.back());
      spare_fibers.pop_back();
    }
    thread.fiber->start(&run_thread, &thread);
    launch->runnable.push_back(&thread);
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

[[noreturn]] void report_deadlock(const std::vector<std::unique_ptr<Block>>& blocks) {
  std::string text = "no thread can go on:";
  int shown = 0;
  for (const auto& block : blocks) {
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

void set_runner(void (*runner)(const KernelLaunch& kernel)) { other_runner = runner; }

void run(const KernelLaunch& kernel) {
  if (other_runner != nullptr) {
    other_runner(kernel);
    return;
  }
  const auto [blocks, threads, shared_bytes] =
      std::tuple(kernel.blocks, kernel.threads, kernel.shared_bytes);
  if (blocks == 0 || threads == 0 || threads > 1024 || shared_bytes > (48 << 10)) {
    throw KernelError("a launch of " + std::to_string(blocks) + " blocks of " +
                      std::to_string(threads) + " threads with " + std::to_string(shared_bytes) +
                      " bytes of shared memory");
  }
  if (settings().resident == 0) {
    return;
  }
  Launch mine;
  mine.kernel = &kernel.thread;
  mine.state = settings().seed;
  launch = &mine;
  const unsigned last = settings().last_blocks;
  const unsigned skipped = last == 0 || last > blocks ? 0 : blocks - last;
  std::vector<unsigned> order(blocks - skipped);
  std::iota(order.begin(), order.end(), skipped);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[mine.random() % i]);
  }
  std::vector<std::unique_ptr<Block>> resident;
  std::size_t next = 0;
  while (next < order.size() || !resident.empty()) {
    while (next < order.size() && resident.size() < settings().resident) {
      resident.push_back(start_block(order[next++], blocks, threads, shared_bytes));
    }
    if (mine.runnable.empty()) {
      report_deadlock(resident);
    }
    std::swap(mine.runnable[mine.random() % mine.runnable.size()], mine.runnable.back());
    current = mine.runnable.back();
    mine.runnable.pop_back();
    current->fiber->resume();
    if (mine.error) {
      std::rethrow_exception(mine.error);
    }
    for (std::size_t i = 0; current->ended && i < resident.size(); ++i) {
      if (resident[i]->live == 0) {
        end_block(*resident[i]);
        resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
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
  launch->runnable.push_back(current);
  current->fiber->suspend(false);
}

void check_aligned(const void* address, std::size_t alignment, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
    throw KernelError(std::string(what) + " of " + std::to_string(alignment) +
                      " bytes at an address that is not a multiple of it");
  }
}

}  // namespace syncbn::emulation
