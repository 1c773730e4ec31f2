// SPDX-License-Identifier: Apache-2.0
#include "syncbn/nccl.hpp"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "cuda/check.hpp"
#include "device.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/error.hpp"

// Groups over NCCL. Several ranks need a device each, so most of this is one rank; processes that
// share a device are tested through PyTorch.
namespace syncbn {

/// What tests' tensors need of the core, which its library does not export.
void refuse_dtype(DType) { std::abort(); }

namespace {

using std::chrono::milliseconds;
using testing::contains;
using testing::DeviceArray;
using testing::DeviceTensor;
using testing::same_bits;
using testing::Tensor;
using testing::thrown_text;
using Doubles = std::vector<double>;
using Words = std::vector<std::int64_t>;

/// A stream of this test's own, as NCCL wants one.
class TestStream {
 public:
  TestStream() { SYNCBN_CUDA_CHECK(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~TestStream() { cudaStreamDestroy(handle_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  cuda::Stream get() const { return {handle_}; }
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

void expect_usable(cuda::NcclCommunicator& group) {
  const TestStream stream;
  const Words words = {3, -4, 1LL << 62};
  const DeviceArray<std::int64_t> in(words), out(3, -1);
  group.all_reduce_sum({in.data(), 3}, {out.data(), 3}, stream.get());
  group.wait(stream.get());
  EXPECT_EQ(out.values(), words);
}

TEST(Nccl, GroupFromUniqueIdExact) {
  SYNCBN_NEEDS_DEVICE();
  cuda::NcclCommunicator group(cuda::nccl_unique_id(), 0, 1);
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  expect_usable(group);
}

TEST(Nccl, CommunicatorOfTheCallerStaysTheirs) {
  SYNCBN_NEEDS_DEVICE();
  ncclComm_t handle = nullptr;
  const int device = 0;
  ASSERT_EQ(ncclCommInitAll(&handle, 1, &device), ncclSuccess);
  {
    cuda::NcclCommunicator group(handle);
    EXPECT_EQ(group.size(), 1);
    expect_usable(group);
    group.abandon("this test says so");
    const TestStream stream;
    const DeviceArray<std::int64_t> words(3);
    EXPECT_TRUE(contains(thrown_text<PeerLost>([&] {
                           group.all_reduce_sum({words.data(), 3}, {words.data(), 3}, stream.get());
                         }),
                         "rank 0 of 1: rank 0 left the group: this test says so"));
  }
  cuda::NcclCommunicator again(handle);
  expect_usable(again);
  EXPECT_EQ(ncclCommDestroy(handle), ncclSuccess);
}

/// torch.nn.SyncBatchNorm waits ten minutes (the process group's time) here, and then the watchdog
/// ends the process.
TEST(Nccl, MissingRankEndsInATimeout) {
  SYNCBN_NEEDS_DEVICE();
  const std::string text = thrown_text<ExchangeTimeout>(
      [] { cuda::NcclCommunicator(cuda::nccl_unique_id(), 0, 2, milliseconds(1500)); });
  EXPECT_TRUE(contains(text, "rank 0 of 2: "));
  EXPECT_TRUE(contains(text, "within 1500 ms"));
}

/// A forward over NCCL, captured once and replayed with other input: the bits of the group of one
/// rank without NCCL.
TEST(Nccl, CapturedForwardReplaysExact) {
  SYNCBN_NEEDS_DEVICE();
  ncclComm_t handle = nullptr;  // one that blocks its callers
  const int device = 0;
  ASSERT_EQ(ncclCommInitAll(&handle, 1, &device), ncclSuccess);
  cuda::NcclCommunicator group(handle);
  const TestStream stream;
  testing::Random random(5);
  const auto batch = [&] {
    return Tensor(DType::kFloat32, {6, 3, 25},
                  testing::rough_values(random, DType::kFloat32, 6, 75));
  };
  BatchNorm of_group({.channels = 3}, group), alone({.channels = 3});
  Saved saved, expected_saved;
  const auto execution = Execution::on_stream(stream.handle());
  const Tensor first = batch();
  const Tensor second = batch();
  DeviceTensor x(first), y(Tensor(DType::kFloat32, {6, 3, 25}));
  // NCCL connects in the first exchange, and the layer makes its memory.
  of_group.forward({.x = x.view(), .y = y.view()}, saved, execution);
  group.wait(stream.get());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  SYNCBN_CUDA_CHECK(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal));
  of_group.forward({.x = x.view(), .y = y.view()}, saved, execution);
  SYNCBN_CUDA_CHECK(cudaStreamEndCapture(stream.handle(), &graph));
  SYNCBN_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (const Tensor& input : {first, second}) {
    testing::copy_to_device(x.view().data, input.storage().data(), input.storage().size());
    SYNCBN_CUDA_CHECK(cudaGraphLaunch(executable, stream.handle()));
    group.wait(stream.get());
    DeviceTensor expected_x(input), expected(Tensor(DType::kFloat32, {6, 3, 25}));
    const Doubles actual = y.fetch().values();
    alone.forward({.x = expected_x.view(), .y = expected.view()}, expected_saved, execution);
    EXPECT_TRUE(same_bits(actual, expected.fetch().values()));
    EXPECT_EQ(saved.count(), 150);
    of_group.check(execution);
  }
  SYNCBN_CUDA_CHECK(cudaGraphExecDestroy(executable));
  SYNCBN_CUDA_CHECK(cudaGraphDestroy(graph));
  EXPECT_EQ(ncclCommDestroy(handle), ncclSuccess);
}

/// A device each, where there are two: the bits of one rank with the whole batch.
TEST(Nccl, RanksAsThreadsExact) {
  SYNCBN_NEEDS_DEVICE();
  int devices = 0;
  SYNCBN_CUDA_CHECK(cudaGetDeviceCount(&devices));
  if (devices < 2) {
    GTEST_SKIP() << "not possible here: needs a second GPU";
  }
  const cuda::NcclUniqueId id = cuda::nccl_unique_id();
  std::vector<Words> sums(2);
  for (const std::exception_ptr& error : testing::run_ranks(2, [&](int r) {
         SYNCBN_CUDA_CHECK(cudaSetDevice(r));
         cuda::NcclCommunicator group(id, r, 2);
         const TestStream stream;
         const DeviceArray<std::int64_t> words(Words{r, 1LL << 40, -5});
         group.all_reduce_sum({words.data(), 3}, {words.data(), 3}, stream.get());
         group.wait(stream.get());
         sums[static_cast<std::size_t>(r)] = words.values();
       })) {
    EXPECT_EQ(error, nullptr);
  }
  EXPECT_EQ(sums[0], (Words{1, 1LL << 41, -10}));
  EXPECT_EQ(sums[1], sums[0]);
}

}  // namespace
}  // namespace syncbn
