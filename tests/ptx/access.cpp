#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "grid.hpp"
#include "operations.hpp"

// Loads, stores, atomics and fences, with the checks of each.
namespace syncbn::ptx {
namespace {

const char* name(Space space) {
  constexpr const char* kNames[] = {"generic", "global",    "shared",
                                    "local",   "parameter", "constant"};
  return kNames[static_cast<int>(space)];
}

/// An address in its space.
struct Place {
  Space space;
  std::uint64_t at;
};
Place place_of(const Instruction& i, std::uint64_t address) {
  if (i.space != Space::kGeneric) {
    return {i.space == Space::kConstant ? Space::kGlobal : i.space, address};
  }
  const std::uint64_t window = address & kWindowMask;
  const std::uint64_t offset = address & ~kWindowMask;
  return window == kSharedWindow      ? Place{Space::kShared, offset}
         : window == kLocalWindow     ? Place{Space::kLocal, offset}
         : window == kParameterWindow ? Place{Space::kParameter, offset}
                                      : Place{Space::kGlobal, address};
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
    if (!grid_.weak.has_value()) {
      std::memcpy(value, reinterpret_cast<const void*>(place.at), bytes);
      return true;
    }
    if (at_.order.read_only && grid_.weak->written(place.at)) {
      fail(warp_, at_, lane_,
           "through the read-only cache, but the kernel writes it: " +
               text_of("reads", bytes, place));
    }
    refuse(grid_.weak->read(observer(), place.at, bytes, at_.order, value), "reads", bytes, place);
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
    if (!grid_.weak.has_value()) {
      std::memcpy(reinterpret_cast<void*>(place.at), &value, bytes);
      return;
    }
    refuse(grid_.weak->write(observer(), place.at, bytes, at_.order, value), "writes", bytes,
           place);
  }
  std::uint64_t update(const Place& place, std::size_t bytes, Update update, std::uint64_t operand,
                       std::uint64_t compare, bool wanted) {
    std::uint64_t before = 0;
    if (place.space == Space::kGlobal && grid_.weak.has_value()) {
      refuse(grid_.weak->update(observer(), place.at, bytes, at_.order, update, operand, compare,
                                wanted, &before),
             "updates", bytes, place);
      return before;
    }
    std::byte* to = reinterpret_cast<std::byte*>(place.at);
    if (place.space == Space::kShared) {  // atomics do not race with each other
      if (!block_.shared.written(place.at, bytes)) {
        fail(warp_, at_, lane_, "was never written: " + text_of("updates", bytes, place));
      }
      to = block_.shared.at(place.at);
    } else if (place.space != Space::kGlobal) {
      fail(warp_, at_, lane_, "an atomic in " + std::string(name(place.space)) + " memory");
    }
    std::memcpy(&before, to, bytes);
    const std::uint64_t after = update(before, operand, compare);
    std::memcpy(to, &after, bytes);
    return before;
  }
  Observer& observer() { return block_.observers[thread()]; }

