// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/mpi_exchange.hpp"
#include "comm/mpi_nodes.hpp"
#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"
#include "syncbn/mpi.hpp"
#include "syncbn/options.hpp"
#include "syncbn/shared_memory.hpp"
#include "tensors/checks.hpp"

namespace syncbn {
namespace {

using std::chrono::milliseconds;

constexpr const char* kNotRunning =
    "communicator: got one while MPI is not running, expected one between MPI_Init and "
    "MPI_Finalize";
constexpr const char* kWrongThread =
    "thread: got one that did not initialize MPI, expected the one that did, or "
    "MPI_THREAD_SERIALIZED";

/// Why this thread may not call MPI now, or null.
const char* no_mpi() {
  return !mpi_is_running() ? kNotRunning : !on_mpis_thread() ? kWrongThread : nullptr;
}

/// A communicator that MPI knows. MPI_Comm{} is what a program has that left it at zero.
MPI_Comm known(const char* name, MpiHandle handle) {
  const MPI_Comm comm = MPI_Comm_f2c(handle.fortran);
  if (comm == MPI_COMM_NULL || comm == MPI_Comm{}) {
    throw InvalidArgument(std::string(name) + ": got MPI_COMM_NULL, expected an intracommunicator");
  }
  return comm;
}

/// A communicator of MPI that is freed at the end.
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (comm != MPI_COMM_NULL) {
      MPI_Comm_free(&comm);
    }
  }
  MPI_Comm release() { return std::exchange(comm, MPI_COMM_NULL); }
  MPI_Comm comm = MPI_COMM_NULL;
};

int rank_in(MPI_Comm comm) {
  int rank = 0;
  SYNCBN_MPI_CHECK("", MPI_Comm_rank(comm, &rank));
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  SYNCBN_MPI_CHECK("", MPI_Comm_size(comm, &size));
  return size;
}

/// Each rank's value of `mine`, in rank order.
std::vector<int> gathered(int mine, MPI_Comm comm) {
  std::vector<int> all(static_cast<std::size_t>(size_of(comm)));
  SYNCBN_MPI_CHECK("", MPI_Allgather(&mine, 1, MPI_INT, all.data(), 1, MPI_INT, comm));
  return all;
}

/// The group of the ranks of a node, whose errors name the ranks of `all`; null without one.
std::unique_ptr<SharedMemoryGroup> group_of(MPI_Comm node, MPI_Comm all, milliseconds timeout) {
  const auto gather = [&](std::span<const std::byte> mine, std::span<std::byte> of_all) {
    const int bytes = static_cast<int>(mine.size());
    SYNCBN_MPI_CHECK(
        "", MPI_Allgather(mine.data(), bytes, MPI_BYTE, of_all.data(), bytes, MPI_BYTE, node));
  };
  auto opened = SharedMemoryGroup::create(rank_in(node), size_of(node), gather, timeout);
  const std::vector<int> numbers = gathered(rank_in(all), node);
  if (opened.group != nullptr) {
    opened.group->call_ranks(numbers, size_of(all));
  }
  return std::move(opened.group);
}

std::unique_ptr<Communicator> over_mpi(MPI_Comm all, milliseconds timeout) {
  std::vector<int> numbers(static_cast<std::size_t>(size_of(all)));
  std::iota(numbers.begin(), numbers.end(), 0);
  Owned own;
  SYNCBN_MPI_CHECK("", MPI_Comm_dup(all, &own.comm));
  const int size = size_of(all);
  return std::make_unique<MpiExchange>(own.release(), std::move(numbers), size, timeout);
}

/// The way of a group's exchanges: memory on one node, MPI where no ranks share memory, both
/// otherwise.
std::unique_ptr<Communicator> way(MPI_Comm all, MPI_Comm given_node, milliseconds timeout) {
  const int rank = rank_in(all);
  const std::vector<int> numbers = gathered(rank, given_node);
  const int first = *std::min_element(numbers.begin(), numbers.end());
  Owned on_node;  // in the order of `all`
  SYNCBN_MPI_CHECK("", MPI_Comm_split(all, first, rank, &on_node.comm));
  const MPI_Comm node = on_node.comm;
  int most = size_of(node);
  SYNCBN_MPI_CHECK("", MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_INT, MPI_MAX, all));
  if (most == 1) {
    return over_mpi(all, timeout);
  }
  std::unique_ptr<SharedMemoryGroup> memory = group_of(node, all, timeout);
  int there = memory != nullptr ? 1 : 0;
  SYNCBN_MPI_CHECK("", MPI_Allreduce(MPI_IN_PLACE, &there, 1, MPI_INT, MPI_MIN, all));
  if (there == 0) {
    return over_mpi(all, timeout);
  }
  if (most == size_of(all)) {
    return memory;
  }
  std::vector<int> firsts = gathered(first, all);
  std::sort(firsts.begin(), firsts.end());
  firsts.erase(std::unique(firsts.begin(), firsts.end()), firsts.end());
  Owned between;
  SYNCBN_MPI_CHECK("", MPI_Comm_split(all, first == rank ? 0 : MPI_UNDEFINED, rank, &between.comm));
  std::unique_ptr<MpiExchange> exchange;
  if (between.comm != MPI_COMM_NULL) {
    // A node tells the others after its own time limit, so they wait for twice as long.
    exchange = std::make_unique<MpiExchange>(between.release(), firsts, size_of(all), 2 * timeout);
  }
  return std::make_unique<MpiNodes>(std::move(memory), std::move(exchange), rank, size_of(all),
                                    timeout);
}

}  // namespace

