#pragma once

#include <cstdint>
#include <functional>

#include "cpu/elements.hpp"
#include "cpu/sums.hpp"
#include "syncbn/executor.hpp"

namespace syncbn::cpu {

/// Channels of a block where both passes go through blocks of channels best; 0: one pass after the
/// other.
std::int64_t block_channels(const SampleView& x, const VectorSums& sums, const VectorMap& map,
                            Direction direction, int threads);

/// Sums of blocks of channels, each in turns with the map of the block before: loads and sums cost
/// nothing while stores are on their way to memory. set_constants(begin, end) comes between a
/// block's sums and its map.
void run_in_blocks(const SampleView& x, const VectorSums& sums, VectorMap& map, SumsSink& sink,
                   std::int64_t block,
                   const std::function<void(std::int64_t begin, std::int64_t end)>& set_constants,
                   Executor& executor);

/// Whether bytes of one may be bytes of the other.
bool may_overlap(const SampleView& a, const SampleView& b);

}  // namespace syncbn::cpu
