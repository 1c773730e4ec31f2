#include <functional>
#include <string>

#include "operations.hpp"

// Comparisons, selections, moves and predicates.
namespace syncbn::ptx {
namespace {

enum Comparison : std::uint64_t { kEq, kNe, kLt, kLe, kGt, kGe, kNum, kNan };
constexpr std::uint64_t kUnordered = 16;  ///< true where one is no number
enum Combination : std::uint64_t { kAlone = 0, kAnd = 32, kOr = 64, kXor = 96 };

template <class T>
bool compare(std::uint64_t how, T a, T b) {
  if (a != a || b != b) {
    return (how & kUnordered) != 0 || (how & 15) == kNan;
  }
  switch (how & 15) {
    case kEq:
      return a == b;
    case kNe:
      return a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    default:
      return (how & 15) == kNum;
  }
}

template <class T, std::uint64_t kHow>
std::uint32_t compared(const Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  std::uint32_t out = 0;
  each(mask, [&](unsigned l) {
    out |= static_cast<std::uint32_t>(compare(kHow, get<T>(a[l]), get<T>(b[l]))) << l;
  });
  return out;
}
template <class T>
std::uint32_t compared(const Warp& w, const Instruction& i, std::uint32_t mask) {
  switch (i.extra & 31) {  // the frequent ones, without a switch for each lane
    case kEq:
      return compared<T, kEq>(w, i, mask);
    case kNe:
      return compared<T, kNe>(w, i, mask);
    case kLt:
      return compared<T, kLt>(w, i, mask);
    case kLe:
      return compared<T, kLe>(w, i, mask);
    case kGt:
      return compared<T, kGt>(w, i, mask);
    case kGe:
      return compared<T, kGe>(w, i, mask);
    default:
      break;
  }
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  std::uint32_t out = 0;
  each(mask, [&](unsigned l) {
    out |= static_cast<std::uint32_t>(compare(i.extra & 31, get<T>(a[l]), get<T>(b[l]))) << l;
  });
  return out;
}

std::uint32_t combined(std::uint64_t how, std::uint32_t a, std::uint32_t b) {
  switch (how & 96) {
    case kAnd:
      return a & b;
    case kOr:
      return a | b;
    case kXor:
      return a ^ b;
    default:
      return a;
  }
}

template <class T>
void set_predicate(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint32_t result = compared<T>(w, i, mask);
  std::uint32_t known = defined(w, i.a) & defined(w, i.b);
  const std::uint32_t with = w.predicates[i.r] ^ i.r_flip;
  known &= (i.extra & 96) != kAlone ? w.predicates_defined[i.r] : kAllLanes;
  define_predicate(w, i.p, mask, combined(i.extra, result, with), known);
  define_predicate(w, i.q, mask, combined(i.extra, ~result, with), known);
}

/// set: all ones or 1.0, else 0.
template <class T>
void set_value(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint32_t with = w.predicates[i.r] ^ i.r_flip;
  const std::uint32_t result = combined(i.extra, compared<T>(w, i, mask), with);
  std::uint64_t* const d = written(w, i.d);
  const std::uint64_t truth = i.bytes == 4 ? 0xffffffffu : 0x3f800000u;
  each(mask, [&](unsigned l) { d[l] = (result >> l & 1u) != 0 ? truth : 0; });
  define(w, i.d, mask, defined(w, i.a) & defined(w, i.b));
}

void select(Warp& w, const Instruction& i, std::uint32_t mask) {
  require_defined(w, i, mask, w.predicates_defined[i.r], "the predicate of a selection");
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t first = w.predicates[i.r] ^ i.r_flip;
  const std::uint32_t known = (defined(w, i.a) & first) | (defined(w, i.b) & ~first);
  each(mask, [&](unsigned l) { d[l] = (first >> l & 1u) != 0 ? a[l] : b[l]; });
  define(w, i.d, mask, known);
}
template <class T>
void select_by_sign(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b) & defined(w, i.c);
  each(mask, [&](unsigned l) { d[l] = get<T>(c[l]) >= 0 ? a[l] : b[l]; });
  define(w, i.d, mask, known);
}

void move(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  std::uint64_t* const d = written(w, i.d);
  each(mask, [&](unsigned l) { d[l] = a[l]; });
  define(w, i.d, mask, defined(w, i.a));
}
/// d = {parts}, the first lowest.
void pack(Warp& w, const Instruction& i, std::uint32_t mask) {
  const Register* const parts = w.program->parts.data() + i.parts;
  const unsigned width = i.bytes * 8u / i.count;
  const std::uint64_t ones = (std::uint64_t{1} << width) - 1;
  std::uint32_t known = kAllLanes;
  std::uint64_t out[kLanes] = {};
  for (std::uint32_t k = 0; k < i.count; ++k) {
    const std::uint64_t* const a = row(w, parts[k]);
    known &= defined(w, parts[k]);
    each(mask, [&](unsigned l) { out[l] |= (a[l] & ones) << (width * k); });
  }
  std::uint64_t* const d = written(w, i.d);
  each(mask, [&](unsigned l) { d[l] = out[l]; });
  define(w, i.d, mask, known);
}
void unpack(Warp& w, const Instruction& i, std::uint32_t mask) {
  const Register* const parts = w.program->parts.data() + i.parts;
  const unsigned width = i.bytes * 8u / i.count;
  const std::uint64_t ones = (std::uint64_t{1} << width) - 1;
  const std::uint32_t known = defined(w, i.a);
  std::uint64_t from[kLanes];
  const std::uint64_t* const a = row(w, i.a);
  each(mask, [&](unsigned l) { from[l] = a[l]; });
  for (std::uint32_t k = 0; k < i.count; ++k) {
    if (parts[k] != kSink) {
      std::uint64_t* const d = written(w, parts[k]);
      each(mask, [&](unsigned l) { d[l] = from[l] >> (width * k) & ones; });
      define(w, parts[k], mask, known);
    }
  }
}

/// Predicates of predicates: p = q op r.
template <class F>
void logic(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint32_t known = w.predicates_defined[i.q] & w.predicates_defined[i.r];
  define_predicate(w, i.p, mask, F()(w.predicates[i.q], w.predicates[i.r] ^ i.r_flip), known);
}
struct First {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t) { return a; }
};
struct NotFirst {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t) { return ~a; }
};

