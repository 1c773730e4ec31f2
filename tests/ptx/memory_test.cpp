// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "small_programs.hpp"

// What the interpreter refuses.
namespace syncbn::ptx {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(PtxChecks, WrongAddressesAreErrors) {
  const auto data = std::make_unique<std::uint64_t[]>(4);
  const auto load = [&](const std::string& type, std::uint64_t offset) {
    return run_small(small_kernel(1, "ld.param.u64 %rd0, [p0];\nld.global." + type + ", [%rd0+" +
                                         std::to_string(offset) + "];"),
                     {1, 1}, {address(data.get())});
  };
  EXPECT_EQ(load("u64 %rd1", 24), "");
  EXPECT_TRUE(contains(load("u64 %rd1", 4), "misaligned: reads 8 bytes of global memory"));
  EXPECT_TRUE(contains(load("v2.u64 {%rd1, %rd2}", 8), "misaligned: reads 16 bytes"));
  const std::string beyond = load("u64 %rd1", 32);
  EXPECT_TRUE(contains(beyond, "outside of what there is: reads 8 bytes of global memory"));
  EXPECT_TRUE(contains(beyond, "small.ptx, line 18 (ld.global.u64), thread 0 of block 0 of small"))
      << beyond;
  EXPECT_TRUE(contains(
      run_small(small_kernel(0, "mov.u64 %rd0, 64;\nld.global.u32 %r2, [%rd0];"), {1, 1}, {}),
      "outside of what there is"));
  const auto shared = [](const std::string& body) {
    return run_small(small_kernel(0, body), {1, 1, 16}, {});
  };
  EXPECT_EQ(shared("st.shared.u32 [dynamic+12], %r0;"), "");
  EXPECT_TRUE(contains(shared("st.shared.u32 [dynamic+16], %r0;"), "4 bytes of shared memory"));
  EXPECT_TRUE(contains(shared("mov.u32 %r2, -4;\nst.shared.u32 [%r2], %r0;"), "outside"));
}

TEST(PtxChecks, WhatWasNeverWrittenIsAnError) {
  std::uint64_t out = 0;
  const auto text_of = [&](const std::string& body) {
    return run_small(small_kernel(1, "ld.param.u64 %rd0, [p0];\n" + body), {1, 1, 16},
                     {address(&out)});
  };
  EXPECT_TRUE(contains(text_of("st.global.u32 [%rd0], %r9;"), "was never written"));
  EXPECT_TRUE(
      contains(text_of("add.s32 %r3, %r9, 1;\nst.global.u32 [%rd0], %r3;"), "was never written"));
  EXPECT_TRUE(contains(text_of("@%p1 st.global.u32 [%rd0], %r0;"), "the predicate was never"));
  EXPECT_TRUE(contains(text_of("ld.shared.u32 %r3, [dynamic];\nst.global.u32 [%rd0], %r3;"),
                       "was never written"));
  EXPECT_EQ(text_of("mov.u32 %r3, %r9;\nst.global.u32 [%rd0], %r0;"), "") << "only moved";
  EXPECT_EQ(text_of("st.shared.u32 [dynamic], %r0;\nld.shared.u32 %r3, [dynamic];\n"
                    "st.global.u32 [%rd0], %r3;"),
            "");
}

const char* const kRotate =  // each thread reads what its neighbour stored
    "mul.lo.s32 %r2, %r0, 4;\nmov.u32 %r3, dynamic;\nadd.s32 %r4, %r3, %r2;\n"
    "st.shared.u32 [%r4], %r0;\nBARRIER\nxor.b32 %r5, %r2, DISTANCE;\n"
    "add.s32 %r6, %r3, %r5;\nld.shared.u32 %r7, [%r6];\n"
    "ld.param.u64 %rd0, [p0];\nmul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd2, %rd0, %rd1;\n"
    "st.global.u32 [%rd2], %r7;";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

TEST(PtxChecks, SharedMemoryNeedsBarriers) {
  const auto error_of = [](const std::string& barrier, const std::string& distance) {
    std::vector<std::uint32_t> out(64);
    const std::string body = replaced(replaced(kRotate, "BARRIER", barrier), "DISTANCE", distance);
    return run_small(small_kernel(1, body), {1, 64, 256}, {address(out.data())});
  };
  EXPECT_EQ(error_of("bar.sync 0;", "4"), "");
  EXPECT_EQ(error_of("bar.warp.sync -1;", "4"), "") << "neighbours are of the same warp";
  EXPECT_NE(error_of("", "4"), "");
  EXPECT_NE(error_of("bar.warp.sync -1;", "128"), "") << "of the other warp";
  EXPECT_EQ(error_of("", "0"), "") << "its own";
}

TEST(PtxChecks, DivergenceIsAnError) {
  const auto error_of = [](const std::string& body, unsigned threads = 64) {
    return run_small(small_kernel(0, "setp.lt.u32 %p0, %r0, 3;\n" + body), {1, threads}, {});
  };
  EXPECT_TRUE(contains(error_of("@%p0 bra $OUT;\nbar.sync 0;\n$OUT:"), "no thread can go on"));
  EXPECT_TRUE(contains(error_of("@%p0 bra $OUT;\nbar.sync 0;\n$OUT:"), "has ended"));
  EXPECT_TRUE(contains(error_of("@%p0 bra $B;\nbar.sync 0;\nbra $OUT;\n$B:\nbar.sync 0;\n$OUT:"),
                       "threads of the block at different barriers"));
  EXPECT_TRUE(contains(error_of("@%p0 bra $OUT;\nshfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;\n$OUT:"),
                       "has ended"));
  EXPECT_TRUE(
      contains(error_of("@%p0 bra $B;\nshfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;\nbra $OUT;\n$B:\n"
                        "vote.sync.any.pred %p1, %p0, -1;\n$OUT:"),
               "which its mask names, waits in line"));
  EXPECT_TRUE(contains(error_of("shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;", 40), "does not exist"));
  EXPECT_TRUE(contains(error_of("shfl.sync.bfly.b32 %r2, %r0, 1, 31, 0xfffffffe;"),
                       "its own lane is not in the mask"));
  EXPECT_TRUE(
      contains(error_of("@!%p0 bra $OUT;\nshfl.sync.idx.b32 %r2, %r0, 5, 31, 7;\n$OUT:", 32),
               "which its mask leaves out"));
  EXPECT_EQ(error_of("@!%p0 bra $OUT;\nshfl.sync.idx.b32 %r2, %r0, 2, 31, 7;\n$OUT:", 32), "");
}

}  // namespace
}  // namespace syncbn::ptx
