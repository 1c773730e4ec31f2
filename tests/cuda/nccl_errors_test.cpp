// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "support.hpp"
#include "syncbn/error.hpp"
#include "syncbn/nccl.hpp"

// What an NcclCommunicator makes of errors, delays and missing ranks, on a CPU: NCCL is played by
// the functions below, which sum over two ranks of which the other one brings ones.

namespace {

struct Played {
  int in_progress = 0;  ///< how many looks still find a call unfinished
  ncclResult_t noticed = ncclSuccess;
  ncclResult_t answer = ncclSuccess;  ///< of a collective
  cudaError_t stream = cudaSuccess;
  int aborted = 0, finalized = 0, destroyed = 0;
} played;

constexpr int kForever = 1 << 30;

}  // namespace

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::fill(std::begin(id->internal), std::end(id->internal), '\7');
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int, ncclUniqueId id, int,
                                    ncclConfig_t* config) {
  *comm = reinterpret_cast<ncclComm_t>(&played);
  return id.internal[127] == '\7' && config->blocking == 0 ? ncclInProgress : ncclInternalError;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) {
  *state = played.in_progress > 0 ? ncclInProgress : played.noticed;
  played.in_progress -= played.in_progress > 0;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t, int* rank) {
  *rank = 1;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t, int* count) {
  *count = 2;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t) {
  ++played.aborted;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  ++played.finalized;
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t) {
  ++played.destroyed;
  return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t, cudaStream_t) {
  if (type != ncclInt64 || operation != ncclSum) {
    return ncclInvalidArgument;
  }
  const auto* from = static_cast<const std::int64_t*>(in);
  std::transform(from, from + count, static_cast<std::int64_t*>(out),
                 [](std::int64_t word) { return word + 1; });
  return played.answer;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error"; }
const char* ncclGetLastError(ncclComm_t) { return "its reason"; }
cudaError_t cudaStreamQuery(cudaStream_t) { return played.stream; }
const char* cudaGetErrorString(cudaError_t) { return "a CUDA error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;
using Words = std::vector<std::int64_t>;

class NcclErrors : public ::testing::Test {
 protected:
  NcclErrors() { played = {}; }
  static void exchange(cuda::NcclCommunicator& group) {
    Words words = {1, 2};
    group.all_reduce_sum(words, words, {});
  }
  ncclComm_t handle_ = reinterpret_cast<ncclComm_t>(&played);
};

TEST_F(NcclErrors, GroupThatTakesItsTimeIsUsable) {
  played.in_progress = 3;
  {
    cuda::NcclCommunicator group(cuda::nccl_unique_id(), 1, 2);
    EXPECT_EQ(group.rank(), 1);
    EXPECT_EQ(group.size(), 2);
    played.answer = ncclInProgress;  // connections are made in the first exchange
    played.in_progress = 3;
    const Words in = {5, -9};
    Words out(2);
    group.all_reduce_sum(in, out, {});
    EXPECT_EQ(out, (Words{6, -8}));
    group.wait({});
    played.in_progress = 3;
  }
  EXPECT_EQ(played.finalized, 1);
  EXPECT_EQ(played.destroyed, 1);
  EXPECT_EQ(played.aborted, 0);
}

TEST_F(NcclErrors, RankThatNeverComesEndsInATimeout) {
  played.in_progress = kForever;
  const std::string text = thrown_text<ExchangeTimeout>(
      [] { cuda::NcclCommunicator(cuda::nccl_unique_id(), 0, 2, milliseconds(30)); });
  EXPECT_TRUE(contains(text, "rank 0 of 2: ncclCommInitRankConfig"));
  EXPECT_TRUE(contains(text, "did not end within 30 ms"));
  EXPECT_EQ(played.aborted, 1);
  EXPECT_EQ(played.destroyed, 0);
}

TEST_F(NcclErrors, LostRankIsSeenByTheNextExchange) {
  cuda::NcclCommunicator group(cuda::nccl_unique_id(), 1, 2);
  played.noticed = ncclRemoteError;
  EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { exchange(group); }),
                       "rank 1 of 2: an exchange failed at "));
  EXPECT_EQ(played.aborted, 1);
  EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { exchange(group); }),
                       "rank 1 of 2: rank 1 left the group: rank 1 of 2: an exchange failed"));
  EXPECT_EQ(played.aborted, 1);
}

