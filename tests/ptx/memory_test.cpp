// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "small_programs.hpp"

// What the interpreter refuses, and how weak its memory is: the outcomes of small programs that
// PTX's model allows are seen for some seed, those that it forbids never.
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

/// Two blocks of one thread: the values that they got, over many seeds.
std::set<std::pair<std::uint64_t, std::uint64_t>> outcomes(const std::string& first,
                                                           const std::string& second,
                                                           unsigned threads = 1) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> out;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    alignas(64) std::uint64_t memory[32] = {};  // x at 0, y at 64; results at 128 and 192
    const std::string text =
        small_kernel(1,
                     "ld.param.u64 %rd0, [p0];\nmov.u64 %rd2, 0;\nmov.u64 %rd3, 0;\n"
                     "setp.ne.s32 %p0, %r1, 0;\n@%p0 bra $SECOND;\n" +
                         first + "\nbra $END;\n$SECOND:\n" + second + "\n$END:\n");
    const std::string error = run_small(text, {2, threads}, {address(memory)},
                                        {.seed = seed, .weak = true, .races = false});
    EXPECT_EQ(error, "");
    out.insert({memory[16], memory[24]});
  }
  return out;
}
using Outcome = std::pair<std::uint64_t, std::uint64_t>;

const char* const kGet = "\nst.global.u64 [%rd0+128], %rd2;\nst.global.u64 [%rd0+192], %rd3;";

TEST(PtxWeakMemory, MessagesNeedFencesOnBothSides) {
  const auto stale = [](const std::string& writers, const std::string& readers,
                        const std::string& kind) {
    return outcomes("st.global.u64 [%rd0], 1;\n" + writers + "\nst." + kind + ".u64 [%rd0+64], 1;",
                    "ld." + kind + ".u64 %rd2, [%rd0+64];\n" + readers +
                        "\nld.global.u64 %rd3, [%rd0];" + kGet)
               .count({1, 0}) != 0;
  };
  const std::string strong = "relaxed.gpu.global";
  EXPECT_TRUE(stale("", "", strong));
  EXPECT_TRUE(stale("membar.gl;", "", strong));
  EXPECT_TRUE(stale("", "membar.gl;", strong));
  EXPECT_FALSE(stale("membar.gl;", "membar.gl;", strong));
  EXPECT_FALSE(stale("fence.acq_rel.gpu;", "fence.acq_rel.gpu;", strong));
  EXPECT_FALSE(stale("fence.release.gpu;", "fence.acquire.gpu;", strong));
  EXPECT_TRUE(stale("fence.acquire.gpu;", "fence.release.gpu;", strong));
  EXPECT_TRUE(stale("fence.acq_rel.cta;", "fence.acq_rel.gpu;", strong));
  EXPECT_TRUE(stale("membar.cta;", "membar.cta;", strong));
  EXPECT_TRUE(stale("fence.acq_rel.gpu;", "fence.acq_rel.gpu;", "global")) << "plain accesses";
  EXPECT_FALSE(outcomes("st.global.u64 [%rd0], 1;\nst.release.gpu.global.u64 [%rd0+64], 1;",
                        std::string("ld.acquire.gpu.global.u64 %rd2, [%rd0+64];\n"
                                    "ld.global.u64 %rd3, [%rd0];") +
                            kGet)
                   .count({1, 0}));
}

