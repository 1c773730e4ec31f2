// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "syncbn/communicator.hpp"
#include "syncbn/export.hpp"

/// Exchanges between ranks whose messages lie on CUDA devices. Groups over NCCL: syncbn/nccl.hpp.
namespace syncbn::cuda {

struct Stream {
  void* handle = nullptr;  ///< a cudaStream_t
};

/// One rank's end of a group, as syncbn::Communicator, for messages in memory of the rank's device.
/// Exchanges take their turn on a stream of that device, which is the calling thread's current one.
class SYNCBN_API Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// out[i] becomes the sum over ranks of in[i], modulo 2^64. out.size() == in.size(), the same on
  /// every rank; in and out are the same memory or apart.
  virtual void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                              const Stream& stream) = 0;

  /// Concatenates every rank's bytes in rank order; out.size() == size() * in.size().
  virtual void all_gather(std::span<const std::byte> in, std::span<std::byte> out,
                          const Stream& stream) = 0;

  /// Tells the other ranks that this one cannot take part any more (its call failed).
  virtual void abandon(const std::string& reason) = 0;

  /// As syncbn::Communicator::refuse.
  virtual void refuse(const std::string& reason) { abandon(reason); }

 private:
  friend class syncbn::detail::GroupLink<Communicator>;
  syncbn::detail::GroupLife life_;
};

/// The group of one rank: enqueues at most a copy. There is one for all, which is always there.
/// Unavailable in a build without CUDA.
SYNCBN_API Communicator& self_communicator();

/// Exchanges through the host: waits for the stream, copies the message out, exchanges it over
/// `host`, copies the result in. So ranks of a ThreadGroup or SharedMemoryGroup may have a device
/// each or share one, but the stream cannot be captured in a CUDA graph. Errors are those of
/// `host`, which must outlive the result. Unavailable in a build without CUDA.
SYNCBN_API std::unique_ptr<Communicator> staged_communicator(syncbn::Communicator& host);

/// Waits for the stream; the count over all ranks that a forward left in `info` (kInfoWords words
/// of syncbn/step.hpp, on the device). Throws DivergenceError when the ranks' calls did not match.
SYNCBN_API std::int64_t read_count(const std::int64_t* info, const Stream& stream);

}  // namespace syncbn::cuda
