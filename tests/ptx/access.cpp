// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <set>
#include <string>

#include "grid.hpp"
#include "operations.hpp"

// Loads, stores and atomics, with the checks of each.
namespace syncbn::ptx {
namespace {

const char* name(Space space) {
  constexpr const char* kNames[] = {"generic", "global", "shared", "local", "parameter"};
  return kNames[static_cast<int>(space)];
}

/// An address in its space.
struct Place {
  Space space;
  std::uint64_t at;
};
/// Generic addresses are of global memory: nothing makes one of another.
Place place_of(const Instruction& i, std::uint64_t address) {
  return {i.space == Space::kGeneric ? Space::kGlobal : i.space, address};
}

std::string text_of(const char* what, std::size_t bytes, const Place& place) {
  char address[32];
  std::snprintf(address, sizeof(address), "0x%llx", static_cast<unsigned long long>(place.at));
  return std::string(what) + " " + std::to_string(bytes) + " bytes of " + name(place.space) +
         " memory at " + address;
}

class Accessor {
 public:
  Accessor(Warp& w, const Instruction& i, unsigned lane)
      : warp_(w), at_(i), lane_(lane), block_(*w.block), grid_(*w.block->grid) {}

  /// The whole access; parts of it then need no more checks.
  void check(const Place& place, std::size_t bytes, const char* what) {
    if (place.at % bytes != 0) {
      fail(warp_, at_, lane_, "misaligned: " + text_of(what, bytes, place));
    }
    const bool inside = place.space == Space::kGlobal   ? grid_.allocated.holds(place.at, bytes)
                        : place.space == Space::kShared ? block_.shared.inside(place.at, bytes)
                        : place.space == Space::kLocal
                            ? local().inside(place.at, bytes)
                            : place.at + bytes <= grid_.launch->parameters.size();
    if (!inside) {
      fail(warp_, at_, lane_, "outside of what there is: " + text_of(what, bytes, place));
    }
  }
  /// Returns whether the bytes were ever written.
  bool load(const Place& place, std::size_t bytes, std::uint64_t* value) {
    *value = 0;
    switch (place.space) {
      case Space::kShared:
        note(place, bytes, false);
        std::memcpy(value, block_.shared.at(place.at), bytes);
        return block_.shared.written(place.at, bytes);
      case Space::kLocal:
        std::memcpy(value, local().at(place.at), bytes);
        return local().written(place.at, bytes);
      case Space::kParameter:
        std::memcpy(value, grid_.launch->parameters.data() + place.at, bytes);
        return true;
      default:
        break;
    }
    std::memcpy(value, reinterpret_cast<const void*>(place.at), bytes);
    return true;
  }
  void store(const Place& place, std::size_t bytes, std::uint64_t value, bool defined) {
    switch (place.space) {
      case Space::kShared:
        note(place, bytes, true);
        std::memcpy(block_.shared.at(place.at), &value, bytes);
        block_.shared.mark(place.at, bytes, defined);
        return;
      case Space::kLocal:
        std::memcpy(local().at(place.at), &value, bytes);
        local().mark(place.at, bytes, defined);
        return;
      case Space::kParameter:
        fail(warp_, at_, lane_, "writes parameters");
      default:
        break;
    }
    if (!defined) {
      fail(warp_, at_, lane_, "what it stores was never written");
    }
    std::memcpy(reinterpret_cast<void*>(place.at), &value, bytes);
  }

 private:
  unsigned thread() const { return warp_.index * kLanes + lane_; }
  TrackedMemory& local() { return block_.local[thread()]; }
  void note(const Place& place, std::size_t bytes, bool writes) {
    const std::string race = block_.shared.note(
        place.at, bytes, {thread(), block_.barriers_passed, warp_.barriers}, writes);
    if (!race.empty()) {
      fail(warp_, at_, lane_, race);
    }
  }

