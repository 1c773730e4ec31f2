#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "halves.hpp"
#include "operations.hpp"

// cvt: between integers (extended to the register's width), and to and from floating point, where
// it rounds to nearest even, or to an integer in any way.
namespace syncbn::ptx {
namespace {

struct Half {};
struct Bfloat {};

template <class T>
auto read(std::uint64_t bits) {
  if constexpr (std::is_same_v<T, Half>) {
    return HalfFormat::widen(static_cast<std::uint16_t>(bits));
  } else if constexpr (std::is_same_v<T, Bfloat>) {
    return BfloatFormat::widen(static_cast<std::uint16_t>(bits));
  } else {
    return get<T>(bits);
  }
}

template <class To, class From>
std::uint64_t to_float(From v) {
  if constexpr (std::is_same_v<To, Half>) {
    return HalfFormat::round(static_cast<double>(v));
  } else if constexpr (std::is_same_v<To, Bfloat>) {
    return BfloatFormat::round(static_cast<double>(v));
  } else if constexpr (std::is_same_v<To, float>) {
    const auto out = static_cast<float>(v);
    return out == out ? put(out) : 0x7fffffffu;
  } else {
    return put(static_cast<double>(v));
  }
}

/// extra of roundings: 'n', 'z', 'm', 'p'.
template <class T>
T to_whole(T v, std::uint64_t rounding) {
  switch (rounding) {
    case 'z':
      return std::trunc(v);
    case 'm':
      return std::floor(v);
    case 'p':
      return std::ceil(v);
    default:
      return std::nearbyint(v);
  }
}

template <class To, class From>
void convert(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a);
  each(mask, [&](unsigned l) {
    const auto v = read<From>(a[l]);
    using Value = decltype(v);
    constexpr bool kFromInteger = std::is_integral_v<std::remove_const_t<Value>>;
    if constexpr (std::is_integral_v<To> && kFromInteger) {
      // Extended beyond its own width: registers may be wider.
      d[l] = static_cast<std::uint64_t>(static_cast<std::int64_t>(static_cast<To>(v)));
      if constexpr (std::is_unsigned_v<To>) {
        d[l] = static_cast<To>(v);
      }
    } else if constexpr (std::is_integral_v<To>) {  // clamped; no number is zero
      const auto whole = to_whole(static_cast<std::remove_const_t<Value>>(v), i.extra);
      const auto low = static_cast<long double>(std::numeric_limits<To>::min());
      const auto high = static_cast<long double>(std::numeric_limits<To>::max());
      const To out = whole != whole  ? To{0}
                     : whole <= low  ? std::numeric_limits<To>::min()
                     : whole >= high ? std::numeric_limits<To>::max()
                                     : static_cast<To>(whole);
      d[l] = static_cast<std::uint64_t>(static_cast<std::int64_t>(out));
    } else if constexpr (kFromInteger && (std::is_same_v<To, Half> || std::is_same_v<To, Bfloat>)) {
      d[l] = to_float<To>(static_cast<double>(v));  // at most 53 bits, see the decoder
    } else if constexpr (!kFromInteger) {
      d[l] = to_float<To>(
          i.extra == 0 ? v : to_whole(static_cast<std::remove_const_t<Value>>(v), i.extra));
    } else {
      d[l] = to_float<To>(v);
    }
  });
  define(w, i.d, mask, known);
}

/// d = {a, b}, a above.
template <class To>
void convert_pair(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b);
  each(mask, [&](unsigned l) {
    d[l] = to_float<To>(get<float>(a[l])) << 16 | to_float<To>(get<float>(b[l]));
  });
  define(w, i.d, mask, known);
}

template <class F>
void with_any(const std::string& type, F&& f) {
  if (type == "f16") {
    f(Tag<Half>());
  } else if (type == "bf16") {
    f(Tag<Bfloat>());
  } else if (!with_float(type, f)) {
    with_integer(type, f);
  }
}

}  // namespace

Handler conversion(const Statement& s) {
  if (s.op.size() < 3 || s.has("ftz") || s.has("sat") || s.has("relu")) {
    return nullptr;
  }
  const std::string& to = s.op[s.op.size() - 2];
  const std::string& from = s.op.back();
  if (to == "f16x2" || to == "bf16x2") {
    return from != "f32" || !s.has("rn") ? nullptr
           : to == "f16x2"               ? &convert_pair<Half>
                                         : &convert_pair<Bfloat>;
  }
  const bool whole = s.has("rni") || s.has("rzi") || s.has("rmi") || s.has("rpi");
  const auto is_float = [](const std::string& t) { return t.find('f') != std::string::npos; };
  const auto width = [](const std::string& t) {
    return std::stoi(t.substr(t.find_first_of("0123456789")));
  };
  if (is_float(from) && !is_float(to) && !whole) {
    return nullptr;
  }
  const bool exact = is_float(from) && is_float(to) && width(to) > width(from);
  const bool rounds = is_float(to) && !exact && !whole;
  if ((rounds && !s.has("rn")) || s.has("rz") || s.has("rm") || s.has("rp")) {
    return nullptr;
  }
  if (width(to) == 16 && is_float(to) && !is_float(from) && width(from) == 64) {
    return nullptr;  // would round twice
  }
  Handler out = nullptr;
  with_any(to, [&](auto t) {
    with_any(from, [&](auto f) {
      out = &convert<typename decltype(t)::Type, typename decltype(f)::Type>;
    });
  });
  return out;
}

}  // namespace syncbn::ptx
