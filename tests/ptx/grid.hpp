// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "block_memory.hpp"
#include "lanes.hpp"
#include "random.hpp"

// Launches: blocks, their warps and memory, and the order in which they run.
namespace syncbn::ptx {

using testing::Random;

struct Options {
  std::uint64_t seed = 1;
  unsigned resident = 3;     ///< blocks that run at a time
  unsigned last_blocks = 0;  ///< only so many of the grid, its last; 0: all
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
  Barrier barrier;
  std::uint32_t barriers_passed = 0;
  unsigned live = 0;

  explicit Block(std::size_t shared_bytes) : shared(shared_bytes) {}
};

/// A launch under way.
struct Grid {
  const Launch* launch = nullptr;
  Random random;
  std::vector<std::unique_ptr<Block>> resident = {};
  AllocatedMemory allocated = {};
  std::uint64_t thread_instructions = 0;  ///< of predicates that are false, too
};

/// Who waits for what.
[[noreturn]] void report_deadlock(const Grid& grid);

/// Runs to the end of the grid, and returns how many instructions its threads took. Throws
/// KernelError.
std::uint64_t run(const Launch& launch, const Options& options);

}  // namespace syncbn::ptx
