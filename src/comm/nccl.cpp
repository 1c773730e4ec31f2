// SPDX-License-Identifier: Apache-2.0
#include "syncbn/nccl.hpp"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>

#include "comm/pause.hpp"
#include "comm/rank_texts.hpp"
#include "cuda/check.hpp"
#include "syncbn/error.hpp"
#include "syncbn/options.hpp"
#include "tensors/checks.hpp"

namespace syncbn::cuda {
namespace {

using Clock = std::chrono::steady_clock;

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(long long) == sizeof(std::int64_t));

[[noreturn]] void fail(ncclResult_t result, const std::string& who, const char* call,
                       const char* file, int line) {
  const char* detail = ncclGetLastError(nullptr);
  std::string text = who + call + " failed at " + file + ":" + std::to_string(line) + ": " +
                     ncclGetErrorString(result);
  if (detail != nullptr && *detail != '\0') {
    text += std::string(" (") + detail + ")";
  }
  switch (result) {
    case ncclRemoteError:
      throw PeerLost(text);
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      throw InvalidArgument(text);
    default:
      throw Error(text);
  }
}

void check(ncclResult_t result, const std::string& who, const char* call, const char* file,
           int line) {
  if (result != ncclSuccess) {
    fail(result, who, call, file, line);
  }
}

#define SYNCBN_NCCL_CHECK(who, call) check((call), (who), #call, __FILE__, __LINE__)

}  // namespace

NcclUniqueId nccl_unique_id() {
  ncclUniqueId id;
  SYNCBN_NCCL_CHECK("", ncclGetUniqueId(&id));
  NcclUniqueId bytes;
  std::memcpy(bytes.data(), &id, sizeof(id));
  return bytes;
}

struct __attribute__((visibility("hidden"))) NcclCommunicator::State {
  ncclComm_t handle = nullptr;
  bool owned = false;
  std::chrono::milliseconds timeout = kDefaultTimeout;
  int rank = 0;
  int size = 0;
  std::optional<std::string> left;  ///< why this rank has left the group
  const int exceptions = std::uncaught_exceptions();

  std::string who() const { return rank_of(rank, static_cast<std::size_t>(size)); }

  /// Ends what waits on the device, if the group is ours to end; no exchange is possible any more.
  void leave(const std::string& reason) {
    if (left.has_value()) {
      return;
    }
    left = reason;
    if (owned && handle != nullptr) {
      ncclCommAbort(handle);  // nothing can be done about an error of this
      handle = nullptr;
    }
  }

  /// Runs body; a group in which something failed is left, so that no rank waits for this one.
  template <class Body>
  void or_leave(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      leave(error.what());
      throw;
    }
  }

  [[noreturn]] void late(const char* what) {
    throw ExchangeTimeout(who() + what + " did not end within " + std::to_string(timeout.count()) +
                          " ms; NCCL does not tell which rank is missing");
  }

  /// A group made here does not block its callers: what a call began goes on afterwards.
  void settle(ncclResult_t result, const char* call, int line) {
    const auto start = Clock::now();
    while (result == ncclInProgress) {
      check(ncclCommGetAsyncError(handle, &result), who(), call, __FILE__, line);
      if (result == ncclInProgress) {
        if (Clock::now() - start > timeout) {
          late(call);
        }
        pause(start);
      }
    }
    check(result, who(), call, __FILE__, line);
  }

  /// Throws if this rank has left or NCCL has noticed an error since the last exchange.
  void look() {
    if (left.has_value()) {
      throw PeerLost(who() + left_text(rank, *left), {rank});
    }
    ncclResult_t result = ncclSuccess;
    SYNCBN_NCCL_CHECK(who(), ncclCommGetAsyncError(handle, &result));
    if (result != ncclInProgress) {
      check(result, who(), "an exchange", __FILE__, __LINE__);
    }
  }
};

#define SYNCBN_NCCL_SETTLE(call) state_->settle((call), #call, __LINE__)

NcclCommunicator::NcclCommunicator(ncclComm_t communicator, std::chrono::milliseconds timeout)
    : state_(std::make_unique<State>()) {
  if (communicator == nullptr) {
    throw InvalidArgument("communicator: got null, expected an ncclComm_t");
  }
  check_timeout(timeout);
  state_->handle = communicator;
  state_->timeout = timeout;
  SYNCBN_NCCL_CHECK("", ncclCommUserRank(communicator, &state_->rank));
  SYNCBN_NCCL_CHECK("", ncclCommCount(communicator, &state_->size));
}

NcclCommunicator::NcclCommunicator(const NcclUniqueId& id, int rank, int size,
                                   std::chrono::milliseconds timeout)
    : state_(std::make_unique<State>()) {
  if (size < 1 || size > kMaxRanks) {
    throw InvalidArgument("size: got " + std::to_string(size) + ", expected 1 to " +
                          std::to_string(kMaxRanks));
  }
  if (rank < 0 || rank >= size) {
    throw InvalidArgument("rank: got " + std::to_string(rank) + ", expected 0 to " +
                          std::to_string(size - 1));
  }
  check_timeout(timeout);
  state_->owned = true;
  state_->rank = rank;
  state_->size = size;
  state_->timeout = timeout;
  ncclUniqueId of_nccl;
  std::memcpy(&of_nccl, id.data(), sizeof(of_nccl));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // or a missing rank would be waited for without end
  state_->or_leave([&] {
    SYNCBN_NCCL_SETTLE(ncclCommInitRankConfig(&state_->handle, size, of_nccl, rank, &config));
  });
}

NcclCommunicator::~NcclCommunicator() {
  if (std::uncaught_exceptions() > state_->exceptions) {  // the others wait for this rank
    state_->leave("an exception ended the scope of its end of the group");
  }
  if (!state_->owned || state_->handle == nullptr) {
    return;
  }
  try {
    SYNCBN_NCCL_SETTLE(ncclCommFinalize(state_->handle));
    ncclCommDestroy(state_->handle);
  } catch (const std::exception& error) {
    state_->leave(error.what());
  }
}

int NcclCommunicator::rank() const { return state_->rank; }
int NcclCommunicator::size() const { return state_->size; }

void NcclCommunicator::all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                                      const Stream& stream) {
  state_->or_leave([&] {
    if (out.size() != in.size()) {
      throw InvalidArgument(size_text(out.size_bytes(), in.size_bytes()));
    }
    state_->look();
    SYNCBN_NCCL_SETTLE(ncclAllReduce(in.data(), out.data(), in.size(), ncclInt64, ncclSum,
                                     state_->handle, static_cast<cudaStream_t>(stream.handle)));
  });
}

void NcclCommunicator::abandon(const std::string& reason) { state_->leave(reason); }

void NcclCommunicator::wait(const Stream& stream) {
  state_->or_leave([&] {
    const auto start = Clock::now();
    for (;;) {
      const cudaError_t done = cudaStreamQuery(static_cast<cudaStream_t>(stream.handle));
      if (done == cudaSuccess) {
        return;
      }
      if (done != cudaErrorNotReady) {
        check_call(done, "the stream's work", __FILE__, __LINE__);
      }
      state_->look();
      if (Clock::now() - start > state_->timeout) {
        state_->late("the stream's work");
      }
      pause(start);
    }
  });
}

}  // namespace syncbn::cuda
