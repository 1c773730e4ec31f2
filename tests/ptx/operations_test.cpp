#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "random.hpp"
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
      "ld.global.nc.L1::no_allocate.L2::128B.u64 %rd3, [%rd22];\n"
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
    check("mad.hi.u64 %rd9, %rd1, %rd2, %rd1;",
          [](U x, U y) { return static_cast<U>(Wide{x} * y >> 64) + x; });
    check("mad.lo.s64 %rd9, %rd1, %rd2, 7;", [](U x, U y) { return x * y + 7; });
    check("mul.wide.s32 %rd9, %r11, %r12;",
          [](U x, U y) { return static_cast<S>(static_cast<S32>(x)) * static_cast<S32>(y); });
    check("mad.wide.u32 %rd9, %r11, %r12, %rd2;",
          [](U x, U y) { return U{static_cast<U32>(x)} * static_cast<U32>(y) + y; });
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
    check("popc.b64 %r19, %rd1;\ncvt.u64.u32 %rd9, %r19;", [](U x, U) { return std::popcount(x); });
    check("clz.b32 %r19, %r11;\ncvt.u64.u32 %rd9, %r19;",
          [](U x, U) { return std::countl_zero(static_cast<U32>(x)); });
    check("bfind.u64 %r19, %rd1;\ncvt.u64.u32 %rd9, %r19;",
          [](U x, U) { return x == 0 ? 0xffffffffu : 63 - static_cast<U32>(std::countl_zero(x)); });
    check("bfe.u32 %r19, %r11, 5, 9;\ncvt.u64.u32 %rd9, %r19;",
          [](U x, U) { return static_cast<U32>(x) >> 5 & 0x1ff; });
    check("bfe.s32 %r19, %r11, 28, 9;\ncvt.s64.s32 %rd9, %r19;",
          [](U x, U) { return static_cast<S>(static_cast<S32>(x) >> 28); });
    check("bfi.b64 %rd9, %rd1, %rd2, 40, 10;",
          [](U x, U y) { return (y & ~(0x3ffull << 40)) | (x & 0x3ff) << 40; });
    check("lop3.b32 %r19, %r11, %r12, 255, 0xb8;\ncvt.u64.u32 %rd9, %r19;", [](U x, U y) {
      const U32 p = static_cast<U32>(x);
      const U32 q = static_cast<U32>(y);
      return (p & ~q) | (q & 255);  // bits 3, 4, 5 and 7 of the table
    });
    check("prmt.b32 %r19, %r11, %r12, 0x4103;\ncvt.u64.u32 %rd9, %r19;", [](U x, U y) {
      const auto byte = [](U v, int k) { return v >> (8 * k) & 0xff; };
      return byte(x, 3) | byte(x, 0) << 8 | byte(x, 1) << 16 | byte(y, 0) << 24;
    });
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
    check("mad.lo.cc.u64 %rd8, %rd1, %rd2, %rd1;\nmadc.hi.u64 %rd9, %rd1, %rd2, 0;",
          [](U x, U y) { return static_cast<U>((Wide{x} * y + x) >> 64); });
    check("setp.lt.s32 %p1, %r11, %r12;\nselp.b64 %rd9, %rd1, %rd2, %p1;",
          [](U x, U y) { return static_cast<S32>(x) < static_cast<S32>(y) ? x : y; });
    check(
        "setp.ne.s32 %p3, %r0, %r0;\nsetp.hi.and.u64 %p1|%p2, %rd1, %rd2, !%p3;\nselp.b64 %rd9, 1, "
        "0, %p1;"
        "\n@%p2 add.s64 %rd9, %rd9, 2;",
        [](U x, U y) { return x > y ? 1 : 2; });
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
    check("mov.f32 %f4, 0f3F800000;\ncvt.rn.f16x2.f32 %r19, %f4, %f1;\ncvt.u64.u32 %rd9, %r19;",
          [&](std::uint64_t v) { return 0x3c000000u | as_half(v); });
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
    check("cvt.rmi.s32.f32 %r19, %f1;\ncvt.s64.s32 %rd9, %r19;", [](std::uint64_t v) {
      const double whole = std::floor(double{std::bit_cast<float>(static_cast<std::uint32_t>(v))});
      return static_cast<std::uint64_t>(
          static_cast<std::int64_t>(std::clamp(whole, -0x1p31, 0x1p31 - 1)));
    });
    check("add.rn.f32x2 %rd8, %rd1, %rd1;\nmov.u64 %rd9, %rd8;", [](std::uint64_t v) {
      const float f = std::bit_cast<float>(static_cast<std::uint32_t>(v));
      return std::uint64_t{std::bit_cast<std::uint32_t>(f + f)};
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

TEST(PtxOperations, HalvesAreRoundedOnceExact) {
  Random random(4);
  for (int round = 0; round < 50; ++round) {
    Values a(32);
    Values b(32);
    Values c(32);
    for (unsigned i = 0; i < 32; ++i) {
      a[i] = random.bits() & 0xffff7fff;  // one of a pair is positive; both may be infinite
      b[i] = random.bits() & 0xffffffff;
      c[i] = random.bits() & 0xffffffff;
    }
    const Values got =
        results("fma.rn.f16x2 %r19, %r11, %r12, %r13;\ncvt.u64.u32 %rd9, %r19;", a, b, c);
    for (unsigned i = 0; i < 32; ++i) {
      for (unsigned half = 0; half < 2; ++half) {
        const auto value = [&](std::uint64_t v) {
          return static_cast<__float128>(
              std::bit_cast<_Float16>(static_cast<std::uint16_t>(v >> (16 * half))));
        };
        const __float128 exact = value(a[i]) * value(b[i]) + value(c[i]);  // 80 bits at most
        const auto bits = static_cast<std::uint16_t>(got[i] >> (16 * half));
        const auto expected = std::bit_cast<std::uint16_t>(static_cast<_Float16>(exact));
        EXPECT_EQ(bits, exact != exact ? 0x7fff : expected);
      }
    }
  }
}

TEST(PtxOperations, ShufflesFollowTheManual) {
  Random random(5);
  const Values values = random_values(9);
  for (int round = 0; round < 60; ++round) {
    const unsigned width = 1u << random.below(6);
    const unsigned by = static_cast<unsigned>(random.below(32));
    for (const std::string mode : {"up", "down", "bfly", "idx"}) {
      const unsigned clamp = ((32 - width) << 8) | (mode == "up" ? 0 : 31);
      const Values got = results("shfl.sync." + mode + ".b32 %r19|%p1, %r11, " +
                                     std::to_string(by) + ", " + std::to_string(clamp) +
                                     ", -1;\ncvt.u64.u32 %rd9, %r19;\n"
                                     "@%p1 or.b64 %rd9, %rd9, 0x100000000;",
                                 values);
      for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned group = lane / width;
        const auto to = static_cast<int>(mode == "up"     ? lane - by
                                         : mode == "down" ? lane + by
                                         : mode == "bfly" ? lane ^ by
                                                          : group * width + by % width);
        // Of a butterfly, lower groups may be read; of the others, the lane's own alone.
        const int first = mode == "up" ? static_cast<int>(group * width) : -1000;
        const bool inside = to >= first && to < static_cast<int>((group + 1) * width);
        const auto from = inside ? static_cast<unsigned>(to) : lane;
        EXPECT_EQ(got[lane], (values[from] & 0xffffffffu) | (inside ? 0x100000000ull : 0))
            << mode << " " << width << " " << by;
      }
    }
  }
}

TEST(PtxOperations, WarpsDecideTogether) {
  const Values values = random_values(11);
  Values odd(32);
  std::uint64_t ballot = 0;
  std::uint32_t sum = 0;
  for (unsigned i = 0; i < 32; ++i) {
    odd[i] = i % 3;
    ballot |= (i % 3 == 1 ? 1ull : 0) << i;
    sum += static_cast<std::uint32_t>(values[i]);
  }
  EXPECT_EQ(results("setp.eq.s32 %p1, %r11, 1;\nvote.sync.ballot.b32 %r19, %p1, -1;\n"
                    "cvt.u64.u32 %rd9, %r19;",
                    odd),
            Values(32, ballot));
  EXPECT_EQ(results("setp.eq.s32 %p1, %r11, 1;\nvote.sync.any.pred %p2, %p1, -1;\n"
                    "vote.sync.all.pred %p3, !%p1, -1;\nselp.b64 %rd9, 1, 0, %p2;\n"
                    "@%p3 add.s64 %rd9, %rd9, 2;",
                    odd),
            Values(32, 1));
  EXPECT_EQ(results("redux.sync.add.u32 %r19, %r11, -1;\ncvt.u64.u32 %rd9, %r19;", values),
            Values(32, sum));
  const Values matched =
      results("match.any.sync.b32 %r19, %r11, -1;\ncvt.u64.u32 %rd9, %r19;", odd);
  for (unsigned i = 0; i < 32; ++i) {
    EXPECT_EQ(matched[i] >> i & 1, 1u);
    EXPECT_EQ(static_cast<unsigned>(std::popcount(matched[i])), i % 3 == 2 ? 10u : 11u);
  }
  EXPECT_EQ(results("setp.eq.s32 %p1, %r11, 1;\nbar.red.popc.u32 %r19, 0, %p1;\n"
                    "cvt.u64.u32 %rd9, %r19;",
                    odd),
            Values(32, 11));
}

TEST(PtxOperations, CountsOfBasicBlocks) {
  std::uint64_t out[64] = {};
  Execution execution;
  // Thread i goes round the loop i % 4 + 1 times.
  const std::string text = small_kernel(
      1,
      "ld.param.u64 %rd0, [p0];\nand.b32 %r2, %r0, 3;\nmov.u32 %r3, 0;\n$LOOP:\n"
      "add.s32 %r3, %r3, 1;\nsetp.le.u32 %p1, %r3, %r2;\n@%p1 bra $LOOP;\n"
      "mul.wide.u32 %rd1, %r0, 8;\nadd.s64 %rd2, %rd0, %rd1;\nst.global.u32 [%rd2], %r3;");
  ASSERT_EQ(run_small(text, {1, 64}, {address(out)}, {.counts = true}, &execution), "");
  ASSERT_EQ(execution.counts.size(), 3u);
  EXPECT_EQ(execution.counts[0].threads, 64u);
  EXPECT_EQ(execution.counts[0].warps, 2u);
  EXPECT_EQ(execution.counts[1].threads, 16u * (1 + 2 + 3 + 4));
  EXPECT_EQ(execution.counts[1].warps, 8u) << "the longest way of a warp's lanes";
  EXPECT_EQ(execution.counts[2].threads, 64u);
  EXPECT_EQ(execution.thread_instructions, 64u * 5 + 160u * 3 + 64u * 4);
}

TEST(PtxOperations, UnknownOperationsAreErrors) {
  for (const char* body :
       {"add.ftz.f32 %f1, %f2, %f3;", "rcp.approx.f32 %f1, %f2;", "cvt.rz.f32.f64 %f1, %fd1;",
        "wgmma.fence.sync.aligned;", "call.uni (%r1), other, (%r2);"}) {
    EXPECT_THROW(run_small(small_kernel(0, body), {1, 1}, {}), SyntaxError) << body;
  }
}

}  // namespace
}  // namespace syncbn::ptx
