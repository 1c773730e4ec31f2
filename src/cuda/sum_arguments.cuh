// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/loading.hpp"
#include "cuda/packing.cuh"
#include "statistics/lanes.hpp"

// What sums are given, and how their work is cut up, on the host.
namespace syncbn::cuda {

inline MessageHeader moments_header(const ForwardCall& call) {
  MessageHeader header;
  header.direction = Direction::kForward;
  header.layer = call.layer;
  header.call = call.call;
  header.eps = call.eps;
  header.backward = call.backward;
  return header;
}
/// info: the forward's.
inline MessageHeader gradients_header(const std::int64_t* info) {
  MessageHeader header;
  header.direction = Direction::kBackward;
  header.info = info;
  return header;
}

/// Everything but the layout, and loads all kernels. False: there is nothing to add up.
inline bool fill_sums(SumsArguments& a, const SampleView& x, const MessageHeader& header,
                      std::int64_t* message, std::int64_t* workspace) {
  load_kernels(x.dtype);
  a.header = header;
  a.header.count = x.samples * x.plane;
  a.header.dtype = x.dtype;
  a.header.channels = x.channels;
  a.counts = x.mask;
  a.message = message;
  a.workspace = workspace;
  a.channels = x.channels;
  a.plane = x.plane;
  if (x.empty() || x.channels == 0) {
    return false;
  }
  a.segments = Divisor(divide_up(x.plane, kSegment));
  a.samples = Divisor(x.samples);
  a.units = x.samples * a.segments.value();
  return true;
}

/// Cuts the units of a channel into jobs, about `wanted` in all, each a multiple of `at_once`.
inline void deal(SumsArguments& a, std::int64_t channel_blocks, std::int64_t at_once,
                 std::int64_t wanted) {
  const std::int64_t rounds = divide_up(a.units, at_once);
  const std::int64_t jobs = std::clamp<std::int64_t>(divide_up(wanted, channel_blocks), 1, rounds);
  a.units_per_job = divide_up(rounds, jobs) * at_once;
  a.jobs_per_channel = Divisor(divide_up(a.units, a.units_per_job));
  a.jobs = a.jobs_per_channel.value() * channel_blocks;
}

}  // namespace syncbn::cuda
