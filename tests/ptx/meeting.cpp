#include <algorithm>
#include <bit>
#include <string>

#include "grid.hpp"
#include "operations.hpp"

// What the lanes of a warp do together. Handlers run once, when all lanes that a mask names are
// there; none of it orders memory.
namespace syncbn::ptx {
namespace {

enum Shuffle : std::uint64_t { kUp, kDown, kButterfly, kIndex };

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
    int from = 0;
    bool valid = false;
    switch (i.extra) {
      case kUp:
        from = lane - by;
        valid = from >= last;
        break;
      case kDown:
        from = lane + by;
        valid = from <= last;
        break;
      case kButterfly:
        from = lane ^ by;
        valid = from <= last;
        break;
      default:
        from = first | (by & ~segment);
        valid = from <= last;
    }
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

enum Vote : std::uint64_t { kAll, kAny, kUniform, kBallot };

void vote(Warp& w, const Instruction& i, std::uint32_t mask) {
  require_defined(w, i, mask, w.predicates_defined[i.r], "the predicate of a vote");
  const std::uint32_t yes = (w.predicates[i.r] ^ i.r_flip) & mask;
  if (i.extra == kBallot) {
    std::uint64_t* const d = written(w, i.d);
    each(mask, [&](unsigned l) { d[l] = yes; });
    define(w, i.d, mask, kAllLanes);
    return;
  }
  const bool result = i.extra == kAll   ? yes == mask
                      : i.extra == kAny ? yes != 0
                                        : yes == mask || yes == 0;
  define_predicate(w, i.p, mask, result ? kAllLanes : 0, kAllLanes);
}

template <class T, bool kAllEqual>
void match(Warp& w, const Instruction& i, std::uint32_t mask) {
  require_defined(w, i, mask, defined(w, i.a), "the value of a match");
  const std::uint64_t* const a = row(w, i.a);
  std::uint32_t equal[kLanes] = {};
  each(mask, [&](unsigned l) {
    each(mask, [&](unsigned k) {
      equal[l] |= static_cast<std::uint32_t>(get<T>(a[l]) == get<T>(a[k])) << k;
    });
  });
  const bool all = equal[std::countr_zero(mask)] == mask;
  std::uint64_t* const d = written(w, i.d);
  each(mask, [&](unsigned l) { d[l] = kAllEqual ? (all ? mask : 0) : equal[l]; });
  define(w, i.d, mask, kAllLanes);
  define_predicate(w, i.p, mask, all ? kAllLanes : 0, kAllLanes);
}

enum Reduction : std::uint64_t { kSum, kLeast, kMost, kBoth, kEither, kOneOf };

template <class T>
void reduce(Warp& w, const Instruction& i, std::uint32_t mask) {
  require_defined(w, i, mask, defined(w, i.a), "the value of a reduction");
  const std::uint64_t* const a = row(w, i.a);
  T out = get<T>(a[std::countr_zero(mask)]);
  each(mask & (mask - 1), [&](unsigned l) {
    const T v = get<T>(a[l]);
    out = i.extra == kSum
              ? static_cast<T>(static_cast<std::uint32_t>(out) + static_cast<std::uint32_t>(v))
          : i.extra == kLeast  ? std::min(out, v)
          : i.extra == kMost   ? std::max(out, v)
          : i.extra == kBoth   ? out & v
          : i.extra == kEither ? out | v
                               : out ^ v;
  });
  std::uint64_t* const d = written(w, i.d);
  each(mask, [&](unsigned l) { d[l] = put(out); });
  define(w, i.d, mask, kAllLanes);
}

void elect(Warp& w, const Instruction& i, std::uint32_t mask) {
  const auto leader = static_cast<unsigned>(std::countr_zero(mask));
  if (i.d != kSink) {
    std::uint64_t* const d = written(w, i.d);
    each(mask, [&](unsigned l) { d[l] = leader; });
    define(w, i.d, mask, kAllLanes);
  }
  define_predicate(w, i.p, mask, 1u << leader, kAllLanes);
}

void barrier(Warp& w, const Instruction&, std::uint32_t mask) {
  ++w.barriers;
  Block& block = *w.block;
  if (block.grid->weak.has_value()) {
    std::vector<Observer*> all;
    each(mask, [&](unsigned l) { all.push_back(&block.observers[w.index * kLanes + l]); });
    WeakMemory::barrier(all);
  }
}

void active_mask(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint64_t* const d = written(w, i.d);
  each(mask, [&](unsigned l) { d[l] = mask; });
  define(w, i.d, mask, kAllLanes);
}

/// The place of the first name that the statement has; none: their number.
std::uint64_t which(const Statement& s, std::initializer_list<const char*> names) {
  const auto found =
      std::find_if(names.begin(), names.end(), [&](const char* name) { return s.has(name); });
  return static_cast<std::uint64_t>(found - names.begin());
}

}  // namespace

Handler meeting(const Statement& s, Instruction& out) {
  const std::string& op = s.op[0];
  if (op == "activemask") {
    return &active_mask;
  }
  out.kind = Kind::kWarpMeeting;
  if (op == "bar" || op == "barrier") {
    out.kind = Kind::kWarpBarrier;
    return s.has("warp") && s.has("sync") ? &barrier : nullptr;
  }
  if (op == "elect") {
    return &elect;
  }
  if (!s.has("sync")) {
    return nullptr;  // the old forms, without a mask
  }
  if (op == "shfl") {
    out.extra = which(s, {"up", "down", "bfly", "idx"});
    return out.extra < 4 ? &shuffle : nullptr;
  }
  if (op == "vote") {
    out.extra = which(s, {"all", "any", "uni", "ballot"});
    return out.extra < 4 ? &vote : nullptr;
  }
  if (op == "match") {
    const bool wide = s.op.back() == "b64";
    return s.has("all") ? (wide ? &match<std::uint64_t, true> : &match<std::uint32_t, true>)
                        : (wide ? &match<std::uint64_t, false> : &match<std::uint32_t, false>);
  }
  if (op == "redux") {
    out.extra = which(s, {"add", "min", "max", "and", "or", "xor"});
    return out.extra >= 6          ? nullptr
           : s.op.back() == "s32"  ? &reduce<std::int32_t>
           : s.op.back()[0] != 'f' ? &reduce<std::uint32_t>
                                   : nullptr;
  }
  return nullptr;
}

}  // namespace syncbn::ptx
