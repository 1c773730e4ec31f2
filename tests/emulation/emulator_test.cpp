// SPDX-License-Identifier: Apache-2.0
#include "emulator.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/device/primitives.cuh"
#include "support.hpp"

// The emulator runs right programs as a GPU does, and refuses what is undefined on one.
namespace syncbn::device {
namespace {

using emulation::KernelError;
using testing::contains;

class Emulator : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  void SetUp() override { emulation::settings().seed = GetParam(); }
  void TearDown() override { emulation::settings() = {}; }
};

template <class... Parameters, class... Arguments>
std::string error_of(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                     std::size_t shared_bytes, const Arguments&... arguments) {
  try {
    launch(kernel, blocks, threads, shared_bytes, nullptr, arguments...);
  } catch (const KernelError& error) {
    return error.what();
  }
  return "";
}

void reverse(const std::int64_t* in, std::int64_t* out, bool barrier) {
  auto* const staged = shared<std::int64_t>();
  const unsigned i = thread_index();
  staged[i] = in[block_index() * block_size() + i];
  if (barrier) {
    block_barrier();
  }
  out[block_index() * block_size() + i] = staged[block_size() - 1 - i];
}

TEST_P(Emulator, BarriersOrderSharedMemory) {
  std::vector<std::int64_t> in(5 * 96);
  std::iota(in.begin(), in.end(), 0);
  std::vector<std::int64_t> expected;
  for (int block = 0; block < 5; ++block) {
    expected.insert(expected.end(), in.rend() - (block + 1) * 96, in.rend() - block * 96);
  }
  std::vector<std::int64_t> out(in.size());
  ASSERT_EQ(error_of(&reverse, 5, 96, 96 * 8, in.data(), out.data(), true), "");
  EXPECT_EQ(out, expected);
  ASSERT_EQ(error_of(&reverse, 5, 96, 96 * 8, in.data(), out.data(), false), "");
  EXPECT_NE(out, expected) << "without the barrier some thread must read too early";
}

void butterfly(std::int64_t* sums, std::int64_t* leaders, bool* found) {
  const unsigned i = block_index() * block_size() + thread_index();
  std::int64_t sum = i;
  for (unsigned mask = 1; mask < kWarp; mask *= 2) {
    sum += shuffle_xor(sum, mask);
  }
  sums[i] = sum;
  leaders[i] = shuffle_index(static_cast<std::int64_t>(i), 7);
  found[i] = any(i == 40);
}

void leave_early(int* out) {
  if (thread_index() == 3) {
    return;
  }
  block_barrier();
  out[thread_index()] = 1;
}

void barrier_in_a_branch(int* out) {
  if (thread_index() % 2 == 0) {
    block_barrier();
  } else {
    warp_barrier();
  }
  out[thread_index()] = 1;
}

void shuffles_of_two_branches(int* out) {
  if (thread_index() < 16) {
    out[thread_index()] = shuffle_xor(1, 1);
  } else {
    out[thread_index()] = shuffle_xor(2, 1);
  }
}

TEST_P(Emulator, DivergenceIsAnError) {
  int out[64] = {};
  EXPECT_TRUE(contains(error_of(&leave_early, 1, 64, 0, &out[0]), "no thread can go on"));
  EXPECT_TRUE(contains(error_of(&leave_early, 1, 64, 0, &out[0]), "has ended"));
  EXPECT_TRUE(contains(error_of(&barrier_in_a_branch, 1, 64, 0, &out[0]), "no thread can go on"));
  EXPECT_TRUE(contains(error_of(&shuffles_of_two_branches, 1, 32, 0, &out[0]),
                       "threads of a warp at different operations"));
  std::int64_t sums[40];
  std::int64_t leaders[40];
  bool found[40];
  EXPECT_TRUE(contains(error_of(&butterfly, 1, 40, 0, &sums[0], &leaders[0], &found[0]),
                       "in a warp of 8 threads"));
}

void misaligned(const float* from) { load_vector<4>(from + 1); }

void out_of_bounds(unsigned at) { shared<int>()[at] = 1; }

TEST_P(Emulator, WrongAddressesAreErrors) {
  alignas(16) float data[8] = {};
  EXPECT_TRUE(contains(error_of(&misaligned, 1, 1, 0, &data[0]), "load_vector of 16 bytes"));
  EXPECT_EQ(error_of(&out_of_bounds, 1, 1, 40, 9u), "");
  EXPECT_TRUE(contains(error_of(&out_of_bounds, 1, 1, 40, 10u), "40 bytes of shared memory"));
  EXPECT_TRUE(contains(error_of(&out_of_bounds, 0, 1, 40, 0u), "a launch of 0 blocks"));
}

INSTANTIATE_TEST_SUITE_P(Seeds, Emulator, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace syncbn::device
