// SPDX-License-Identifier: Apache-2.0
#include "syncbn/mpi.hpp"

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "comm/mpi_messages.hpp"
#include "comm/pause.hpp"
#include "comm/rank_set.hpp"
#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"
#include "syncbn/options.hpp"

namespace syncbn {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string mpi_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  return MPI_Error_string(code, text.data(), &length) == MPI_SUCCESS
             ? std::string(text.data(), static_cast<std::size_t>(length))
             : "error " + std::to_string(code);
}

void check(int code, const std::string& who, const char* call, int line) {
  if (code != MPI_SUCCESS) {
    throw Error(who + call + " failed at " + __FILE__ + ":" + std::to_string(line) + ": " +
                mpi_text(code));
  }
}

#define SYNCBN_MPI_CHECK(who, call) check((call), (who), #call, __LINE__)

void require_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) {
    throw InvalidArgument(
        "communicator: got one while MPI is not running, expected one between MPI_Init and "
        "MPI_Finalize");
  }
}

}  // namespace

struct __attribute__((visibility("hidden"))) MpiCommunicator::State {
  MPI_Comm given = MPI_COMM_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  milliseconds timeout = kDefaultTimeout;
  int rank = 0;
  int size = 0;
  Clock::time_point decided = Clock::now();  ///< when rank 0 last let the ranks go
  std::optional<std::string> broken;         ///< why there are no further exchanges
  bool refused = false;  ///< the last exchange, whose other half is still to come
  std::vector<std::pair<int, Arrival>> early;  ///< at rank 0, of ranks that are one exchange ahead
  const int exceptions = std::uncaught_exceptions();

  // Memory that MPI may still read or write when an exchange has failed, and then stays allocated.
  Arrival arrival{};
  Arrival farewell{};
  Arrival refusal{};
  Verdict verdict{};
  Verdict question{};  ///< kAsk
  Verdict no{};        ///< of a rank 0 that refuses
  std::vector<MPI_Request> sent;
  std::vector<std::uint64_t> words;
  std::vector<std::byte> mine;
  std::vector<std::byte> all;

  std::string who() const { return rank_of(rank, static_cast<std::size_t>(size)); }

  /// Runs an exchange; an error of this rank that the others do not see makes it leave the group.
  template <class Body>
  void or_leave(const Body& body) {
    if (broken.has_value()) {
      throw PeerLost(who() + "the group is broken: " + *broken);
    }
    if (!right_thread()) {
      throw InvalidArgument(who() +
                            "thread: got one that did not initialize MPI, expected the one that "
                            "did, or MPI_THREAD_SERIALIZED");
    }
    try {
      settle();
      body();
    } catch (const DivergenceError&) {
      throw;
    } catch (const PeerLost&) {  // one that refused comes again, and otherwise it is broken
      throw;
    } catch (const InvalidArgument& error) {
      refuse(error.what());
      throw;
    } catch (const std::exception& error) {
      leave(error.what());
      throw;
    }
  }

  /// Whether MPI allows this thread to call it.
  static bool right_thread() {
    int level = MPI_THREAD_SINGLE;
    int is_main = 0;
    MPI_Query_thread(&level);
    MPI_Is_thread_main(&is_main);
    return level >= MPI_THREAD_SERIALIZED || is_main != 0;
  }

