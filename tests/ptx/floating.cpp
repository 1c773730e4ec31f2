// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <string>

#include "operations.hpp"

// Floating-point arithmetic, rounded to nearest even. Other roundings, flushing of subnormals and
// approximations are unknown here: no kernel may have them.
namespace syncbn::ptx {
namespace {

/// What the GPU makes of a result that is no number.
float canonical(float v) { return v == v ? v : std::bit_cast<float>(0x7fffffffu); }
double canonical(double v) { return v; }

}  // namespace

Handler float_operation(const Statement& s) {
  Handler out = nullptr;
  const auto of = [&](auto f) {
    with_float(s.op.back(), [&](auto t) { out = &apply<typename decltype(t)::Type, decltype(f)>; });
  };
  const auto rounded = [&](const char* name, auto f) {
    if (s.op[0] == name && s.op.size() == 3 && s.op[1] == "rn") {
      of(f);
    }
  };
  rounded("add", []<class T>(T a, T b) { return canonical(a + b); });
  rounded("sub", []<class T>(T a, T b) { return canonical(a - b); });
  rounded("mul", []<class T>(T a, T b) { return canonical(a * b); });
  rounded("div", []<class T>(T a, T b) { return canonical(a / b); });
  rounded("fma", []<class T>(T a, T b, T c) { return canonical(std::fma(a, b, c)); });
  rounded("rcp", []<class T>(T a) { return canonical(T{1} / a); });
  rounded("sqrt", []<class T>(T a) { return canonical(std::sqrt(a)); });
  if (s.opcode() == "neg.f32" || s.opcode() == "neg.f64") {
    of([]<class T>(T a) { return -a; });
  }
  if (s.opcode() == "abs.f32" || s.opcode() == "abs.f64") {
    of([]<class T>(T a) { return std::fabs(a); });
  }
  return out;
}

}  // namespace syncbn::ptx
