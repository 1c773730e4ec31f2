#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "operations.hpp"

// Integers and bits. Registers hold more bits than a type; operations take the lowest.
namespace syncbn::ptx {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
inline constexpr unsigned kBits = sizeof(T) * 8;

template <class T>
struct Twice;
template <>
struct Twice<std::uint8_t> {
  using Type = std::uint16_t;
};
template <>
struct Twice<std::int8_t> {
  using Type = std::int16_t;
};
template <>
struct Twice<std::uint16_t> {
  using Type = std::uint32_t;
};
template <>
struct Twice<std::int16_t> {
  using Type = std::int32_t;
};
template <>
struct Twice<std::uint32_t> {
  using Type = std::uint64_t;
};
template <>
struct Twice<std::int32_t> {
  using Type = std::int64_t;
};
template <>
struct Twice<std::uint64_t> {
  using Type = unsigned __int128;
};
template <>
struct Twice<std::int64_t> {
  using Type = __int128;
};
template <class T>
using Double = typename Twice<T>::Type;

/// Wraps around, as unsigned numbers of at least 32 bits do without a promotion to int.
template <class T>
std::uint64_t bits(T value) {
  return static_cast<std::uint64_t>(value);
}
struct Add {
  template <class T>
  T operator()(T a, T b) {
    return static_cast<T>(bits(a) + bits(b));
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) {
    return static_cast<T>(bits(a) - bits(b));
  }
};
struct MulLow {
  template <class T>
  T operator()(T a, T b) {
    return static_cast<T>(bits(a) * bits(b));
  }
};
struct MulHigh {
  template <class T>
  T operator()(T a, T b) {
    return static_cast<T>(
        static_cast<Double<T>>(static_cast<Double<T>>(a) * static_cast<Double<T>>(b)) >> kBits<T>);
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) {
    if (b == 0) {
      return static_cast<T>(~T{0});
    }
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) {
      return static_cast<T>(0 - bits(a));
    }
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) {
    return b == 0                                           ? a
           : std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0}
                                                            : static_cast<T>(a % b);
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) {
    return std::min(a, b);
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) {
    return std::max(a, b);
  }
};
struct And {
  template <class T>
  T operator()(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};
struct Not {
  template <class T>
  T operator()(T a) {
    return static_cast<T>(~a);
  }
};
struct CNot {
  template <class T>
  T operator()(T a) {
    return static_cast<T>(a == 0 ? 1 : 0);
  }
};
struct Neg {
  template <class T>
  T operator()(T a) {
    return static_cast<T>(0 - bits(a));
  }
};
struct Abs {
  template <class T>
  T operator()(T a) {
    return a < 0 ? static_cast<T>(0 - bits(a)) : a;
  }
};
struct Popc {
  template <class T>
  std::uint32_t operator()(T a) {
    return static_cast<std::uint32_t>(std::popcount(static_cast<Unsigned<T>>(a)));
  }
};
struct Clz {
  template <class T>
  std::uint32_t operator()(T a) {
    return static_cast<std::uint32_t>(std::countl_zero(static_cast<Unsigned<T>>(a)));
  }
};
struct Brev {
  template <class T>
  T operator()(T a) {
    T out = 0;
    for (unsigned i = 0; i < kBits<T>; ++i) {
      out = static_cast<T>(out | ((a >> i & 1) << (kBits<T> - 1 - i)));
    }
    return out;
  }
};
template <bool kShift>
struct Bfind {
  template <class T>
  std::uint32_t operator()(T a) {
    const auto value = static_cast<Unsigned<T>>(std::is_signed_v<T> && a < 0 ? ~a : a);
    if (value == 0) {
      return 0xffffffffu;
    }
    const auto zeros = static_cast<std::uint32_t>(std::countl_zero(value));
    return kShift ? zeros : kBits<T> - 1 - zeros;
  }
};
struct MadLow {
  template <class T>
  T operator()(T a, T b, T c) {
    return Add()(MulLow()(a, b), c);
  }
};
struct MadHigh {
  template <class T>
  T operator()(T a, T b, T c) {
    return Add()(MulHigh()(a, b), c);
  }
};
struct Sad {
  template <class T>
  T operator()(T a, T b, T c) {
    return static_cast<T>(bits(c) + (a < b ? bits(b) - bits(a) : bits(a) - bits(b)));
  }
};

/// Shifts take their distance from 32 bits, and shift all bits out beyond the width.
template <class T, bool kLeft>
void shift(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b);
  each(mask, [&](unsigned l) {
    const T value = get<T>(a[l]);
    const auto by = static_cast<std::uint32_t>(b[l]);
    if constexpr (kLeft) {
      d[l] = by >= kBits<T> ? 0 : put(static_cast<T>(bits(value) << by));
    } else {
      const bool sign = std::is_signed_v<T> && value < 0;
      d[l] = put(by >= kBits<T> ? static_cast<T>(sign ? -1 : 0) : static_cast<T>(value >> by));
    }
  });
  define(w, i.d, mask, known);
}

