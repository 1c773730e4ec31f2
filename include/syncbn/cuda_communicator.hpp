// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "syncbn/communicator.hpp"
#include "syncbn/export.h"

/// Exchanges between ranks whose messages are on CUDA devices. syncbn/nccl.hpp has groups over
/// NCCL.
namespace syncbn::cuda {

struct Stream {
  void* handle = nullptr;  ///< a cudaStream_t
};

/// One rank's end of a group, like syncbn::Communicator, for messages in memory of the rank's
/// device. Exchanges are ordered with the other work on a stream of this device. The device must be
/// the calling thread's current device.
class SYNCBN_API Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// Sets out[i] to the sum of in[i] over all ranks, modulo 2^64. in.size() and out.size() are
  /// equal, and the same on every rank. `in` and `out` are the same memory or do not overlap.
  virtual void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                              const Stream& stream) = 0;

  /// Tells the other ranks that this rank cannot take part any more, because its call failed.
  virtual void abandon(const std::string& reason) = 0;

  /// Does the same as syncbn::Communicator::refuse.
  virtual void refuse(const std::string& reason) { abandon(reason); }

 private:
  friend class syncbn::detail::GroupLink<Communicator>;
  syncbn::detail::GroupLife life_;
};

/// Returns the group of one rank, in which an exchange enqueues at most a copy. All callers share
/// it, and it lasts as long as the process. Throws Unavailable in a build without CUDA.
SYNCBN_API Communicator& self_communicator();

/// Makes a communicator that exchanges through the host. An exchange waits for the stream, copies
/// the message to the host, exchanges it over `host`, and copies the result to the device. So ranks
/// of a ThreadGroup or SharedMemoryGroup may have a device each or share one, but a CUDA graph
/// cannot capture the stream. Exchanges have the errors of `host`, which must outlive the result.
/// Throws Unavailable in a build without CUDA.
SYNCBN_API std::unique_ptr<Communicator> staged_communicator(syncbn::Communicator& host);

/// Waits for the stream and returns the number of elements per channel over all ranks. A forward
/// left it in `info`, which has kInfoWords words (syncbn/step.hpp) on the device. Throws
/// DivergenceError if the ranks' calls did not match, or have more than 2^36 elements per channel.
SYNCBN_API std::int64_t read_count(const std::int64_t* info, const Stream& stream);

}  // namespace syncbn::cuda
