// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "syncbn/cuda_communicator.hpp"
#include "syncbn/export.hpp"

// As in nccl.h, which this header does not need.
typedef struct ncclComm* ncclComm_t;

/// Groups over NCCL: a library of its own, syncbn::nccl.
namespace syncbn::cuda {

using NcclUniqueId = std::array<std::byte, 128>;

/// What all ranks of a new group must be given: made by one of them (ncclGetUniqueId).
SYNCBN_API NcclUniqueId nccl_unique_id();

/// Exchanges are NCCL collectives on the caller's stream: the host does not wait for the device.
/// NCCL defines nothing for ranks that bring different lengths or another order of calls: such an
/// exchange usually does not end (see wait).
///
/// A failed call of NCCL throws, with the call, its file and line: PeerLost for ncclRemoteError,
/// InvalidArgument for ncclInvalidArgument and ncclInvalidUsage, else Error. Each exchange first
/// asks for errors that came since the last one (ncclCommGetAsyncError).
class SYNCBN_API NcclCommunicator final : public Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// Uses `communicator`, which stays the caller's and must outlive this object: neither aborted
  /// nor destroyed here. Null: InvalidArgument. If it blocks its callers (NCCL's default),
  /// exchanges after the first can be captured in a CUDA graph.
  explicit NcclCommunicator(ncclComm_t communicator,
                            std::chrono::milliseconds timeout = kDefaultTimeout);

  /// Makes rank `rank` of a group of `size` ranks (1 to 2048) on the current device, with all other
  /// ranks: ExchangeTimeout if one does not come in time. So that waiting can end, the group does
  /// not block its callers (config.blocking = 0), for which NCCL starts a thread per exchange. NCCL
  /// allows two ranks on one device only to processes with different NCCL_HOSTID.
  NcclCommunicator(const NcclUniqueId& id, int rank, int size,
                   std::chrono::milliseconds timeout = kDefaultTimeout);

  /// Of a group made here: waits for enqueued exchanges, at most `timeout`. While an exception ends
  /// the scope it abandons the group instead.
  ~NcclCommunicator() override;

  int rank() const override;
  int size() const override;
  void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                      const Stream& stream) override;
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out,
                  const Stream& stream) override;

  /// Aborts a group made here, of which this rank can then make no more use. The other ranks learn
  /// of it through wait: PeerLost where NCCL notices (it does over a network), else
  /// ExchangeTimeout. A communicator of the caller is left alone; only later calls here throw
  /// PeerLost.
  void abandon(const std::string& reason) override;

  /// Waits until the stream has done all its work, and looks for errors meanwhile. Throws
  /// ExchangeTimeout if that takes longer than `timeout`, or what NCCL reports; both abort a group
  /// made here, which ends what waits on the stream. cudaStreamSynchronize would wait for ever.
  void wait(const Stream& stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace syncbn::cuda
