// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "block_memory.hpp"
#include "lanes.hpp"
#include "weak_memory.hpp"

// Launches: blocks, their warps and memory, and the order in which they run.
namespace syncbn::ptx {

using emulation::Observer;
using emulation::View;
using emulation::WeakMemory;
using testing::Random;

struct Options {
  std::uint64_t seed = 1;
  unsigned resident = 3;     ///< blocks that run at a time
  unsigned last_blocks = 0;  ///< only so many of the grid, its last; 0: all
  bool weak = false;         ///< global memory as PTX's model allows it, see weak_memory.hpp
  bool races = true;         ///< with weak: races of plain accesses are errors
  bool counts = false;       ///< of basic blocks
};

/// How often a basic block was executed: by threads, and by warps, which is for each warp what the
/// lane that came by most often did, as if its lanes ran together wherever they can.
struct BlockCount {
  std::uint64_t threads = 0;
  std::uint64_t warps = 0;
};

struct Execution {
  std::uint64_t thread_instructions = 0;  ///< of predicates that are false, too
  std::vector<BlockCount> counts;         ///< of each basic block, if they were asked for
};

struct Launch {
  const Program* program = nullptr;
  unsigned blocks = 0;
  unsigned threads = 0;
  std::size_t shared_bytes = 0;
  std::vector<std::byte> parameters;
};

struct Barrier {
  unsigned arrived = 0;
  std::uint32_t pc = 0;
};

struct Grid;

struct Block {
  Grid* grid = nullptr;
  unsigned index = 0;
  std::vector<Warp> warps;
  SharedMemory shared;
  std::vector<TrackedMemory> local;  ///< of each thread
  std::vector<Observer> observers;   ///< of each thread, with weak memory
  Barrier barrier;
  std::uint32_t barriers_passed = 0;
  unsigned live = 0;
  std::uint64_t rests_until = 0;  ///< steps of the grid
  bool fenced = false;            ///< since the last barrier

  explicit Block(std::size_t shared_bytes) : shared(shared_bytes) {}
};

/// What all devices have in common.
struct Machine {
  Random random;
  std::optional<WeakMemory> weak;
  AllocatedMemory allocated;
  std::uint64_t steps = 0;
  std::uint64_t threads = 0, blocks = 0;  ///< so far
  bool alone = true;                      ///< there is one device

  explicit Machine(std::uint64_t seed) : random(seed) {}
};

/// A launch under way.
struct Grid {
  const Launch* launch = nullptr;
  Options options;
  Machine& machine;
  std::uint64_t device = 0;
  Random& random = machine.random;
  std::optional<WeakMemory>& weak = machine.weak;
  AllocatedMemory& allocated = machine.allocated;
  Execution execution;
  View known = {};  ///< to those of its device that have ended
};

/// Who waits for what.
[[noreturn]] void report_deadlock(const std::vector<const Block*>& blocks);

/// Runs to the end of the grid. Throws KernelError.
Execution run(const Launch& launch, const Options& options);

/// Runs what each device has to run, one after the other, all devices at the same time. Blocks of a
/// kernel are resident all at once. done: called with each launch.
void run_devices(const std::vector<std::vector<Launch>>& devices, const Options& options,
                 const std::function<void(const Launch&, Execution)>& done);

}  // namespace syncbn::ptx