TEST(PtxWeakMemory, DevicesNeedTheScopeOfTheSystem) {
  const auto stale = [](const std::string& writers, const std::string& readers) {
    const auto kernel_of = [](const std::string& body) {
      return Module(small_kernel(1, "ld.param.u64 %rd0, [p0];\n" + body), "small.ptx");
    };
    const Module writes =
        kernel_of("st.global.u64 [%rd0], 1;\nst.release." + writers + ".global.u64 [%rd0+64], 1;");
    const Module reads = kernel_of("ld.acquire." + readers +
                                   ".global.u64 %rd2, [%rd0+64];\n"
                                   "ld.global.u64 %rd3, [%rd0];" +
                                   kGet);
    const auto writer = decode(writes, writes.entries().at(0));
    const auto reader = decode(reads, reads.entries().at(0));
    bool found = false;
    for (std::uint64_t seed = 1; seed <= 300; ++seed) {
      alignas(64) std::uint64_t memory[32] = {};
      const std::uint64_t at = address(memory);
      std::vector<std::byte> parameters(sizeof(at));
      std::memcpy(parameters.data(), &at, sizeof(at));
      run_devices({{{writer.get(), 1, 1, 0, parameters}}, {{reader.get(), 1, 1, 0, parameters}}},
                  {.seed = seed, .weak = true, .races = false}, [](const Launch&, Execution) {});
      found = found || (memory[16] == 1 && memory[24] == 0);
    }
    return found;
  };
  EXPECT_FALSE(stale("sys", "sys"));
  EXPECT_TRUE(stale("gpu", "sys"));
  EXPECT_TRUE(stale("sys", "gpu"));
}

TEST(PtxWeakMemory, AtomicsPublishOnlyWhatAFenceDid) {
  const auto stale = [](const std::string& add, const std::string& fence, const std::string& read) {
    return outcomes(add + fence +
                        "\natom.global.add.u64 %rd4, [%rd0+64], 1;\n"
                        "st.global.u64 [%rd0+248], %rd4;",
                    "atom.global.add.u64 %rd2, [%rd0+64], 0;\nmembar.gl;\n" + read + kGet)
               .count({1, 0}) != 0;
  };
  const std::string red = "red.global.add.u64 [%rd0], 1;\n";
  const std::string unused = "atom.global.add.u64 %rd9, [%rd0], 1;\n";
  const std::string load = "ld.global.cg.u64 %rd3, [%rd0];";
  for (const std::string& add : {red, unused}) {
    EXPECT_TRUE(stale(add, "", load)) << add;
    EXPECT_FALSE(stale(add, "membar.gl;", load)) << add;
  }
}

TEST(PtxWeakMemory, FencesOfOneOrder) {
  const auto both_old = [](const std::string& fence) {
    const auto side = [&](const char* mine, const char* other, const char* out, const char* r) {
      return std::string("st.relaxed.gpu.global.u64 [%rd0+") + mine + "], 1;\n" + fence +
             "\nld.relaxed.gpu.global.u64 " + r + ", [%rd0+" + other + "];\nst.global.u64 [%rd0+" +
             out + "], " + r + ";";
    };
    return outcomes(side("0", "64", "128", "%rd2"), side("64", "0", "192", "%rd3")).count({0, 0}) !=
           0;
  };
  EXPECT_TRUE(both_old(""));
  EXPECT_TRUE(both_old("fence.acq_rel.gpu;"));
  EXPECT_FALSE(both_old("membar.gl;"));
  EXPECT_FALSE(both_old("fence.sc.gpu;"));
}

TEST(PtxWeakMemory, NoOlderValueAfterANewerOne) {
  const auto seen = outcomes(
      "st.relaxed.gpu.global.u64 [%rd0], 1;\n"
      "st.relaxed.gpu.global.u64 [%rd0], 2;",
      std::string("ld.relaxed.gpu.global.u64 %rd2, [%rd0];\n"
                  "ld.relaxed.gpu.global.u64 %rd3, [%rd0];") +
          kGet);
  for (const auto& [before, after] : seen) {
    EXPECT_LE(before, after);
  }
  EXPECT_TRUE(seen.count({0, 2}) == 1 && seen.count({1, 1}) == 1) << "and anything else";
}

