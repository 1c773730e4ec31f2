// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu/elements.hpp"
#include "cpu/sums.hpp"
#include "statistics/header.hpp"
#include "syncbn/executor.hpp"

namespace syncbn::cpu {

/// Channels of a block where both passes go through blocks of channels best; 0: one pass after the
/// other.
std::int64_t block_channels(const SampleView& x, const VectorSums& sums, const VectorMap& map,
                            Direction direction, int threads);

/// Between a block's sums and its map: makes statistics and constants of channels [begin, end).
using SetConstants = Executor::Body;

/// Sums of blocks of channels, each in turns with the map of the block before: loads and sums cost
/// nothing while stores are on their way to memory. Each thread has blocks of its own.
void run_in_blocks(const SampleView& x, const VectorSums& sums, VectorMap& map, SumsSink& sink,
                   std::int64_t block, const SetConstants& set_constants, Executor& executor);

/// The same in a group, in waves of one block for each thread, so that words come in order. The map
/// is two waves behind: the sums of the wave between are on their way to the other ranks meanwhile.
/// All words are published in the end. Whether the map is complete.
bool run_in_waves(const SampleView& x, const VectorSums& sums, VectorMap& map, SumsSink& sink,
                  std::int64_t block, GroupSums& group, const SetConstants& set_constants,
                  Executor& executor);

/// Whether bytes of one may be bytes of the other.
bool may_overlap(const SampleView& a, const SampleView& b);

}  // namespace syncbn::cpu
