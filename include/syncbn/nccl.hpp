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
#include "syncbn/export.h"

// The same declaration as in nccl.h, which this header does not need.
typedef struct ncclComm* ncclComm_t;

/// Groups over NCCL, from a library of their own, syncbn::nccl.
namespace syncbn::cuda {

using NcclUniqueId = std::array<std::byte, 128>;

/// Makes the id of a new group (ncclGetUniqueId). One rank calls this, and gives the id to all
/// ranks.
SYNCBN_API NcclUniqueId nccl_unique_id();

/// One rank's end of a group over NCCL. Exchanges are NCCL collectives on the caller's stream; the
/// host does not wait for the device. NCCL does not define what happens if ranks bring different
/// lengths or make their calls in another order. Such an exchange usually does not end (see wait).
///
/// If a call of NCCL fails, the error's text names the call, its file and line. The error is
/// PeerLost for ncclRemoteError, InvalidArgument for ncclInvalidArgument and ncclInvalidUsage, and
/// otherwise Error. Each exchange first looks for errors since the last exchange
/// (ncclCommGetAsyncError).
class SYNCBN_API NcclCommunicator final : public Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// Uses a communicator of the caller, which must outlive this object. This object neither aborts
  /// nor destroys it. Throws InvalidArgument if it is null, or if `timeout` is not 1 ms to 2^40 ms.
  /// If the communicator blocks its callers (NCCL's default), a CUDA graph can capture all
  /// exchanges after the first.
  explicit NcclCommunicator(ncclComm_t communicator,
                            std::chrono::milliseconds timeout = kDefaultTimeout);

  /// Makes rank `rank` of a group of `size` ranks (1 to 2048) on the current device. timeout: as
  /// above. All ranks make this call together. Throws ExchangeTimeout if a rank does not come in
  /// time. The group does not block its callers (config.blocking = 0), so that waiting can end. For
  /// this NCCL starts a thread per exchange. NCCL allows two ranks on one device only if their
  /// processes have different values of NCCL_HOSTID.
  NcclCommunicator(const NcclUniqueId& id, int rank, int size,
                   std::chrono::milliseconds timeout = kDefaultTimeout);

  /// If this object made the group, waits at most `timeout` for enqueued exchanges. If an exception
  /// ends the scope, it abandons the group instead.
  ~NcclCommunicator() override;

  int rank() const override;
  int size() const override;
  void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                      const Stream& stream) override;

  /// Aborts the group if this object made it. Later exchanges of this object throw PeerLost. On the
  /// other ranks wait() throws PeerLost if NCCL notices the abort (it does over a network), and
  /// otherwise ExchangeTimeout. A communicator of the caller is not aborted.
  void abandon(const std::string& reason) override;

  /// Waits until the stream has done all its work, and meanwhile looks for errors of NCCL. Throws
  /// ExchangeTimeout if the wait takes longer than `timeout`, or the error that NCCL reports. Any
  /// error aborts a group that this object made, and this ends the waiting work on the stream.
  /// cudaStreamSynchronize would wait for ever.
  void wait(const Stream& stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace syncbn::cuda