struct __attribute__((visibility("hidden"))) MpiCommunicator::State {
  MPI_Comm given = MPI_COMM_NULL;
  std::optional<MPI_Comm> node;
  milliseconds timeout = kDefaultTimeout;
  const int exceptions = std::uncaught_exceptions();
  std::unique_ptr<Communicator> way;

  void make() {
    Owned found;
    if (!node.has_value()) {
      SYNCBN_MPI_CHECK("", MPI_Comm_split_type(given, MPI_COMM_TYPE_SHARED, rank_in(given),
                                               MPI_INFO_NULL, &found.comm));
    }
    way = syncbn::way(given, node.value_or(found.comm), timeout);
  }

  /// Before every exchange, also in memory, so that what passes on one node passes on several.
  void check_thread() const {
    if (const char* const why = no_mpi()) {
      way->refuse(why);  // in memory it reaches the others
      throw InvalidArgument(rank_of(way->rank(), static_cast<std::size_t>(way->size())) + why);
    }
  }

  /// The way's sum in parts, with the same check.
  class Parts final : public SumInParts {
   public:
    explicit Parts(State& state) : state_(state) {}
    void open(std::span<const std::int64_t> in, std::span<std::int64_t> out) override {
      state_.check_thread();
      state_.way->parts()->open(in, out);
    }
    void publish(std::size_t words) override { state_.way->parts()->publish(words); }
    bool wait(std::size_t words, milliseconds slice) override {
      return state_.way->parts()->wait(words, slice);
    }

   private:
    State& state_;
  };
  Parts parts{*this};
};

MpiCommunicator::MpiCommunicator(MpiHandle communicator, milliseconds timeout,
                                 std::optional<MpiHandle> node)
    : state_(std::make_unique<State>()) {
  if (const char* const why = no_mpi()) {
    throw InvalidArgument(why);
  }
  check_timeout(timeout, "timeout", 1, 36);  // up to 13 of them are waited for
  const MPI_Comm given = known("communicator", communicator);
  int inter = 0;
  SYNCBN_MPI_CHECK("", MPI_Comm_test_inter(given, &inter));
  if (inter != 0) {
    throw InvalidArgument("communicator: got an intercommunicator, expected an intracommunicator");
  }
  if (size_of(given) > kMaxRanks) {
    throw InvalidArgument("communicator: got " + std::to_string(size_of(given)) +
                          " ranks, expected 1 to " + std::to_string(kMaxRanks));
  }
  state_->timeout = timeout;
  state_->given = given;
  if (node.has_value()) {
    state_->node = known("node", *node);
  }
  state_->make();
}

MpiCommunicator::~MpiCommunicator() {
  if (std::uncaught_exceptions() > state_->exceptions) {
    state_->way->abandon("an exception ended the scope of its end of the group");
  }
}

int MpiCommunicator::rank() const { return state_->way->rank(); }
int MpiCommunicator::size() const { return state_->way->size(); }
SumInParts* MpiCommunicator::parts() {
  return state_->way->parts() == nullptr ? nullptr : &state_->parts;
}

void MpiCommunicator::require_running() {
  if (!mpi_is_running()) {
    throw InvalidArgument(kNotRunning);
  }
}

void MpiCommunicator::all_reduce_sum(std::span<std::int64_t> words) {
  state_->check_thread();
  state_->way->all_reduce_sum(words);
}

void MpiCommunicator::abandon(const std::string& reason) { state_->way->abandon(reason); }
void MpiCommunicator::refuse(const std::string& reason) { state_->way->refuse(reason); }

void MpiCommunicator::reset() {
  if (const char* const why = no_mpi()) {
    throw InvalidArgument(why);
  }
  abandon("it makes the group anew");
  state_->make();
  begin_again();
}

}  // namespace syncbn
