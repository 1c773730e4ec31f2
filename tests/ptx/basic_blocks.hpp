// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "lanes.hpp"

namespace syncbn::ptx {

/// Threads may change where one ends: at branches, meetings, atomics, fences.
void cut_into_blocks(Program& program, const std::map<std::string, std::size_t>& labels);

/// An atomic whose result nobody reads is a reduction, which ptxas makes of it.
void mark_unused_results(Program& program);

}  // namespace syncbn::ptx
