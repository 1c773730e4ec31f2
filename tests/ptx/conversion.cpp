// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <type_traits>

#include "halves.hpp"
#include "operations.hpp"

// cvt: between integers (extended to the register's width), and to and from floating point, where
// it rounds to nearest even.
namespace syncbn::ptx {
namespace {

struct Half {};
struct Bfloat {};

template <class T>
inline constexpr bool kNarrow = std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>;
template <class T>
using Format = std::conditional_t<std::is_same_v<T, Half>, HalfFormat, BfloatFormat>;

template <class To, class From>
void convert(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a);
  each(mask, [&](unsigned l) {
    if constexpr (kNarrow<From>) {
      d[l] = put(static_cast<To>(Format<From>::widen(static_cast<std::uint16_t>(a[l]))));
    } else if constexpr (kNarrow<To>) {
      d[l] = Format<To>::round(static_cast<double>(get<From>(a[l])));
    } else if constexpr (std::is_integral_v<To>) {
      // Extended beyond its own width: registers may be wider.
      using Register = std::conditional_t<std::is_signed_v<To>, std::int64_t, std::uint64_t>;
      d[l] = put(static_cast<Register>(static_cast<To>(get<From>(a[l]))));
    } else {
      const To v = static_cast<To>(get<From>(a[l]));
      d[l] = std::is_same_v<To, float> && v != v ? 0x7fffffffu : put(v);
    }
  });
  define(w, i.d, mask, known);
}

}  // namespace

Handler conversion(const Statement& s) {
  const std::string& to = s.op[s.op.size() - 2];
  const std::string& from = s.op.back();
  const bool rounds = s.op.size() == 4 && s.op[1] == "rn";
  if (s.op.size() != (rounds ? 4u : 3u)) {
    return nullptr;
  }
  Handler out = nullptr;
  if (rounds && from == "f32") {
    out = to == "f16" ? &convert<Half, float> : to == "bf16" ? &convert<Bfloat, float> : nullptr;
  } else if (from == "f16" || from == "bf16") {
    out = to != "f32" || rounds ? nullptr
          : from == "f16"       ? &convert<float, Half>
                                : &convert<float, Bfloat>;
  } else if (from[0] == 'f') {
    out = from == "f32" && to == "f64" && !rounds  ? &convert<double, float>
          : from == "f64" && to == "f32" && rounds ? &convert<float, double>
                                                   : nullptr;
  } else {
    with_integer(from, [&](auto f) {
      const auto pick = [&](auto t) {
        out = &convert<typename decltype(t)::Type, typename decltype(f)::Type>;
      };
      rounds ? with_float(to, pick) : with_integer(to, pick);
    });
  }
  return out;
}

}  // namespace syncbn::ptx