 private:
  unsigned thread() const { return warp_.index * kLanes + lane_; }
  TrackedMemory& local() { return block_.local[thread()]; }
  void refuse(bool race, const char* what, std::size_t bytes, const Place& place) {
    if (race && grid_.options.races) {
      fail(warp_, at_, lane_,
           "a race, no fence or barrier orders it after another thread's write: " +
               text_of(what, bytes, place));
    }
  }
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

std::uint64_t swap(std::uint64_t, std::uint64_t operand, std::uint64_t) { return operand; }
std::uint64_t compare_and_swap(std::uint64_t old, std::uint64_t operand, std::uint64_t compare) {
  return old == compare ? operand : old;
}
template <class T>
struct Updates {
  static std::uint64_t add(std::uint64_t a, std::uint64_t b, std::uint64_t) {
    if constexpr (std::is_floating_point_v<T>) {
      return put(get<T>(a) + get<T>(b));
    } else {
      return put(static_cast<T>(a + b));
    }
  }
  static std::uint64_t least(std::uint64_t a, std::uint64_t b, std::uint64_t) {
    return put(std::min(get<T>(a), get<T>(b)));
  }
  static std::uint64_t most(std::uint64_t a, std::uint64_t b, std::uint64_t) {
    return put(std::max(get<T>(a), get<T>(b)));
  }
  static std::uint64_t both(std::uint64_t a, std::uint64_t b, std::uint64_t) { return a & b; }
  static std::uint64_t either(std::uint64_t a, std::uint64_t b, std::uint64_t) { return a | b; }
  static std::uint64_t one_of(std::uint64_t a, std::uint64_t b, std::uint64_t) { return a ^ b; }
  static std::uint64_t up(std::uint64_t a, std::uint64_t b, std::uint64_t) {
    return a >= b ? 0 : a + 1;
  }
  static std::uint64_t down(std::uint64_t a, std::uint64_t b, std::uint64_t) {
    return a == 0 || a > b ? b : a - 1;
  }
  static Update of(const Statement& s) {
    constexpr bool kReal = std::is_floating_point_v<T>;
    return s.has("add")    ? &add
           : s.has("exch") ? &swap
           : s.has("cas")  ? &compare_and_swap
           : kReal         ? nullptr
           : s.has("min")  ? &least
           : s.has("max")  ? &most
           : s.has("and")  ? &both
           : s.has("or")   ? &either
           : s.has("xor")  ? &one_of
           : s.has("inc")  ? &up
           : s.has("dec")  ? &down
                           : nullptr;
  }
};

/// a: the address; b, c: operands, of cas what is compared and what is stored.
void update(Warp& w, const Instruction& i, std::uint32_t mask) {
  const auto how = reinterpret_cast<Update>(i.extra);
  const bool compares = how == &compare_and_swap;
  require_defined(w, i, mask, defined(w, i.a), "the address of an atomic");
  require_defined(w, i, mask, defined(w, i.b) & (compares ? defined(w, i.c) : kAllLanes),
                  "an operand of an atomic");
  const std::uint64_t ones =
      i.bytes == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << i.bytes * 8) - 1;
  each(mask, [&](unsigned l) {
    const Place place = place_of(i, row(w, i.a)[l] + static_cast<std::uint64_t>(i.offset));
    Accessor accessor(w, i, l);
    accessor.check(place, i.bytes, "updates");
    const std::uint64_t operand = row(w, compares ? i.c : i.b)[l] & ones;
    const std::uint64_t before =
        accessor.update(place, i.bytes, how, operand, compares ? row(w, i.b)[l] & ones : 0,
                        i.d != kSink || compares);
    if (i.d != kSink) {
      written(w, i.d)[l] = before;
    }
  });
  if (i.d != kSink) {
    define(w, i.d, mask, kAllLanes);
  }
}

void fence(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (w.block->grid->weak.has_value()) {
    each(mask,
         [&](unsigned l) { w.block->grid->weak->fence(Accessor(w, i, l).observer(), i.order); });
  }
}

void nothing(Warp&, const Instruction&, std::uint32_t) {}

Space space_of(const Statement& s) {
  return s.has("global")         ? Space::kGlobal
         : s.has("shared")       ? Space::kShared
         : s.has("shared::cta")  ? Space::kShared
         : s.has("local")        ? Space::kLocal
         : s.has("param")        ? Space::kParameter
         : s.has("param::entry") ? Space::kParameter
         : s.has("const")        ? Space::kConstant
                                 : Space::kGeneric;
}

bool element(const std::string& type, Instruction& out) {
  const std::size_t digits = type.find_first_of("0123456789");
  if (digits == std::string::npos) {
    return false;
  }
  out.bytes = static_cast<std::uint8_t>(
      type == "f16x2" || type == "bf16x2" ? 4 : std::stoul(type.substr(digits)) / 8);
  out.sign = type[0] == 's' && out.bytes < 8;
  return out.bytes > 0 && out.bytes <= 8;
}

}  // namespace

Handler access(const Statement& s, Instruction& out) {
  const std::string& op = s.op[0];
  out.order = {.strong = s.has("relaxed") || s.has("volatile") || s.has("acquire") ||
                         s.has("release") || s.has("acq_rel") || op == "atom" || op == "red",
               .acquire = s.has("acquire") || s.has("acq_rel"),
               .release = s.has("release") || s.has("acq_rel"),
               .block_scope = s.has("cta"),
               .read_only = s.has("nc")};
  out.space = space_of(s);
  if (op == "ld" || op == "ldu") {
    return !element(s.op.back(), out)                                       ? nullptr
           : out.space == Space::kParameter && s.operands[1].name[0] != '%' ? &load_parameter
                                                                            : &load;
  }
  if (op == "st") {
    return element(s.op.back(), out) ? &store : nullptr;
  }
  if (op == "atom" || op == "red") {
    Update how = nullptr;
    const auto pick = [&](auto t) { how = Updates<typename decltype(t)::Type>::of(s); };
    if (!element(s.op.back(), out) || s.has("noftz") ||
        (!with_float(s.op.back(), pick) && !with_integer(s.op.back(), pick)) || how == nullptr) {
      return nullptr;
    }
    out.extra = reinterpret_cast<std::uint64_t>(how);
    return &update;
  }
  if (op == "membar" || op == "fence") {
    if (s.has("proxy") || s.has("mbarrier_init") || s.has("sync_restrict")) {
      return nullptr;
    }
    const bool one_way = op == "fence" && (s.has("acquire") || s.has("release"));
    out.order = {.strong = true,
                 .acquire = !one_way || s.has("acquire"),
                 .release = !one_way || s.has("release"),
                 .sequential = op == "membar" || !(one_way || s.has("acq_rel")),
                 .block_scope = s.has("cta")};
    return &fence;
  }
  if (op == "prefetch" || op == "prefetchu" || op == "discard" || op == "applypriority" ||
      op == "nanosleep") {
    return &nothing;
  }
  return nullptr;
}

}  // namespace syncbn::ptx