/// A fence after a barrier publishes what the block's other threads wrote before it.
TEST(PtxWeakMemory, FencesAreCumulativeOverBarriers) {
  const auto stale = [](const std::string& first, const std::string& second) {
    return outcomes("setp.eq.s32 %p1, %r0, 0;\n@!%p1 st.global.u64 [%rd0], 1;\n" + first +
                        "\n@%p1 membar.gl;\n" + second +
                        "\n@%p1 st.relaxed.gpu.global.u64 [%rd0+64], 1;",
                    "setp.ne.s32 %p1, %r0, 0;\n@%p1 bra $END;\n"
                    "ld.relaxed.gpu.global.u64 %rd2, [%rd0+64];\nmembar.gl;\n"
                    "ld.global.u64 %rd3, [%rd0];" +
                        std::string(kGet),
                    2)
               .count({1, 0}) != 0;
  };
  EXPECT_FALSE(stale("bar.sync 0;", "")) << "what was seen at the barrier is published";
  EXPECT_FALSE(stale("bar.warp.sync 3;", ""));
  EXPECT_TRUE(stale("", ""));
}

/// The last of several blocks to be counted adds up what all of them left, as the sums do.
TEST(PtxWeakMemory, LastBlockNeedsBothFences) {
  const auto noticed = [](const std::string& before, const std::string& after) {
    int out = 0;
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
      alignas(64) std::uint64_t memory[32] = {};
      const std::string text = small_kernel(
          1, "ld.param.u64 %rd0, [p0];\nred.global.add.u64 [%rd0], 1;\n" + before +
                 "\nbar.sync 0;\nsetp.ne.s32 %p0, %r0, 0;\n@%p0 bra $COUNTED;\n"
                 "atom.global.add.u64 %rd1, [%rd0+64], 1;\nst.shared.u64 [dynamic], %rd1;\n"
                 "$COUNTED:\nbar.sync 0;\nld.shared.u64 %rd2, [dynamic];\n"
                 "setp.ne.s64 %p1, %rd2, 4;\n@%p1 bra $END;\n" +
                 after +
                 "\n@%p0 bra $END;\nld.global.cg.u64 %rd3, [%rd0];\n"
                 "st.global.u64 [%rd0+128], %rd3;\n$END:");
      const std::string error = run_small(text, {5, 64, 8}, {address(memory)},
                                          {.seed = seed, .weak = true, .races = false});
      EXPECT_EQ(error, "");
      EXPECT_EQ(memory[0], 5u * 64);
      out += memory[16] != 5 * 64 ? 1 : 0;
    }
    return out;
  };
  EXPECT_EQ(noticed("membar.gl;", "membar.gl;"), 0);
  EXPECT_GT(noticed("", "membar.gl;"), 0);
  EXPECT_GT(noticed("membar.gl;", ""), 0);
}

TEST(PtxWeakMemory, RacesAreErrors) {
  const auto error_of = [](const std::string& fence) {
    std::set<std::string> out;
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      alignas(64) std::uint64_t memory[32] = {};
      const std::string text = small_kernel(
          1,
          "ld.param.u64 %rd0, [p0];\nsetp.ne.s32 %p0, %r1, 0;\n@%p0 bra $SECOND;\n"
          "st.global.u64 [%rd0], 1;\n" +
              fence +
              "\nred.global.add.u64 [%rd0+64], 1;\nbra $END;\n$SECOND:\n"
              "ld.relaxed.gpu.global.u64 %rd2, [%rd0+64];\n" +
              fence +
              "\nsetp.eq.s64 %p1, %rd2, 0;\n@%p1 bra $END;\nld.global.u64 %rd3, [%rd0];\n$END:");
      out.insert(run_small(text, {2, 1}, {address(memory)}, {.seed = seed, .weak = true}));
    }
    out.erase("");
    return out;
  };
  EXPECT_TRUE(error_of("membar.gl;").empty());
  const auto races = error_of("");
  ASSERT_EQ(races.size(), 1u);
  EXPECT_TRUE(contains(*races.begin(), "a race, no fence or barrier orders it"));
}

}  // namespace
}  // namespace syncbn::ptx
