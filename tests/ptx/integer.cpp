// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <string>
#include <type_traits>

#include "operations.hpp"

// Integers and bits. Registers hold more bits than a type; operations take the lowest.
namespace syncbn::ptx {
namespace {

template <class T>
inline constexpr unsigned kBits = sizeof(T) * 8;

/// Holds a product of two.
template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 8,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;

/// Wraps around, as unsigned numbers of at least 32 bits do without a promotion to int.
template <class T>
std::uint64_t bits(T value) {
  return static_cast<std::uint64_t>(value);
}

template <class T>
T quotient(T a, T b) {
  if (b == 0) {
    return static_cast<T>(~T{0});
  }
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) {
    return static_cast<T>(0 - bits(a));
  }
  return static_cast<T>(a / b);
}

/// By as many as its type has, and more, shifts all bits out.
template <class T, bool kLeft>
T shifted(T value, std::uint32_t by) {
  if constexpr (kLeft) {
    return by >= kBits<T> ? T{0} : static_cast<T>(bits(value) << by);
  } else {
    const bool negative = std::is_signed_v<T> && value < 0;
    return static_cast<T>(by < kBits<T> ? value >> by : negative ? -1 : 0);
  }
}

/// Additions with a carry; extra: 1 subtracts, 2 takes the carry, 4 leaves one.
template <class T>
void with_carry(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b);
  std::uint32_t out = 0;
  each(mask, [&](unsigned l) {
    const unsigned __int128 x = get<T>(a[l]);
    const unsigned __int128 y = get<T>(b[l]);
    const unsigned carry = (i.extra & 2) != 0 ? w.carry >> l & 1u : 0;
    const unsigned __int128 sum = (i.extra & 1) != 0 ? x - y - carry : x + y + carry;
    d[l] = put(static_cast<T>(sum));
    out |= static_cast<std::uint32_t>(sum >> kBits<T> & 1) << l;
  });
  if ((i.extra & 4) != 0) {
    w.carry = (w.carry & ~mask) | out;
  }
  define(w, i.d, mask, known);
}

/// bfi d, a, b, position, length; the length is the part after.
void insert(Warp& w, const Instruction& i, std::uint32_t mask) {
  const Register length_of = w.program->parts[i.parts];
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  const std::uint64_t* const e = row(w, length_of);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known =
      defined(w, i.a) & defined(w, i.b) & defined(w, i.c) & defined(w, length_of);
  each(mask, [&](unsigned l) {
    const auto from = static_cast<unsigned>(c[l] & 0xff);
    const auto length = static_cast<unsigned>(e[l] & 0xff);
    const std::uint64_t ones = shifted<std::uint64_t, true>(1, length) - 1;
    const std::uint64_t at = shifted<std::uint64_t, true>(ones, from);
    d[l] = (b[l] & ~at) | (shifted<std::uint64_t, true>(a[l], from) & at);
  });
  define(w, i.d, mask, known);
}

}  // namespace

Handler integer_operation(const Statement& s, std::uint64_t& extra) {
  Handler out = nullptr;
  const std::string& op = s.op[0];
  // Each function of T's in a handler.
  const auto of = [&](auto f) {
    with_integer(s.op.back(), [&](auto t) {
      using T = typename decltype(t)::Type;
      out = &apply<T, decltype(f)>;
    });
  };
  const auto plain = [&](auto name, auto f) {
    if (op == name && s.op.size() == 2) {
      of(f);
    }
  };
  const auto with = [&](auto name, const char* modifier, auto f) {
    if (op == name && s.op.size() == 3 && s.op[1] == modifier) {
      of(f);
    }
  };
  plain("add", []<class T>(T a, T b) { return static_cast<T>(bits(a) + bits(b)); });
  plain("sub", []<class T>(T a, T b) { return static_cast<T>(bits(a) - bits(b)); });
  with("mul", "lo", []<class T>(T a, T b) { return static_cast<T>(bits(a) * bits(b)); });
  with("mul", "hi", []<class T>(T a, T b) {
    return static_cast<T>((static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)) >> kBits<T>);
  });
  with("mad", "lo",
       []<class T>(T a, T b, T c) { return static_cast<T>(bits(a) * bits(b) + bits(c)); });
  plain("div", []<class T>(T a, T b) { return quotient(a, b); });
  plain("rem", []<class T>(T a, T b) {
    return b == 0 ? a : static_cast<T>(bits(a) - bits(quotient(a, b)) * bits(b));
  });
  plain("min", []<class T>(T a, T b) { return std::min(a, b); });
  plain("max", []<class T>(T a, T b) { return std::max(a, b); });
  plain("and", []<class T>(T a, T b) { return static_cast<T>(a & b); });
  plain("or", []<class T>(T a, T b) { return static_cast<T>(a | b); });
  plain("xor", []<class T>(T a, T b) { return static_cast<T>(a ^ b); });
  plain("not", []<class T>(T a) { return static_cast<T>(~a); });
  plain("neg", []<class T>(T a) { return static_cast<T>(0 - bits(a)); });
  plain("clz", []<class T>(T a) {
    return static_cast<std::uint32_t>(std::countl_zero(static_cast<std::make_unsigned_t<T>>(a)));
  });
  plain("shl", []<class T>(T a, T by) { return shifted<T, true>(a, static_cast<unsigned>(by)); });
  plain("shr", []<class T>(T a, T by) { return shifted<T, false>(a, static_cast<unsigned>(by)); });
  if (op == "mul" && s.op[1] == "wide" && s.op.back().find("64") == std::string::npos) {
    of([]<class T>(T a, T b) { return bits(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)); });
  } else if (op == "bfi") {
    out = &insert;
  } else if (s.opcode() == "shf.l.wrap.b32") {
    of([]<class T>(T low, T high, T by) {
      return static_cast<T>(bits(high) << (by & 31) | bits(low) << (by & 31) >> 32);
    });
  } else if (s.has("cc") || op == "addc" || op == "subc") {
    extra = (op[0] == 's' ? 1u : 0u) | (op.size() == 4 ? 2u : 0u) | (s.has("cc") ? 4u : 0u);
    with_integer(s.op.back(), [&](auto t) {
      out = op.starts_with("add") || op.starts_with("sub")
                ? &with_carry<std::make_unsigned_t<typename decltype(t)::Type>>
                : nullptr;
    });
  }
  return out;
}

}  // namespace syncbn::ptx