template <class T>
void multiply_wide(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  std::uint64_t* const d = written(w, i.d);
  std::uint32_t known = defined(w, i.a) & defined(w, i.b);
  known &= i.extra != 0 ? defined(w, i.c) : kAllLanes;
  each(mask, [&](unsigned l) {
    const auto product = static_cast<Double<T>>(static_cast<Double<T>>(get<T>(a[l])) *
                                                static_cast<Double<T>>(get<T>(b[l])));
    d[l] = static_cast<std::uint64_t>(product) + (i.extra != 0 ? c[l] : 0);
    d[l] = put(static_cast<Unsigned<Double<T>>>(d[l]));
  });
  define(w, i.d, mask, known);
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
/// extra: 2 takes the carry, 4 leaves one, 8: the high half.
template <class T>
void multiply_with_carry(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b) & defined(w, i.c);
  std::uint32_t out = 0;
  each(mask, [&](unsigned l) {
    const T product = (i.extra & 8) != 0 ? MulHigh()(get<T>(a[l]), get<T>(b[l]))
                                         : MulLow()(get<T>(a[l]), get<T>(b[l]));
    const unsigned __int128 sum =
        static_cast<unsigned __int128>(static_cast<Unsigned<T>>(product)) +
        static_cast<Unsigned<T>>(get<T>(c[l])) + ((i.extra & 2) != 0 ? w.carry >> l & 1u : 0);
    d[l] = put(static_cast<T>(sum));
    out |= static_cast<std::uint32_t>(sum >> kBits<T> & 1) << l;
  });
  if ((i.extra & 4) != 0) {
    w.carry = (w.carry & ~mask) | out;
  }
  define(w, i.d, mask, known);
}

/// bfe d, a, position, length
template <class T>
void extract(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b) & defined(w, i.c);
  each(mask, [&](unsigned l) {
    const T value = get<T>(a[l]);
    const auto from = static_cast<unsigned>(b[l] & 0xff);
    const auto length = static_cast<unsigned>(c[l] & 0xff);
    const unsigned top = std::min(from + length, kBits<T>);
    const bool sign = std::is_signed_v<T> && length > 0 && (bits(value) >> (top - 1) & 1) != 0;
    std::uint64_t field = from >= kBits<T> ? 0 : bits(static_cast<Unsigned<T>>(value)) >> from;
    if (length < 64) {
      const std::uint64_t keep = (std::uint64_t{1} << std::min(length, 63u)) - 1;
      const unsigned there = top > from ? top - from : 0;
      const std::uint64_t valid = there >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << there) - 1;
      field = (field & keep & valid) | (sign ? ~valid : 0);
    }
    d[l] = put(static_cast<T>(field));
  });
  define(w, i.d, mask, known);
}
/// bfi d, a, b, position, length; the length is the part after.
template <class T>
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
    const std::uint64_t ones = length >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << length) - 1;
    const std::uint64_t at = from >= 64 ? 0 : ones << from;
    const std::uint64_t value = from >= 64 ? 0 : a[l] << from;
    d[l] = put(static_cast<T>((b[l] & ~at) | (value & at)));
  });
  define(w, i.d, mask, known);
}

/// lop3: extra is the table.
void three_way(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b) & defined(w, i.c);
  each(mask, [&](unsigned l) {
    std::uint64_t out = 0;
    for (unsigned k = 0; k < 8; ++k) {
      if ((i.extra >> k & 1) != 0) {
        out |= ((k & 4) != 0 ? a[l] : ~a[l]) & ((k & 2) != 0 ? b[l] : ~b[l]) &
               ((k & 1) != 0 ? c[l] : ~c[l]);
      }
    }
    d[l] = static_cast<std::uint32_t>(out);
  });
  define(w, i.d, mask, known);
}

/// prmt in its default mode.
void permute(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b) & defined(w, i.c);
  each(mask, [&](unsigned l) {
    const std::uint64_t both = static_cast<std::uint32_t>(a[l]) | b[l] << 32;
    std::uint32_t out = 0;
    for (unsigned k = 0; k < 4; ++k) {
      const auto pick = static_cast<unsigned>(c[l] >> (4 * k) & 15);
      auto byte = static_cast<std::uint32_t>(both >> (8 * (pick & 7)) & 0xff);
      if ((pick & 8) != 0) {
        byte = (byte & 0x80) != 0 ? 0xff : 0;
      }
      out |= byte << (8 * k);
    }
    d[l] = out;
  });
  define(w, i.d, mask, known);
}