TEST_F(NcclErrors, WaitHasATimeLimitAndSeesLostRanks) {
  for (const ncclResult_t noticed : {ncclSuccess, ncclRemoteError}) {
    played = {};
    cuda::NcclCommunicator group(cuda::nccl_unique_id(), 0, 2, milliseconds(30));
    exchange(group);
    played.stream = cudaErrorNotReady;
    played.noticed = noticed;
    if (noticed == ncclSuccess) {
      EXPECT_TRUE(contains(thrown_text<ExchangeTimeout>([&] { group.wait({}); }),
                           "rank 0 of 2: the stream's work did not end within 30 ms"));
    } else {
      EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { group.wait({}); }), "its reason"));
    }
    EXPECT_EQ(played.aborted, 1) << "or the stream would hang";
  }
}

TEST_F(NcclErrors, FailedStreamIsNamed) {
  cuda::NcclCommunicator group(cuda::nccl_unique_id(), 0, 2);
  played.stream = cudaErrorIllegalAddress;
  EXPECT_TRUE(contains(thrown_text<Error>([&] { group.wait({}); }), "a CUDA error"));
  EXPECT_EQ(played.aborted, 1);
}

TEST_F(NcclErrors, FailedCallsNameCallFileAndLine) {
  cuda::NcclCommunicator group(cuda::nccl_unique_id(), 0, 2);
  played.answer = ncclSystemError;
  const std::string text = thrown_text<Error>([&] { exchange(group); });
  EXPECT_TRUE(contains(text, "rank 0 of 2: ncclAllReduce("));
  EXPECT_TRUE(contains(text, "src/comm/nccl.cpp:"));
  EXPECT_TRUE(contains(text, "an error (its reason)"));
  EXPECT_EQ(played.aborted, 1);
}

TEST_F(NcclErrors, CommunicatorOfTheCallerIsLeftAlone) {
  {
    cuda::NcclCommunicator group(handle_, milliseconds(30));
    EXPECT_EQ(group.rank(), 1);
    EXPECT_EQ(group.size(), 2);
    exchange(group);
    played.stream = cudaErrorNotReady;
    thrown_text<ExchangeTimeout>([&] { group.wait({}); });
    EXPECT_TRUE(contains(thrown_text<PeerLost>([&] { exchange(group); }), "left the group"));
  }
  EXPECT_EQ(played.aborted, 0);
  EXPECT_EQ(played.finalized, 0);
  EXPECT_EQ(played.destroyed, 0);
}

TEST_F(NcclErrors, GroupThatCannotBeFinishedIsAborted) {
  {
    cuda::NcclCommunicator group(cuda::nccl_unique_id(), 0, 2, milliseconds(30));
    played.in_progress = kForever;
  }
  EXPECT_EQ(played.destroyed, 0);
  EXPECT_EQ(played.aborted, 1);
}

TEST_F(NcclErrors, WrongArgumentsAreNamed) {
  Words three(3), two(2);
  const auto text = [&](auto body) {
    cuda::NcclCommunicator group(handle_);
    return thrown_text<InvalidArgument>([&] { body(group); });
  };
  EXPECT_TRUE(
      contains(text([&](cuda::NcclCommunicator& group) { group.all_reduce_sum(three, two, {}); }),
               "out: got 16 bytes, expected 24"));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>(
                           [] { cuda::NcclCommunicator{static_cast<ncclComm_t>(nullptr)}; }),
                       "communicator: got null, expected an ncclComm_t"));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([] { cuda::NcclCommunicator({}, 0, 2049); }),
                       "size: got 2049, expected 1 to 2048"));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([] { cuda::NcclCommunicator({}, 2, 2); }),
                       "rank: got 2, expected 0 to 1"));
}

}  // namespace
}  // namespace syncbn::testing