bool comparison(const Statement& s, const std::string& type, std::uint64_t& extra) {
  const bool real = type[0] == 'f';
  static const std::map<std::string, std::uint64_t> kIntegers = {
      {"eq", kEq}, {"ne", kNe}, {"lt", kLt}, {"le", kLe}, {"gt", kGt},
      {"ge", kGe}, {"lo", kLt}, {"ls", kLe}, {"hi", kGt}, {"hs", kGe}};
  static const std::map<std::string, std::uint64_t> kReals = {{"eq", kEq},
                                                              {"ne", kNe},
                                                              {"lt", kLt},
                                                              {"le", kLe},
                                                              {"gt", kGt},
                                                              {"ge", kGe},
                                                              {"equ", kEq | kUnordered},
                                                              {"neu", kNe | kUnordered},
                                                              {"ltu", kLt | kUnordered},
                                                              {"leu", kLe | kUnordered},
                                                              {"gtu", kGt | kUnordered},
                                                              {"geu", kGe | kUnordered},
                                                              {"num", kNum},
                                                              {"nan", kNan}};
  const auto& known = real ? kReals : kIntegers;
  const auto found = known.find(s.op[1]);
  if (found == known.end() || s.has("ftz")) {
    return false;
  }
  extra = found->second | (s.has("and") ? kAnd : s.has("or") ? kOr : s.has("xor") ? kXor : kAlone);
  return true;
}

}  // namespace

Handler selection(const Statement& s, std::uint64_t& extra) {
  const std::string& op = s.op[0];
  const std::string& type = s.op.back();
  Handler out = nullptr;
  if (op == "setp" && comparison(s, type, extra)) {
    const auto pick = [&](auto t) { out = &set_predicate<typename decltype(t)::Type>; };
    if (!with_float(type, pick)) {
      with_integer(type, pick);
    }
  } else if (op == "set" && comparison(s, type, extra)) {
    const auto pick = [&](auto t) { out = &set_value<typename decltype(t)::Type>; };
    if (!with_float(type, pick)) {
      with_integer(type, pick);
    }
  } else if (op == "selp") {
    out = &select;
  } else if (op == "slct" && !s.has("ftz")) {
    out = type == "f32"   ? &select_by_sign<float>
          : type == "s32" ? &select_by_sign<std::int32_t>
                          : nullptr;
  } else if (type == "pred") {
    out = op == "mov"   ? &logic<First>
          : op == "not" ? &logic<NotFirst>
          : op == "and" ? &logic<std::bit_and<std::uint32_t>>
          : op == "or"  ? &logic<std::bit_or<std::uint32_t>>
          : op == "xor" ? &logic<std::bit_xor<std::uint32_t>>
                        : nullptr;
  } else if (op == "mov") {
    out = s.operands[0].kind == Operand::Kind::kVector   ? &unpack
          : s.operands[1].kind == Operand::Kind::kVector ? &pack
                                                         : &move;
  }
  return out;
}

}  // namespace syncbn::ptx
