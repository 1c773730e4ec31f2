#include <cmath>
#include <limits>
#include <string>

#include "halves.hpp"
#include "operations.hpp"

// Floating-point arithmetic, rounded to nearest even. Other roundings, flushing of subnormals and
// approximations are unknown here: no kernel may have them.
namespace syncbn::ptx {
namespace {

/// What the GPU makes of a result that is no number.
float canonical(float v) { return v == v ? v : std::bit_cast<float>(0x7fffffffu); }
double canonical(double v) { return v; }

struct Add {
  template <class T>
  T operator()(T a, T b) {
    return canonical(a + b);
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) {
    return canonical(a - b);
  }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) {
    return canonical(a * b);
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) {
    return canonical(a / b);
  }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) {
    return canonical(std::fma(a, b, c));
  }
};
struct Rcp {
  template <class T>
  T operator()(T a) {
    return canonical(T{1} / a);
  }
};
struct Sqrt {
  template <class T>
  T operator()(T a) {
    return canonical(std::sqrt(a));
  }
};
struct Neg {
  template <class T>
  T operator()(T a) {
    return -a;
  }
};
struct Abs {
  template <class T>
  T operator()(T a) {
    return std::fabs(a);
  }
};
struct CopySign {
  template <class T>
  T operator()(T a, T b) {
    return std::copysign(b, a);
  }
};
template <bool kMax, bool kNan>
struct MinMax {
  template <class T>
  T operator()(T a, T b) {
    if (kNan && (a != a || b != b)) {
      return canonical(a + b);
    }
    if (a != a || b != b) {
      return a == a ? a : b == b ? b : canonical(a + b);
    }
    if (a == b) {  // zeros differ by sign
      return std::signbit(a) == kMax ? b : a;
    }
    return (a < b) == kMax ? b : a;
  }
};

/// A function of two floats for each half of 64 bits.
template <class F>
struct Pairs {
  template <class... T>
  std::uint64_t operator()(T... v) {
    const auto low = F()(get<float>(v)...);
    const auto high = F()(get<float>(v >> 32)...);
    return put(low) | put(high) << 32;
  }
};

/// Values of 16 bits, one or a pair: F of doubles, whose result is rounded once more.
template <class Format, class F>
struct Narrowed {
  template <class... T>
  std::uint16_t operator()(T... v) {
    return Format::round(F()(Format::widen(static_cast<std::uint16_t>(v))...));
  }
};
template <class G>
struct NarrowPairs {
  template <class... T>
  std::uint32_t operator()(T... v) {
    const auto low = G()(static_cast<std::uint16_t>(v)...);
    const auto high = G()(static_cast<std::uint16_t>(v >> 16)...);
    return static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16;
  }
};
struct NarrowFma {
  double operator()(double a, double b, double c) { return add_to_odd(a * b, c); }
};
struct NarrowAdd {
  double operator()(double a, double b) { return add_to_odd(a, b); }
};
struct NarrowSub {
  double operator()(double a, double b) { return add_to_odd(a, -b); }
};

template <int kArguments, class T, class F>
Handler with_arguments() {
  if constexpr (kArguments == 1) {
    return &unary<T, F>;
  } else if constexpr (kArguments == 2) {
    return &binary<T, F>;
  } else {
    return &ternary<T, F>;
  }
}
/// kArguments of one of the 16-bit types.
template <int kArguments, class F>
Handler narrow(const std::string& type) {
  if (type == "f16") {
    return with_arguments<kArguments, std::uint16_t, Narrowed<HalfFormat, F>>();
  }
  if (type == "bf16") {
    return with_arguments<kArguments, std::uint16_t, Narrowed<BfloatFormat, F>>();
  }
  if (type == "f16x2") {
    return with_arguments<kArguments, std::uint32_t, NarrowPairs<Narrowed<HalfFormat, F>>>();
  }
  if (type == "bf16x2") {
    return with_arguments<kArguments, std::uint32_t, NarrowPairs<Narrowed<BfloatFormat, F>>>();
  }
  return nullptr;
}

