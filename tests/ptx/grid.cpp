// SPDX-License-Identifier: Apache-2.0
#include "grid.hpp"

#include <numeric>

#include "runner.hpp"

namespace syncbn::ptx {
namespace {

/// Lets some warp of some block run. False: none can.
bool step(Grid& grid) {
  const std::size_t blocks = grid.resident.size();
  const std::size_t first = grid.random.below(blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    Block& block = *grid.resident[(first + i) % blocks];
    const std::size_t warps = block.warps.size();
    const std::size_t first_warp = grid.random.below(warps);
    for (std::size_t w = 0; w < warps; ++w) {
      if (step(grid, block.warps[(first_warp + w) % warps])) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

std::uint64_t run(const Launch& launch, const Options& options) {
  Grid grid{.launch = &launch, .random = Random(options.seed)};
  const unsigned last = options.last_blocks;
  const unsigned skipped = last == 0 || last > launch.blocks ? 0 : launch.blocks - last;
  std::vector<unsigned> order(launch.blocks - skipped);
  std::iota(order.begin(), order.end(), skipped);
  grid.random.shuffle(order);
  while (true) {
    std::erase_if(grid.resident, [](const auto& block) { return block->live == 0; });
    while (!order.empty() && grid.resident.size() < options.resident) {
      grid.resident.push_back(start_block(grid, order.back()));
      order.pop_back();
    }
    if (grid.resident.empty()) {
      return grid.thread_instructions;
    }
    if (!step(grid)) {
      report_deadlock(grid);
    }
  }
}

}  // namespace syncbn::ptx
