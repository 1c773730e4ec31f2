// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "syncbn/communicator.hpp"
#include "syncbn/export.h"

/// Groups over MPI, from a library of their own, syncbn::mpi, which is built for one MPI
/// implementation. This header does not include <mpi.h>. Include <mpi.h> before it to pass an
/// MPI_Comm.
namespace syncbn {

/// A communicator's Fortran handle, for programs without <mpi.h>: MPI_Comm_c2f(comm) in C,
/// comm.py2f() in mpi4py. The type of MPI_Comm differs between implementations; the handle is an
/// int in all of them.
struct MpiHandle {
  int fortran;
};

/// One rank's end of a group whose ranks are those of an MPI communicator.
///
/// Ranks of one node exchange in shared memory, as in a SharedMemoryGroup. The first ranks of the
/// nodes exchange over MPI, as a FramedExchange. If the ranks of a node cannot share memory, every
/// rank exchanges over MPI in this way.
///
/// If lengths differ, every rank gets DivergenceError, and the group goes on. If a rank refuses an
/// argument, the others get PeerLost when that rank calls MPI again, and the group goes on. If a
/// rank does not come or has left, the error names it (ExchangeTimeout, PeerLost). The group is
/// then broken until reset: later calls throw PeerLost. If a call of MPI fails, Error has its text,
/// and the group is broken.
///
/// MPI must be initialized: with MPI_THREAD_FUNNELED beside a ThreadPool, with
/// MPI_THREAD_SERIALIZED if calls come from another thread than MPI_Init, and with
/// MPI_THREAD_MULTIPLE if other threads use MPI at the same time. Exchanges on a wrong thread, or
/// after MPI_Finalize, throw InvalidArgument, also in memory of one node.
class SYNCBN_API MpiCommunicator final : public Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// communicator: all its ranks (1 to 2048) make this call together. MPI waits for them without a
  /// limit.
  ///
  /// timeout: 1 ms to 2^36 ms (2 years). If a rank does not come, every rank throws
  /// ExchangeTimeout, which names the missing ranks. A missing rank that comes later gets
  /// ExchangeTimeout or PeerLost. A rank waits for the ranks of its node for `timeout`, and between
  /// nodes twice as long. Over MPI it then tells all ranks that it is there, and waits half as long
  /// again for their answers.
  ///
  /// node: the ranks of `communicator` that share memory with this rank, including itself. The
  /// default is MPI's MPI_COMM_TYPE_SHARED. MPI_COMM_SELF on all ranks means no shared memory.
  ///
  /// Throws InvalidArgument for other values, for MPI_COMM_NULL, for an intercommunicator, on a
  /// wrong thread, and if MPI is not initialized or already finalized.
  explicit MpiCommunicator(MpiHandle communicator,
                           std::chrono::milliseconds timeout = kDefaultTimeout,
                           std::optional<MpiHandle> node = std::nullopt);
#if defined(MPI_VERSION)  // of <mpi.h>
  explicit MpiCommunicator(MPI_Comm communicator,
                           std::chrono::milliseconds timeout = kDefaultTimeout)
      : MpiCommunicator(handle_of(communicator), timeout) {}
  MpiCommunicator(MPI_Comm communicator, std::chrono::milliseconds timeout, MPI_Comm node)
      : MpiCommunicator(handle_of(communicator), timeout, handle_of(node)) {}
#endif

  /// All ranks destroy the group together, before MPI_Finalize, because this calls MPI_Comm_free.
  /// It leaves the communicator of a broken group to MPI. If an exception ends the group's scope,
  /// it abandons the group and does not wait.
  ~MpiCommunicator() override;

  int rank() const override;
  int size() const override;
  void all_reduce_sum(std::span<std::int64_t> words) override;
  /// Returns null unless all ranks are on one node.
  SumInParts* parts() override;
  void abandon(const std::string& reason) override;
  void refuse(const std::string& reason) override;

  /// Repairs a broken group, from the communicators that it was made of, which must still exist.
  /// All ranks call this. MPI waits for them without a limit. The layers of the group begin at call
  /// 0.
  void reset();

 private:
  /// Throws InvalidArgument unless this is between MPI_Init and MPI_Finalize.
  static void require_running();
#if defined(MPI_VERSION)
  static MpiHandle handle_of(MPI_Comm communicator) {
    require_running();  // MPI_Comm_c2f would end the job
    return {MPI_Comm_c2f(communicator)};
  }
#endif

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace syncbn