template <int kArguments, class F>
Handler of_type(const std::string& type) {
  if (type == "f32x2") {
    return with_arguments<kArguments, std::uint64_t, Pairs<F>>();
  }
  Handler out = nullptr;
  with_float(type,
             [&](auto t) { out = with_arguments<kArguments, typename decltype(t)::Type, F>(); });
  return out;
}

/// testp: extra is the class.
template <class T>
void test_class(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  std::uint32_t out = 0;
  each(mask, [&](unsigned l) {
    const T v = get<T>(a[l]);
    const int kind = std::fpclassify(v);
    const bool is[] = {std::isfinite(v), std::isinf(v),     !std::isnan(v),
                       std::isnan(v),    kind == FP_NORMAL, kind == FP_SUBNORMAL};
    out |= static_cast<std::uint32_t>(is[i.extra]) << l;
  });
  define_predicate(w, i.p, mask, out, defined(w, i.a));
}

}  // namespace

Handler float_operation(const Statement& s, std::uint64_t& extra) {
  const std::string& op = s.op[0];
  const std::string& type = s.op.back();
  for (const char* unknown : {"ftz", "approx", "full", "rz", "rm", "rp", "sat", "xorsign"}) {
    if (s.has(unknown)) {
      return nullptr;
    }
  }
  const bool is_narrow = type.find("16") != std::string::npos;
  if (op == "add") return is_narrow ? narrow<2, NarrowAdd>(type) : of_type<2, Add>(type);
  if (op == "sub") return is_narrow ? narrow<2, NarrowSub>(type) : of_type<2, Sub>(type);
  if (op == "mul") return is_narrow ? narrow<2, Mul>(type) : of_type<2, Mul>(type);
  if (op == "fma") return is_narrow ? narrow<3, NarrowFma>(type) : of_type<3, Fma>(type);
  if (op == "neg") return is_narrow ? narrow<1, Neg>(type) : of_type<1, Neg>(type);
  if (op == "abs") return is_narrow ? narrow<1, Abs>(type) : of_type<1, Abs>(type);
  if (op == "min" && s.has("NaN"))
    return is_narrow ? narrow<2, MinMax<false, true>>(type) : of_type<2, MinMax<false, true>>(type);
  if (op == "min")
    return is_narrow ? narrow<2, MinMax<false, false>>(type)
                     : of_type<2, MinMax<false, false>>(type);
  if (op == "max" && s.has("NaN"))
    return is_narrow ? narrow<2, MinMax<true, true>>(type) : of_type<2, MinMax<true, true>>(type);
  if (op == "max")
    return is_narrow ? narrow<2, MinMax<true, false>>(type) : of_type<2, MinMax<true, false>>(type);
  if (is_narrow) {
    return nullptr;
  }
  if (op == "copysign") return of_type<2, CopySign>(type);
  if (!s.has("rn") && (op == "div" || op == "rcp" || op == "sqrt" || op == "mad")) {
    return nullptr;
  }
  if (op == "div") return of_type<2, Div>(type);
  if (op == "mad") return of_type<3, Fma>(type);
  if (op == "rcp") return of_type<1, Rcp>(type);
  if (op == "sqrt") return of_type<1, Sqrt>(type);
  if (op == "testp") {
    constexpr const char* kClasses[] = {"finite",     "infinite", "number",
                                        "notanumber", "normal",   "subnormal"};
    extra = 0;
    while (extra < 6 && !s.has(kClasses[extra])) {
      ++extra;
    }
    Handler out = nullptr;
    with_float(type, [&](auto t) { out = &test_class<typename decltype(t)::Type>; });
    return extra < 6 ? out : nullptr;
  }
  return nullptr;
}

}  // namespace syncbn::ptx
