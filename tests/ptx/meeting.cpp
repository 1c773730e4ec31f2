// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <string>

#include "grid.hpp"
#include "operations.hpp"

// What the lanes of a warp do together. Handlers run once, when all lanes that a mask names are
// there.
namespace syncbn::ptx {
namespace {

template <bool kButterfly>
void shuffle(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  require_defined(w, i, mask, defined(w, i.b) & defined(w, i.c), "the lane of a shuffle");
  std::uint64_t values[kLanes] = {};
  std::uint32_t known = 0;
  std::uint32_t inside = 0;
  each(mask, [&](unsigned l) {
    const auto lane = static_cast<int>(l);
    const auto by = static_cast<int>(b[l] & 31);
    const auto clamp = static_cast<int>(c[l] & 31);
    const auto segment = static_cast<int>(c[l] >> 8 & 31);
    const int first = lane & segment;
    const int last = first | (clamp & ~segment);
    int from = kButterfly ? lane ^ by : first | (by & ~segment);
    const bool valid = from <= last;
    from = valid ? from : lane;
    const std::uint32_t bit = 1u << static_cast<unsigned>(from);
    if ((mask & bit) == 0) {
      fail(w, i, l, "a shuffle from lane " + std::to_string(from) + ", which its mask leaves out");
    }
    values[l] = a[from];
    known |= (defined(w, i.a) & bit) != 0 ? 1u << l : 0;
    inside |= static_cast<std::uint32_t>(valid) << l;
  });
  if (i.d != kSink) {
    std::uint64_t* const d = written(w, i.d);
    each(mask, [&](unsigned l) { d[l] = values[l]; });
    define(w, i.d, mask, known);
  }
  define_predicate(w, i.p, mask, inside, kAllLanes);
}

std::uint32_t votes(const Warp& w, const Instruction& i, std::uint32_t mask) {
  require_defined(w, i, mask, w.predicates_defined[i.r], "the predicate of a vote");
  return (w.predicates[i.r] ^ i.r_flip) & mask;
}
void any(Warp& w, const Instruction& i, std::uint32_t mask) {
  define_predicate(w, i.p, mask, votes(w, i, mask) != 0 ? kAllLanes : 0, kAllLanes);
}
void ballot(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint32_t yes = votes(w, i, mask);
  std::uint64_t* const d = written(w, i.d);
  each(mask, [&](unsigned l) { d[l] = yes; });
  define(w, i.d, mask, kAllLanes);
}

void barrier(Warp& w, const Instruction&, std::uint32_t) { ++w.barriers; }

}  // namespace

Handler meeting(const Statement& s, Instruction& out) {
  const std::string op = s.opcode();
  out.kind = op == "bar.warp.sync" ? Kind::kWarpBarrier : Kind::kWarpMeeting;
  return op == "bar.warp.sync"          ? &barrier
         : op == "shfl.sync.bfly.b32"   ? &shuffle<true>
         : op == "shfl.sync.idx.b32"    ? &shuffle<false>
         : op == "vote.sync.any.pred"   ? &any
         : op == "vote.sync.ballot.b32" ? &ballot
                                        : nullptr;
}

}  // namespace syncbn::ptx