  void send(const void* data, std::size_t bytes, int to, int tag) {
    sent.emplace_back();
    SYNCBN_MPI_CHECK(
        who(), MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, comm, &sent.back()));
  }

  /// After an answer: the other side has these messages, so this does not wait for a rank.
  void forget_sent() {
    SYNCBN_MPI_CHECK(who(),
                     MPI_Waitall(static_cast<int>(sent.size()), sent.data(), MPI_STATUSES_IGNORE));
    sent.clear();
  }

  /// The next message of this kind, if there is one; its sender.
  template <class Message>
  std::optional<int> receive(int from, int tag, Message& message) {
    int there = 0;
    MPI_Status status;
    SYNCBN_MPI_CHECK(who(), MPI_Iprobe(from, tag, comm, &there, &status));
    if (there == 0) {
      return std::nullopt;
    }
    SYNCBN_MPI_CHECK(who(), MPI_Recv(&message, sizeof(message), MPI_BYTE, status.MPI_SOURCE, tag,
                                     comm, MPI_STATUS_IGNORE));
    return status.MPI_SOURCE;
  }

  void answer(Answer what, const std::string& text, const std::vector<int>& about = {}) {
    verdict.answer = what;
    verdict.about = RankSet::of(about);
    copy_text(verdict.text, text);
    tell(verdict);
  }

  void tell(const Verdict& what) {
    for (int r = 1; r < size; ++r) {
      send(&what, sizeof(what), r, kVerdictTag);
    }
  }

  /// Rank 0: waits for a message of every rank; false if it answered why they do not come.
  bool collect(std::vector<Arrival>& arrivals) {
    arrivals.assign(static_cast<std::size_t>(size), Arrival{});  // kMissing
    arrivals[0] = arrival;
    int missing = size - 1;
    for (const auto& [from, other] : std::exchange(early, {})) {
      arrivals[static_cast<std::size_t>(from)] = other;
      --missing;
    }
    const auto start = Clock::now();
    while (missing > 0) {
      Arrival other;
      if (const auto from = receive(MPI_ANY_SOURCE, kArrivalTag, other); from.has_value()) {
        Arrival& its = arrivals[static_cast<std::size_t>(*from)];
        if (other.kind == Kind::kLeft) {
          answer(Answer::kLost, left_text(*from, other.reason.data()), {*from});
          return false;
        }
        if (its.kind != Kind::kMissing) {
          early.emplace_back(*from, other);
          continue;
        }
        its = other;
        --missing;
      } else if (Clock::now() - start > timeout) {
        std::vector<int> late;
        for (int r = 1; r < size; ++r) {
          if (arrivals[static_cast<std::size_t>(r)].kind == Kind::kMissing) {
            late.push_back(r);
          }
        }
        answer(Answer::kTimeout, missing_text(late, timeout), late);
        return false;
      } else {
        pause(start);
      }
    }
    return true;
  }

  /// Rank 0: whether ranks that came refuse the exchange, which all then learn.
  bool answer_refusals(const std::vector<Arrival>& arrivals) {
    std::string text;
    std::vector<int> ranks;
    for (int r = 1; r < size; ++r) {
      const Arrival& other = arrivals[static_cast<std::size_t>(r)];
      if (other.kind == Kind::kRefused) {
        ranks.push_back(r);
        text += (text.empty() ? "" : "; ") + left_text(r, other.reason.data());
      }
    }
    if (!ranks.empty()) {
      decided = Clock::now();
      answer(Answer::kRefused, text, ranks);
    }
    return !ranks.empty();
  }

  /// Rank 0: waits for all ranks, and answers all of them.
  void decide() {
    const bool late = Clock::now() - decided > timeout;
    std::vector<Arrival> arrivals;
    if (!collect(arrivals)) {
      return;
    }
    if (answer_refusals(arrivals)) {
      return;
    }
    if (late) {  // they may have come and gone: those that wait come again
      question.answer = Answer::kAsk;
      tell(question);
      if (!collect(arrivals) || answer_refusals(arrivals)) {
        return;
      }
    }
    decided = Clock::now();
    std::vector<int> odd;
    for (int r = 1; r < size; ++r) {
      const Arrival& other = arrivals[static_cast<std::size_t>(r)];
      if (other.kind != arrival.kind || other.bytes != arrival.bytes) {
        odd.push_back(r);
      }
    }
    if (!odd.empty()) {
      const Arrival& other = arrivals[static_cast<std::size_t>(odd.front())];
      return answer(
          Answer::kDivergence,
          divergence_text(0, static_cast<std::size_t>(size),
                          static_cast<std::size_t>(arrival.bytes), odd.front(),
                          static_cast<std::size_t>(other.bytes), other.kind != arrival.kind),
          odd);
    }
    answer(Answer::kGo, "");
  }

  /// The other ranks: rank 0 that comes within `timeout` has answered after twice that.
  void await_answer(const Arrival& mine) {
    auto start = Clock::now();
    for (;;) {
      if (receive(0, kVerdictTag, verdict).has_value()) {
        if (verdict.answer != Answer::kAsk) {
          return;
        }
        send(&mine, sizeof(mine), 0, kArrivalTag);
        start = Clock::now();
      } else if (Clock::now() - start > 2 * timeout) {
        const std::string text = missing_text({0}, timeout);
        leave(text);
        throw ExchangeTimeout(who() + text, {0});
      } else {
        pause(start);
      }
    }
  }

  /// All ranks are at the same exchange of `bytes` bytes, or all throw.
  void meet(Kind kind, std::size_t bytes) {
    arrival.kind = kind;
    arrival.bytes = static_cast<std::int64_t>(bytes);
    if (rank == 0) {
      decide();
    } else {
      send(&arrival, sizeof(arrival), 0, kArrivalTag);
      await_answer(arrival);
    }
    heed();
  }

  /// What rank 0 answered.
  void heed() {
    const std::string text = verdict.text.data();
    switch (verdict.answer) {
      case Answer::kAsk:  // answered already
      case Answer::kGo:
        return forget_sent();
      case Answer::kDivergence:
        forget_sent();
        throw DivergenceError(text, verdict.about.list());
      case Answer::kRefused:
        forget_sent();
        throw PeerLost(who() + text, verdict.about.list());
      case Answer::kTimeout:
        broken = text;
        throw ExchangeTimeout(who() + text, verdict.about.list());
      case Answer::kLost:
        broken = text;
        throw PeerLost(who() + text, verdict.about.list());
    }
  }

  /// Tells the others, as rank 0 or through it, that this rank is not in the exchange to come.
  void refuse(const std::string& reason) {
    if (broken.has_value() || !right_thread()) {
      return;
    }
    try {
      settle();
      if (rank == 0) {
        decided = Clock::now();
        no.answer = Answer::kRefused;
        no.about = RankSet::of({0});
        copy_text(no.text, left_text(0, reason));
        tell(no);
      } else {
        refusal.kind = Kind::kRefused;
        copy_text(refusal.reason, reason);
        send(&refusal, sizeof(refusal), 0, kArrivalTag);
      }
      refused = true;
    } catch (const Error& error) {
      leave(error.what());
    }
  }

  /// The other half of an exchange that this rank refused.
  void settle() {
    if (!std::exchange(refused, false)) {
      return;
    }
    if (rank > 0) {
      await_answer(refusal);
    } else if (std::vector<Arrival> arrivals; collect(arrivals)) {
      return forget_sent();
    }
    if (verdict.answer == Answer::kTimeout || verdict.answer == Answer::kLost) {
      heed();
    }
    forget_sent();
  }

  /// Tells the others, as rank 0 or through it, and does not wait for them.
  void leave(const std::string& reason) {
    if (broken.has_value()) {
      return;
    }
    broken = left_text(rank, reason);
    if (!right_thread()) {
      return;
    }
    try {
      if (rank == 0) {
        answer(Answer::kLost, *broken, {0});
      } else {
        farewell.kind = Kind::kLeft;
        farewell.reason = refusal.reason;  // of one that nobody may have heard of yet
        if (!refused) {
          copy_text(farewell.reason, reason);
        }
        send(&farewell, sizeof(farewell), 0, kArrivalTag);
      }
    } catch (const Error& error) {  // of MPI; the others come to their time limit
      broken = *broken + "; the other ranks were not told: " + error.what();
    }
  }

  void finish(MPI_Request& request) {
    const auto start = Clock::now();
    for (int done = 0;;) {
      SYNCBN_MPI_CHECK(who(), MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      if (done != 0) {
        return;
      }
      if (Clock::now() - start > timeout) {
        throw ExchangeTimeout(who() + "the exchange began with all ranks and did not end within " +
                              std::to_string(timeout.count()) +
                              " ms; MPI does not tell which rank is missing");
      }
      pause(start);
    }
  }

  /// MPI counts in int.
  static int count_of(std::size_t count, const char* what) {
    if (count > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
      throw InvalidArgument(std::string(what) + ": got " + std::to_string(count) +
                            ", expected at most 2^31 - 1");
    }
    return static_cast<int>(count);
  }
};

