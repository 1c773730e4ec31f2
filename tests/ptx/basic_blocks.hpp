// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "lanes.hpp"

namespace syncbn::ptx {

/// Threads may change where one ends: at branches, meetings, atomics.
void cut_into_blocks(Program& program, const std::map<std::string, std::size_t>& labels);

}  // namespace syncbn::ptx
