// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "small_programs.hpp"

// Operations against what C++ makes of the same numbers, or against the PTX manual's formulas.
namespace syncbn::ptx {
namespace {

using Values = std::vector<std::uint64_t>;

/// Each of 32 threads computes %rd9 from its %rd1, %rd2 and %rd3.
Values results(const std::string& body, const Values& a, const Values& b = Values(32),
               const Values& c = Values(32)) {
  Values out(32);
  const std::string text = small_kernel(
      4,
      "ld.param.u64 %rd20, [p0];\nld.param.u64 %rd21, [p1];\nld.param.u64 %rd22, [p2];\n"
      "ld.param.u64 %rd23, [p3];\nmul.wide.u32 %rd24, %r0, 8;\n"
      "add.s64 %rd20, %rd20, %rd24;\nadd.s64 %rd21, %rd21, %rd24;\n"
      "add.s64 %rd22, %rd22, %rd24;\nadd.s64 %rd23, %rd23, %rd24;\n"
      "ld.global.u64 %rd1, [%rd20];\nld.global.u64 %rd2, [%rd21];\n"
      "ld.global.u64 %rd3, [%rd22];\n"
      "cvt.u32.u64 %r11, %rd1;\ncvt.u32.u64 %r12, %rd2;\ncvt.u32.u64 %r13, %rd3;\n"
      "mov.b32 %f1, %r11;\nmov.b32 %f2, %r12;\nmov.b32 %f3, %r13;\n"
      "mov.b64 %fd1, %rd1;\nmov.b64 %fd2, %rd2;\ncvt.u16.u32 %rs1, %r11;\n"
      "mov.u32 %r19, 0;\nmov.u64 %rd9, 0;\n" +
          body + "\nst.global.u64 [%rd23], %rd9;");
  EXPECT_EQ(
      run_small(text, {1, 32},
                {address(a.data()), address(b.data()), address(c.data()), address(out.data())}),
      "")
      << body;
  return out;
}

Values random_values(std::uint64_t seed) {
  Random random(seed);
  Values out(32);
  for (std::uint64_t& value : out) {
    value = random.bits() >> random.below(64);
    value = random.one_in(3) ? ~value : value;
  }
  return out;
}
template <class F>
Values mapped(const Values& a, const Values& b, F f) {
  Values out(32);
  for (unsigned i = 0; i < 32; ++i) {
    out[i] = static_cast<std::uint64_t>(f(a[i], b[i]));
  }
  return out;
}

TEST(PtxOperations, IntegersExact) {
  using U = std::uint64_t;
  using S = std::int64_t;
  using U32 = std::uint32_t;
  using S32 = std::int32_t;
  using Wide = unsigned __int128;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    const Values a = random_values(seed);
    const Values b = random_values(seed + 100);
    const auto check = [&](const std::string& body, auto f) {
      EXPECT_EQ(results(body, a, b), mapped(a, b, f)) << body;
    };
    check("add.s64 %rd9, %rd1, %rd2;", [](U x, U y) { return x + y; });
    check("mul.hi.u64 %rd9, %rd1, %rd2;",
          [](U x, U y) { return static_cast<U>(Wide{x} * y >> 64); });
    check("mul.hi.s64 %rd9, %rd1, %rd2;", [](U x, U y) {
      return static_cast<U>(static_cast<__int128>(static_cast<S>(x)) * static_cast<S>(y) >> 64);
    });
    check("mad.lo.s64 %rd9, %rd1, %rd2, 7;", [](U x, U y) { return x * y + 7; });
    check("mul.wide.s32 %rd9, %r11, %r12;",
          [](U x, U y) { return static_cast<S>(static_cast<S32>(x)) * static_cast<S32>(y); });
    check("min.s64 %rd9, %rd1, %rd2;",
          [](U x, U y) { return static_cast<S>(x) < static_cast<S>(y) ? x : y; });
    check("max.u32 %r19, %r11, %r12;\ncvt.u64.u32 %rd9, %r19;",
          [](U x, U y) { return std::max(static_cast<U32>(x), static_cast<U32>(y)); });
    check("div.s32 %r19, %r11, %r12;\ncvt.s64.s32 %rd9, %r19;", [](U x, U y) {
      const S d = static_cast<S32>(y);
      return d == 0 ? S{-1} : static_cast<S>(static_cast<S32>(static_cast<S32>(x) / d));
    });
    check("shr.s64 %rd9, %rd1, %r12;",
          [](U x, U y) { return static_cast<S>(x) >> std::min(static_cast<U32>(y), 63u); });
    check("shl.b64 %rd9, %rd1, %r12;",
          [](U x, U y) { return static_cast<U32>(y) > 63 ? 0 : x << static_cast<U32>(y); });
    check("clz.b32 %r19, %r11;\ncvt.u64.u32 %rd9, %r19;",
          [](U x, U) { return std::countl_zero(static_cast<U32>(x)); });
    check("bfi.b64 %rd9, %rd1, %rd2, 40, 10;",
          [](U x, U y) { return (y & ~(0x3ffull << 40)) | (x & 0x3ff) << 40; });
    check("shf.l.wrap.b32 %r19, %r11, %r12, 12;\ncvt.u64.u32 %rd9, %r19;", [](U x, U y) {
      return static_cast<U32>(static_cast<U32>(y) << 12 | static_cast<U32>(x) >> 20);
    });
    check("add.cc.u32 %r14, %r11, %r12;\naddc.u32 %r15, %r11, 0;\nmov.b64 %rd9, {%r14, %r15};",
          [](U x, U y) {
            const U sum = U{static_cast<U32>(x)} + static_cast<U32>(y);
            return static_cast<U32>(sum) | U{static_cast<U32>((sum >> 32) + static_cast<U32>(x))}
                                               << 32;
          });
    check("sub.cc.s64 %rd8, %rd1, %rd2;\nsubc.s64 %rd9, 5, 0;",
          [](U x, U y) { return U{5} - (x < y ? 1 : 0); });
    check("setp.lt.s32 %p1, %r11, %r12;\nselp.b64 %rd9, %rd1, %rd2, %p1;",
          [](U x, U y) { return static_cast<S32>(x) < static_cast<S32>(y) ? x : y; });
    check("{.reg .b32 low, high;\nmov.b64 {low, high}, %rd1;\nmov.b64 %rd9, {high, low};}",
          [](U x, U) { return x << 32 | x >> 32; });
    check("cvt.s8.s32 %r19, %r11;\ncvt.s64.s32 %rd9, %r19;",
          [](U x, U) { return static_cast<S>(static_cast<std::int8_t>(x)); });
    check("cvt.u64.u16 %rd9, %rs1;", [](U x, U) { return x & 0xffff; });
  }
}

TEST(PtxOperations, ConversionsExact) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    Values a(32);
    for (std::uint64_t& value : a) {  // floats around the range of 16-bit types
      const double v = std::ldexp(static_cast<double>(random.bits()), -64);
      const auto f =
          static_cast<float>(std::ldexp(v - 0.5, static_cast<int>(random.below(60)) - 35));
      value = std::bit_cast<std::uint32_t>(f);
      if (random.one_in(4)) {  // halfway between two, and next to that
        value = (value & 0xffffe000u) | 0x1000u;
        value += random.below(3) - 1;
      }
    }
    a[0] = 0x7f800000u;
    a[1] = 0xff800000u;
    a[2] = 0x80000000u;
    const auto as_half = [](std::uint64_t v) {
      const auto half = static_cast<_Float16>(std::bit_cast<float>(static_cast<std::uint32_t>(v)));
      return std::uint64_t{std::bit_cast<std::uint16_t>(half)};
    };
    const auto as_bfloat = [](std::uint64_t v) {
      return std::isinf(std::bit_cast<float>(static_cast<std::uint32_t>(v)))
                 ? v >> 16
                 : (v + 0x7fff + (v >> 16 & 1)) >> 16;
    };
    const auto check = [&](const std::string& body, auto f) {
      EXPECT_EQ(results(body, a, a), mapped(a, a, [&](auto x, auto) { return f(x); })) << body;
    };
    check("cvt.rn.f16.f32 %rs2, %f1;\ncvt.u64.u16 %rd9, %rs2;", as_half);
    check("cvt.rn.bf16.f32 %rs2, %f1;\ncvt.u64.u16 %rd9, %rs2;", as_bfloat);
    check(
        "cvt.rn.f16.f32 %rs2, %f1;\ncvt.f32.f16 %f4, %rs2;\nmov.b32 %r19, %f4;\n"
        "cvt.u64.u32 %rd9, %r19;",
        [&](std::uint64_t v) {
          const auto half = std::bit_cast<_Float16>(static_cast<std::uint16_t>(as_half(v)));
          return std::uint64_t{std::bit_cast<std::uint32_t>(static_cast<float>(half))};
        });
    check(
        "cvt.f64.f32 %fd3, %f1;\nmul.rn.f64 %fd4, %fd3, 0d3FF0000010000001;\n"
        "cvt.rn.f32.f64 %f4, %fd4;\nmov.b32 %r19, %f4;\ncvt.u64.u32 %rd9, %r19;",
        [](std::uint64_t v) {
          const double wide = std::bit_cast<float>(static_cast<std::uint32_t>(v));
          const auto f = static_cast<float>(wide * std::bit_cast<double>(0x3FF0000010000001ull));
          return std::uint64_t{std::bit_cast<std::uint32_t>(f)};
        });
    check("abs.f32 %f4, %f1;\nmov.b32 %r19, %f4;\ncvt.u64.u32 %rd9, %r19;",
          [](std::uint64_t v) { return v & 0x7fffffffu; });
    check("cvt.f64.f32 %fd3, %f1;\nabs.f64 %fd4, %fd3;\nmov.b64 %rd9, %fd4;", [](std::uint64_t v) {
      const double wide = std::bit_cast<float>(static_cast<std::uint32_t>(v));
      return std::bit_cast<std::uint64_t>(wide) & ~(1ull << 63);
    });
    check("fma.rn.f32 %f4, %f1, %f1, 0f3F800001;\nmov.b32 %r19, %f4;\ncvt.u64.u32 %rd9, %r19;",
          [](std::uint64_t v) {
            const double f = std::bit_cast<float>(static_cast<std::uint32_t>(v));
            // The square is exact in binary64, and long double holds the sum to be rounded once.
            const auto exact = static_cast<long double>(f) * static_cast<long double>(f) +
                               static_cast<long double>(std::bit_cast<float>(0x3F800001u));
            return std::uint64_t{std::bit_cast<std::uint32_t>(
                std::fabs(f) < 0x1p-18 || std::fabs(f) > 0x1p20
                    ? std::fma(static_cast<float>(f), static_cast<float>(f), 1.00000012f)
                    : static_cast<float>(exact))};
          });
  }
}

