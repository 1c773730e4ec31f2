#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "block_memory.hpp"
#include "lanes.hpp"
#include "weak_memory.hpp"

// One launch: blocks, their warps and memory, and the order in which they run.
namespace syncbn::ptx {

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

struct Grid {
  const Launch* launch = nullptr;
  Options options;
  Random random;
  std::optional<WeakMemory> weak;
  AllocatedMemory allocated;
  Execution execution;
  std::uint64_t steps = 0;

  explicit Grid(std::uint64_t seed) : random(seed) {}
};

/// Who waits for what.
[[noreturn]] void report_deadlock(const std::vector<std::unique_ptr<Block>>& blocks);

/// Runs to the end of the grid. Throws KernelError.
Execution run(const Launch& launch, const Options& options);

}  // namespace syncbn::ptx