MpiCommunicator::MpiCommunicator(MpiHandle communicator, milliseconds timeout)
    : state_(std::make_unique<State>()) {
  require_running();
  if (timeout < milliseconds(1)) {
    throw InvalidArgument("timeout: got " + std::to_string(timeout.count()) +
                          " ms, expected at least 1 ms");
  }
  const MPI_Comm given = MPI_Comm_f2c(communicator.fortran);
  if (given == MPI_COMM_NULL) {
    throw InvalidArgument("communicator: got MPI_COMM_NULL, expected an intracommunicator");
  }
  int inter = 0;
  SYNCBN_MPI_CHECK("", MPI_Comm_test_inter(given, &inter));
  if (inter != 0) {
    throw InvalidArgument("communicator: got an intercommunicator, expected an intracommunicator");
  }
  SYNCBN_MPI_CHECK("", MPI_Comm_rank(given, &state_->rank));
  SYNCBN_MPI_CHECK("", MPI_Comm_size(given, &state_->size));
  if (state_->size > kMaxRanks) {
    throw InvalidArgument("communicator: got " + std::to_string(state_->size) +
                          " ranks, expected 1 to " + std::to_string(kMaxRanks));
  }
  state_->timeout = timeout;
  state_->given = given;
  SYNCBN_MPI_CHECK("", MPI_Comm_dup(given, &state_->comm));
  SYNCBN_MPI_CHECK("", MPI_Comm_set_errhandler(state_->comm, MPI_ERRORS_RETURN));
}

