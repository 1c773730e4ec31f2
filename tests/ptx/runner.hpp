// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "grid.hpp"

// How the warps of a block run.
namespace syncbn::ptx {

std::unique_ptr<Block> start_block(Grid& grid, unsigned index);
/// Runs some lanes of the warp for a while. False: none of them can.
bool step(Grid& grid, Warp& warp);

}  // namespace syncbn::ptx
