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
#include "syncbn/export.hpp"

/// Groups over MPI: a library of its own, syncbn::mpi, built for one MPI implementation. This
/// header includes none of MPI; where <mpi.h> comes before it, it takes an MPI_Comm.
namespace syncbn {

/// A communicator for programs without <mpi.h>: MPI_Comm_c2f(comm) in C, comm.py2f() in mpi4py. The
/// type of an MPI_Comm differs between implementations, that of this number does not.
struct MpiHandle {
  int fortran;
};

/// One rank's end of a group whose ranks are those of an MPI communicator.
///
/// Ranks of one node exchange in shared memory, as in a SharedMemoryGroup. Between nodes the first
/// rank of each exchanges over MPI: it tells rank 0 what its node brings, and rank 0 answers; only
/// when all are there with the same call does MPI's collective begin. More than 17 such ranks do so
/// as a tree, in which no rank hears of more than 16 others. If the ranks of a node cannot share
/// memory, every rank exchanges over MPI in this way.
///
/// So lengths may differ (DivergenceError on every rank; the group can be used further), a rank may
/// leave, and a rank that does not come has a name. A rank that refuses an argument is a PeerLost
/// on the others, after which the group can be used further. After ExchangeTimeout and any other
/// PeerLost it is broken until reset: later calls throw PeerLost. A failed call of MPI throws Error
/// with its text and breaks the group.
///
/// MPI must be initialized, with MPI_THREAD_SERIALIZED if calls come from another thread than the
/// one that initialized it, and MPI_THREAD_MULTIPLE if other threads use MPI meanwhile; exchanges
/// on a wrong thread throw InvalidArgument.
class SYNCBN_API MpiCommunicator final : public Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// communicator: all its ranks (1 to 2048) make this call at the same time; there MPI waits
  /// without a limit. timeout: at least 1 ms; how long a rank waits for the others of its node
  /// before ExchangeTimeout on every rank, which names the ranks that did not come. When these
  /// come, they get it too, over MPI, or PeerLost. Between nodes, rank 0 waits twice the time limit
  /// for the other ranks, and they wait four times the limit for rank 0. If no ranks share memory,
  /// both waits are half as long. If the ranks form a tree with L levels below rank 0, multiply
  /// both by L. node: those ranks of `communicator` that share memory
  /// with this one, itself among them; by default MPI's MPI_COMM_TYPE_SHARED, and MPI_COMM_SELF on
  /// all ranks for no shared memory. Other values, an intercommunicator, or MPI that is not
  /// initialized or finalized already: InvalidArgument.
  explicit MpiCommunicator(MpiHandle communicator,
                           std::chrono::milliseconds timeout = kDefaultTimeout,
                           std::optional<MpiHandle> node = std::nullopt);
#if defined(MPI_VERSION)  // of <mpi.h>
  explicit MpiCommunicator(MPI_Comm communicator,
                           std::chrono::milliseconds timeout = kDefaultTimeout)
      : MpiCommunicator(MpiHandle{MPI_Comm_c2f(communicator)}, timeout) {}
  MpiCommunicator(MPI_Comm communicator, std::chrono::milliseconds timeout, MPI_Comm node)
      : MpiCommunicator(MpiHandle{MPI_Comm_c2f(communicator)}, timeout,
                        MpiHandle{MPI_Comm_c2f(node)}) {}
#endif

  /// Of all ranks and before MPI_Finalize (MPI_Comm_free). The duplicate of a broken group is left
  /// to MPI. While an exception ends the scope it abandons the group and waits for nobody.
  ~MpiCommunicator() override;

  int rank() const override;
  int size() const override;
  void all_reduce_sum(std::span<std::int64_t> words) override;
  /// In parts where all ranks are on one node.
  SumInParts* parts() override;
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override;
  void abandon(const std::string& reason) override;
  void refuse(const std::string& reason) override;

  /// Makes a broken group a new one, from the communicators that it was made of, which are still
  /// there. All its ranks call this; MPI waits for them without a limit. The layers of the group
  /// begin at call 0.
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace syncbn