  Warp& warp_;
  const Instruction& at_;
  unsigned lane_;
  Block& block_;
  Grid& grid_;
};

void load(Warp& w, const Instruction& i, std::uint32_t mask) {
  require_defined(w, i, mask, defined(w, i.a), "the address of a load");
  const Register* const parts = w.program->parts.data() + i.parts;
  const std::size_t whole = std::size_t{i.bytes} * i.count;
  std::uint32_t known[8] = {};
  each(mask, [&](unsigned l) {
    const Place place = place_of(i, row(w, i.a)[l] + static_cast<std::uint64_t>(i.offset));
    Accessor accessor(w, i, l);
    accessor.check(place, whole, "reads");
    std::uint64_t values[8];
    for (std::uint32_t k = 0; k < i.count; ++k) {
      const Place one{place.space, place.at + k * i.bytes};
      known[k] |= static_cast<std::uint32_t>(accessor.load(one, i.bytes, &values[k])) << l;
      if (i.sign) {
        const unsigned unused = 64u - i.bytes * 8u;
        values[k] =
            static_cast<std::uint64_t>(static_cast<std::int64_t>(values[k] << unused) >> unused);
      }
    }
    for (std::uint32_t k = 0; k < i.count; ++k) {  // a part may be the address
      if (parts[k] != kSink) {
        written(w, parts[k])[l] = values[k];
      }
    }
  });
  for (std::uint32_t k = 0; k < i.count; ++k) {
    if (parts[k] != kSink) {
      define(w, parts[k], mask, known[k]);
    }
  }
}

/// Parameters are the same for all lanes.
void load_parameter(Warp& w, const Instruction& i, std::uint32_t mask) {
  const Register* const parts = w.program->parts.data() + i.parts;
  const std::vector<std::byte>& from = w.block->grid->launch->parameters;
  for (std::uint32_t k = 0; k < i.count; ++k) {
    std::uint64_t value = 0;
    const auto at = static_cast<std::size_t>(i.offset) + k * i.bytes;
    if (at + i.bytes > from.size()) {
      fail(w, i, 0, "reads beyond the kernel's parameters");
    }
    std::memcpy(&value, from.data() + at, i.bytes);
    if (i.sign) {
      const unsigned unused = 64u - i.bytes * 8u;
      value = static_cast<std::uint64_t>(static_cast<std::int64_t>(value << unused) >> unused);
    }
    if (parts[k] != kSink) {
      std::uint64_t* const d = written(w, parts[k]);
      each(mask, [&](unsigned l) { d[l] = value; });
      define(w, parts[k], mask, kAllLanes);
    }
  }
}

void store(Warp& w, const Instruction& i, std::uint32_t mask) {
  require_defined(w, i, mask, defined(w, i.a), "the address of a store");
  const Register* const parts = w.program->parts.data() + i.parts;
  const std::size_t whole = std::size_t{i.bytes} * i.count;
  each(mask, [&](unsigned l) {
    const Place place = place_of(i, row(w, i.a)[l] + static_cast<std::uint64_t>(i.offset));
    Accessor accessor(w, i, l);
    accessor.check(place, whole, "writes");
    for (std::uint32_t k = 0; k < i.count; ++k) {
      accessor.store({place.space, place.at + k * i.bytes}, i.bytes, row(w, parts[k])[l],
                     (defined(w, parts[k]) >> l & 1u) != 0);
    }
  });
}

using Update = std::uint64_t (*)(std::uint64_t before, std::uint64_t operand);
std::uint64_t sum(std::uint64_t a, std::uint64_t b) { return a + b; }
std::uint64_t either(std::uint64_t a, std::uint64_t b) { return a | b; }

/// a: the address; b: the operand.
void update(Warp& w, const Instruction& i, std::uint32_t mask) {
  require_defined(w, i, mask, defined(w, i.a), "the address of an atomic");
  require_defined(w, i, mask, defined(w, i.b), "an operand of an atomic");
  each(mask, [&](unsigned l) {
    const Place place = place_of(i, row(w, i.a)[l] + static_cast<std::uint64_t>(i.offset));
    Accessor accessor(w, i, l);
    accessor.check(place, i.bytes, "updates");
    auto* const to = reinterpret_cast<std::uint64_t*>(place.at);
    const std::uint64_t before = *to;
    *to = reinterpret_cast<Update>(i.extra)(before, row(w, i.b)[l]);
    if (i.d != kSink) {
      written(w, i.d)[l] = before;
    }
  });
  if (i.d != kSink) {
    define(w, i.d, mask, kAllLanes);
  }
}

Space space_of(const Statement& s) {
  return s.has("global")   ? Space::kGlobal
         : s.has("shared") ? Space::kShared
         : s.has("local")  ? Space::kLocal
         : s.has("param")  ? Space::kParameter
                           : Space::kGeneric;
}

bool element(const std::string& type, Instruction& out) {
  const std::size_t digits = type.find_first_of("0123456789");
  if (digits == std::string::npos) {
    return false;
  }
  out.bytes = static_cast<std::uint8_t>(std::stoul(type.substr(digits)) / 8);
  out.sign = type[0] == 's' && out.bytes < 8;
  return out.bytes > 0 && out.bytes <= 8;
}

}  // namespace

Handler access(const Statement& s, Instruction& out) {
  const std::string& op = s.op[0];
  const bool atomic = op == "atom" || op == "red";
  out.pauses = atomic;
  out.space = space_of(s);
  if (op == "ld" || op == "st" || atomic) {
    for (std::size_t i = 1; i + 1 < s.op.size(); ++i) {
      static const std::set<std::string> kKnown = {
          "global", "shared", "local", "param", "v2", "v4", "cg", "acq_rel", "gpu", "add", "or"};
      if (kKnown.count(s.op[i]) == 0) {
        return nullptr;
      }
    }
    if (!element(s.op.back(), out)) {
      return nullptr;
    }
  }
  if (op == "ld") {
    return out.space == Space::kParameter && s.operands[1].name[0] != '%' ? &load_parameter : &load;
  }
  if (op == "st" && out.space != Space::kParameter) {
    return &store;
  }
  if (atomic && out.space == Space::kGlobal && out.bytes == 8) {
    const Update how = s.has("add") ? &sum : s.has("or") ? &either : nullptr;
    out.extra = reinterpret_cast<std::uint64_t>(how);
    return how == nullptr ? nullptr : &update;
  }
  return nullptr;
}

}  // namespace syncbn::ptx
