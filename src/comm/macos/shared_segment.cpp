// SPDX-License-Identifier: Apache-2.0
#include "comm/shared_segment.hpp"

#include <unistd.h>

#include <string_view>

// Without Linux's sealed memory and watched processes nothing is offered, and no group is made.
namespace syncbn {
namespace {

constexpr std::string_view kFailure = "processes share memory on Linux only";

}  // namespace

void Descriptor::reset() {}

Mapping::~Mapping() = default;

void make_offer(int rank, int size, std::size_t /*bytes*/, LocalOffer& out) {
  out.content.process = getpid();
  out.content.rank = rank;
  out.content.size = size;
  kFailure.copy(out.content.failure.data(), kFailure.size());
}

Segment open_segment(LocalOffer& /*mine*/, const std::vector<OfferContent>& /*offers*/,
                     std::size_t /*bytes*/) {
  Segment segment;
  segment.why = "rank 0 cannot share memory: " + std::string(kFailure);
  return segment;
}

}  // namespace syncbn
