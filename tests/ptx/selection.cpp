// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <map>
#include <string>

#include "operations.hpp"

// Comparisons, selections, moves and predicates.
namespace syncbn::ptx {
namespace {

/// A comparison that is also true where one is no number.
template <class F>
struct OrUnordered {
  template <class T>
  bool operator()(T a, T b) const {
    return a != a || b != b || F()(a, b);
  }
};
struct Unordered {
  template <class T>
  bool operator()(T a, T b) const {
    return a != a || b != b;
  }
};
/// != of C++ is true where one is no number.
struct OrderedNotEqual {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b || a > b;
  }
};

template <class T, class F>
void set_predicate(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  std::uint32_t out = 0;
  each(mask, [&](unsigned l) {
    out |= static_cast<std::uint32_t>(F()(get<T>(a[l]), get<T>(b[l]))) << l;
  });
  define_predicate(w, i.p, mask, out, defined(w, i.a) & defined(w, i.b));
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

/// q is true.
struct Second {
  std::uint32_t operator()(std::uint32_t, std::uint32_t r) const { return r; }
};

Handler comparison(const Statement& s) {
  Handler out = nullptr;
  const std::string& type = s.op.back();
  const auto is = [&](auto f, const char* name) {
    using F = decltype(f);
    const auto pick = [&](auto t) { out = &set_predicate<typename decltype(t)::Type, F>; };
    if (s.op[1] == name && !with_float(type, pick)) {
      with_integer(type, pick);
    }
  };
  const auto either = [&](auto f, const char* name, const char* unordered) {
    is(f, name);
    if (type[0] == 'f') {
      is(OrUnordered<decltype(f)>(), unordered);
    }
  };
  if (s.op.size() != 3) {
    return nullptr;
  }
  either(std::equal_to<>(), "eq", "equ");
  either(OrderedNotEqual(), "ne", "neu");
  either(std::less<>(), "lt", "ltu");
  either(std::less_equal<>(), "le", "leu");
  either(std::greater<>(), "gt", "gtu");
  either(std::greater_equal<>(), "ge", "geu");
  if (type[0] == 'f') {
    is(Unordered(), "nan");
  }
  return out;
}

}  // namespace

Handler selection(const Statement& s) {
  const std::string& op = s.op[0];
  if (op == "setp") {
    return comparison(s);
  }
  if (op == "selp") {
    return &select;
  }
  if (s.op.back() == "pred") {
    return op == "and"                  ? &logic<std::bit_and<std::uint32_t>>
           : op == "or"                 ? &logic<std::bit_or<std::uint32_t>>
           : op == "xor"                ? &logic<std::bit_xor<std::uint32_t>>
           : op == "mov" || op == "not" ? &logic<Second>
                                        : nullptr;
  }
  if (op == "cvta") {
    return &apply<std::uint64_t, std::identity>;
  }
  if (op == "mov" && s.op.size() == 2) {
    return s.operands[0].kind == Operand::Kind::kVector   ? &unpack
           : s.operands[1].kind == Operand::Kind::kVector ? &pack
                                                          : &apply<std::uint64_t, std::identity>;
  }
  return nullptr;
}

}  // namespace syncbn::ptx