/// shf: extra 1 is to the left, 2 wraps the distance.
void funnel_shift(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b) & defined(w, i.c);
  each(mask, [&](unsigned l) {
    const std::uint64_t both = static_cast<std::uint32_t>(a[l]) | b[l] << 32;
    const auto given = static_cast<std::uint32_t>(c[l]);
    const unsigned by = (i.extra & 2) != 0 ? given & 31 : std::min(given, 32u);
    d[l] = static_cast<std::uint32_t>((i.extra & 1) != 0 ? (by == 0 ? both >> 32 : both << by >> 32)
                                                         : both >> by);
    if ((i.extra & 1) != 0 && by == 32) {
      d[l] = static_cast<std::uint32_t>(both);
    }
  });
  define(w, i.d, mask, known);
}

Handler simple(const Statement& s) {
  Handler out = nullptr;
  const std::string& op = s.op[0];
  const std::string& type = s.op.back();
  const auto binary_of = [&](auto f) {
    with_integer(type, [&](auto t) { out = &binary<typename decltype(t)::Type, decltype(f)>; });
  };
  const auto unary_of = [&](auto f) {
    with_integer(type, [&](auto t) { out = &unary<typename decltype(t)::Type, decltype(f)>; });
  };
  const auto ternary_of = [&](auto f) {
    with_integer(type, [&](auto t) { out = &ternary<typename decltype(t)::Type, decltype(f)>; });
  };
  if (s.has("cc") || s.has("sat")) {
    return nullptr;
  }
  if (op == "add")
    binary_of(Add());
  else if (op == "sub")
    binary_of(Sub());
  else if (op == "mul" && s.has("lo"))
    binary_of(MulLow());
  else if (op == "mul" && s.has("hi"))
    binary_of(MulHigh());
  else if (op == "mul24")
    return nullptr;
  else if (op == "mad" && s.has("lo"))
    ternary_of(MadLow());
  else if (op == "mad" && s.has("hi"))
    ternary_of(MadHigh());
  else if (op == "sad")
    ternary_of(Sad());
  else if (op == "div")
    binary_of(Div());
  else if (op == "rem")
    binary_of(Rem());
  else if (op == "min")
    binary_of(Min());
  else if (op == "max")
    binary_of(Max());
  else if (op == "and")
    binary_of(And());
  else if (op == "or")
    binary_of(Or());
  else if (op == "xor")
    binary_of(Xor());
  else if (op == "not")
    unary_of(Not());
  else if (op == "cnot")
    unary_of(CNot());
  else if (op == "neg")
    unary_of(Neg());
  else if (op == "abs")
    unary_of(Abs());
  else if (op == "popc")
    unary_of(Popc());
  else if (op == "clz")
    unary_of(Clz());
  else if (op == "brev")
    unary_of(Brev());
  else if (op == "bfind" && s.has("shiftamt"))
    unary_of(Bfind<true>());
  else if (op == "bfind")
    unary_of(Bfind<false>());
  return out;
}

}  // namespace

Handler integer_operation(const Statement& s, std::uint64_t& extra) {
  Handler out = simple(s);
  const std::string& op = s.op[0];
  const std::string& type = s.op.back();
  if (out != nullptr) {
    return out;
  }
  const auto of = [&](auto f) { with_integer(type, f); };
  if (op == "shl") {
    of([&](auto t) { out = &shift<typename decltype(t)::Type, true>; });
  } else if (op == "shr") {
    of([&](auto t) { out = &shift<typename decltype(t)::Type, false>; });
  } else if ((op == "mul" || op == "mad") && s.has("wide")) {
    extra = op == "mad" ? 1 : 0;
    of([&](auto t) {
      using T = typename decltype(t)::Type;
      if constexpr (sizeof(T) < 8) {
        out = &multiply_wide<T>;
      }
    });
  } else if (op == "add" || op == "sub" || op == "addc" || op == "subc") {
    extra = (op[0] == 's' ? 1u : 0u) | (op.size() == 4 ? 2u : 0u) | (s.has("cc") ? 4u : 0u);
    of([&](auto t) { out = &with_carry<std::make_unsigned_t<typename decltype(t)::Type>>; });
  } else if (op == "mad" || op == "madc") {
    extra = (op == "madc" ? 2u : 0u) | (s.has("cc") ? 4u : 0u) | (s.has("hi") ? 8u : 0u);
    of([&](auto t) { out = &multiply_with_carry<typename decltype(t)::Type>; });
  } else if (op == "bfe") {
    of([&](auto t) { out = &extract<typename decltype(t)::Type>; });
  } else if (op == "bfi") {
    of([&](auto t) { out = &insert<std::make_unsigned_t<typename decltype(t)::Type>>; });
  } else if (op == "lop3" && s.operands.size() == 5) {
    extra = s.operands[4].bits;
    out = &three_way;
  } else if (op == "prmt" && s.op.size() == 2) {
    out = &permute;
  } else if (op == "shf") {
    extra = (s.has("l") ? 1u : 0u) | (s.has("wrap") ? 2u : 0u);
    out = &funnel_shift;
  }
  return s.has("sat") ? nullptr : out;
}

}  // namespace syncbn::ptx
