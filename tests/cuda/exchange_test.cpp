// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cuda/check.hpp"
#include "device.hpp"
#include "groups.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "syncbn/error.hpp"

// Exchanges of messages on a device that need no NCCL.
namespace syncbn::testing {
namespace {

using Words = std::vector<std::int64_t>;

TEST(CudaExchange, OneRankExact) {
  SYNCBN_NEEDS_DEVICE();
  cuda::Communicator& self = cuda::self_communicator();
  EXPECT_EQ(self.rank(), 0);
  EXPECT_EQ(self.size(), 1);
  const Words words = {1, -2, 3};
  const DeviceArray<std::int64_t> in(words), out(3, -1);
  self.all_reduce_sum({in.data(), 3}, {out.data(), 3}, {});
  EXPECT_EQ(out.values(), words);
  self.all_reduce_sum({in.data(), 3}, {in.data(), 3}, {});
  EXPECT_EQ(in.values(), words);
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>(
                           [&] { self.all_reduce_sum({in.data(), 3}, {out.data(), 2}, {}); }),
                       "out: got 16 bytes, expected 24"));
}

/// Ranks on a device each where there are as many, else several share one; each on a stream of its
/// own.
TEST(CudaExchange, RanksThroughTheHostExact) {
  SYNCBN_NEEDS_DEVICE();
  int devices = 0;
  SYNCBN_CUDA_CHECK(cudaGetDeviceCount(&devices));
  for (const GroupKind kind : {GroupKind::kThreads, GroupKind::kSharedMemory}) {
    const auto group = make_group(kind, 3);
    expect_no_errors(run_ranks(3, [&](int r) {
      SYNCBN_CUDA_CHECK(cudaSetDevice(r % devices));
      cudaStream_t stream = nullptr;
      SYNCBN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      const auto communicator = cuda::staged_communicator(group->rank(r));
      EXPECT_EQ(communicator->rank(), r);
      EXPECT_EQ(communicator->size(), 3);
      for (const std::size_t length : {1u, 19u, 5000u}) {
        Words mine(length);
        for (std::size_t i = 0; i < length; ++i) {
          mine[i] = static_cast<std::int64_t>(i) * (r + 1) - 7;
        }
        const DeviceArray<std::int64_t> in(mine), out(static_cast<std::int64_t>(length), -1);
        communicator->all_reduce_sum({in.data(), length}, {out.data(), length}, {stream});
        EXPECT_EQ(in.values(), mine);
        const Words sums = out.values();
        for (std::size_t i = 0; i < length; ++i) {
          ASSERT_EQ(sums[i], static_cast<std::int64_t>(i) * 6 - 21);
        }
      }
      SYNCBN_CUDA_CHECK(cudaStreamDestroy(stream));
    }));
  }
}

TEST(CudaExchange, CountIsReadAndDisagreementIsAnError) {
  SYNCBN_NEEDS_DEVICE();
  EXPECT_EQ(cuda::read_count(DeviceArray<std::int64_t>(Words{42, 5}).data(), {}), 42);
  const DeviceArray<std::int64_t> disagreed(Words{-1, 0});
  EXPECT_TRUE(
      contains(thrown_text<DivergenceError>([&] { cuda::read_count(disagreed.data(), {}); }),
               "did not make the same call"));
}

TEST(CudaExchange, FailedCallsNameCallFileAndLine) {
  SYNCBN_NEEDS_DEVICE();
  const std::string text = thrown_text<Error>([] { SYNCBN_CUDA_CHECK(cudaSetDevice(100000)); });
  EXPECT_TRUE(contains(text, "cudaSetDevice(100000) failed at "));
  EXPECT_TRUE(contains(text, "exchange_test.cpp:"));
}

}  // namespace
}  // namespace syncbn::testing