MpiCommunicator::~MpiCommunicator() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) {
    return;
  }
  if (std::uncaught_exceptions() > state_->exceptions) {
    state_->leave("an exception ended the scope of its end of the group");
  }
  if (state_->broken.has_value()) {
    [[maybe_unused]] const State* kept = state_.release();  // MPI may still use its memory
  } else if (MPI_Waitall(static_cast<int>(state_->sent.size()), state_->sent.data(),
                         MPI_STATUSES_IGNORE) == MPI_SUCCESS) {
    MPI_Comm_free(&state_->comm);
  }
}

int MpiCommunicator::rank() const { return state_->rank; }
int MpiCommunicator::size() const { return state_->size; }

void MpiCommunicator::all_reduce_sum(std::span<std::int64_t> words) {
  State& s = *state_;
  s.or_leave([&] {
    const int count = State::count_of(words.size(), "words");
    s.meet(Kind::kSum, words.size_bytes());
    // Not in the caller's memory, which may be gone when MPI writes after a timeout.
    s.words.assign(words.begin(), words.end());
    MPI_Request request = MPI_REQUEST_NULL;
    SYNCBN_MPI_CHECK(s.who(), MPI_Iallreduce(MPI_IN_PLACE, s.words.data(), count, MPI_UINT64_T,
                                             MPI_SUM, s.comm, &request));
    s.finish(request);
    std::copy(s.words.begin(), s.words.end(), words.begin());
  });
}

void MpiCommunicator::all_gather(std::span<const std::byte> in, std::span<std::byte> out) {
  State& s = *state_;
  s.or_leave([&] {
    const int count = State::count_of(in.size(), "in");
    const std::size_t expected = in.size() * static_cast<std::size_t>(s.size);
    if (out.size() != expected) {
      throw InvalidArgument(gather_size_text(out.size(), expected));
    }
    s.meet(Kind::kGather, in.size());
    s.mine.assign(in.begin(), in.end());
    s.all.resize(out.size());
    MPI_Request request = MPI_REQUEST_NULL;
    SYNCBN_MPI_CHECK(s.who(), MPI_Iallgather(s.mine.data(), count, MPI_BYTE, s.all.data(), count,
                                             MPI_BYTE, s.comm, &request));
    s.finish(request);
    std::copy(s.all.begin(), s.all.end(), out.begin());
  });
}

void MpiCommunicator::abandon(const std::string& reason) { state_->leave(reason); }
void MpiCommunicator::refuse(const std::string& reason) { state_->refuse(reason); }

void MpiCommunicator::reset() {
  state_->leave("it makes the group anew");
  MpiCommunicator fresh(MpiHandle{MPI_Comm_c2f(state_->given)}, state_->timeout);
  state_.swap(fresh.state_);
  begin_again();
}

}  // namespace syncbn