TEST(PtxOperations, ShufflesFollowTheManual) {
  Random random(5);
  const Values values = random_values(9);
  for (int round = 0; round < 60; ++round) {
    const unsigned width = 1u << random.below(6);
    const unsigned by = static_cast<unsigned>(random.below(32));
    for (const std::string mode : {"bfly", "idx"}) {
      const unsigned clamp = ((32 - width) << 8) | 31;
      const Values got = results("shfl.sync." + mode + ".b32 %r19|%p1, %r11, " +
                                     std::to_string(by) + ", " + std::to_string(clamp) +
                                     ", -1;\ncvt.u64.u32 %rd9, %r19;\n"
                                     "@%p1 or.b64 %rd9, %rd9, 0x100000000;",
                                 values);
      for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned group = lane / width;
        const unsigned to = mode == "bfly" ? lane ^ by : group * width + by % width;
        // Of a butterfly, lower groups may be read, too.
        const bool inside = to < (group + 1) * width;
        const unsigned from = inside ? to : lane;
        EXPECT_EQ(got[lane], (values[from] & 0xffffffffu) | (inside ? 0x100000000ull : 0))
            << mode << " " << width << " " << by;
      }
    }
  }
}

TEST(PtxOperations, WarpsDecideTogether) {
  Values odd(32);
  std::uint64_t ballot = 0;
  for (unsigned i = 0; i < 32; ++i) {
    odd[i] = i % 3;
    ballot |= (i % 3 == 1 ? 1ull : 0) << i;
  }
  EXPECT_EQ(results("setp.eq.s32 %p1, %r11, 1;\nvote.sync.ballot.b32 %r19, %p1, -1;\n"
                    "cvt.u64.u32 %rd9, %r19;",
                    odd),
            Values(32, ballot));
  EXPECT_EQ(results("setp.eq.s32 %p1, %r11, 1;\nvote.sync.any.pred %p2, %p1, -1;\n"
                    "setp.eq.s32 %p1, %r11, 5;\nvote.sync.any.pred %p3, %p1, -1;\n"
                    "selp.b64 %rd9, 1, 0, %p2;\n@%p3 add.s64 %rd9, %rd9, 2;",
                    odd),
            Values(32, 1));
}

