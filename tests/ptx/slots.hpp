// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "lanes.hpp"

namespace syncbn::ptx {

/// PTX has a register for every value. Those that live within one basic block share rows, so that
/// a warp's registers fit the cache. values: how many there are.
void share_slots(Program& program, std::uint32_t values);

}  // namespace syncbn::ptx