TEST(PtxOperations, ComparisonsWithWhatIsNoNumber) {
  const auto bits = [](float v) { return std::uint64_t{std::bit_cast<std::uint32_t>(v)}; };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Values a(32, bits(1));
  Values b(32, bits(2));
  a[1] = b[2] = a[3] = b[3] = bits(nan);
  a[4] = bits(2);
  a[5] = bits(3);
  // Of less, equal and greater, which hold; and whether it holds where one is no number.
  const auto check = [&](const std::string& how, std::vector<std::uint64_t> expected, bool nans) {
    const Values got = results("setp." + how +
                                   ".f32 %p1, %f1, %f2;\nnot.pred %p2, %p1;\nmov.pred %p3, -1;\n"
                                   "xor.pred %p4, %p3, %p2;\nselp.b64 %rd9, 1, 0, %p4;",
                               a, b);
    EXPECT_EQ(Values({got[0], got[4], got[5]}), expected) << how;
    EXPECT_EQ(Values({got[1], got[2], got[3]}), Values(3, nans ? 1 : 0)) << how;
  };
  check("lt", {1, 0, 0}, false);
  check("leu", {1, 1, 0}, true);
  check("eq", {0, 1, 0}, false);
  check("ne", {1, 0, 1}, false);
  check("neu", {1, 0, 1}, true);
  check("gtu", {0, 0, 1}, true);
  check("ge", {0, 1, 1}, false);
  check("nan", {0, 0, 0}, true);
}

TEST(PtxOperations, UnknownOperationsAreErrors) {
  for (const char* body :
       {"add.ftz.f32 %f1, %f2, %f3;", "rcp.approx.f32 %f1, %f2;", "cvt.rz.f32.f64 %f1, %fd1;",
        "wgmma.fence.sync.aligned;", "call.uni (%r1), other, (%r2);", "popc.b32 %r1, %r2;",
        "add.sat.s32 %r1, %r2, %r3;", "ld.global.nc.u32 %r1, [%rd1];", "bar.sync 1;",
        "setp.lt.and.s32 %p1, %r1, %r2, %p2;", "mov.u32 %r1, %laneid;"}) {
    EXPECT_THROW(run_small(small_kernel(0, body), {1, 1}, {}), SyntaxError) << body;
  }
}

}  // namespace
}  // namespace syncbn::ptx
