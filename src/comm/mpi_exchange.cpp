// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_exchange.hpp"

#include <atomic>
#include <limits>
#include <optional>
#include <utility>

#include "comm/pause.hpp"
#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

using detail::Failure;

constexpr int kTag = 1;

int rank_in(MPI_Comm comm) {
  int rank = 0;
  SYNCBN_MPI_CHECK("", MPI_Comm_rank(comm, &rank));
  return rank;
}

}  // namespace

MpiExchange::MpiExchange(MPI_Comm comm, std::vector<int> numbers, int group_size,
                         std::chrono::milliseconds timeout)
    : FramedExchange(rank_in(comm), static_cast<int>(numbers.size()), kMpiFrameWords),
      comm_(comm),
      timeout_(timeout),
      here_(numbers.size()) {
  call_ranks(std::move(numbers), group_size);
  SYNCBN_MPI_CHECK("", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  static std::atomic<std::int64_t> made = 0;
  group_ = ++made;
  SYNCBN_MPI_CHECK("", MPI_Allreduce(MPI_IN_PLACE, &group_, 1, MPI_INT64_T, MPI_MAX, comm_));
  made = group_;
}

MpiExchange::~MpiExchange() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  bool free = false;
  if (finalized == 0 && !is_broken()) {
    try {
      settle();
      forget_sent();
      free = !is_broken() && sent_->empty();
    } catch (const Error&) {
      free = false;
    }
  }
  if (free) {
    MPI_Comm_free(&comm_);
  } else {
    [[maybe_unused]] const auto* kept = sent_.release();
  }
}

void MpiExchange::all_reduce_sum(std::span<std::int64_t> words) {
  if (words.size() > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    const std::string reason =
        "words: got " + std::to_string(words.size()) + ", expected at most 2^31 - 1";
    refuse(reason);
    throw InvalidArgument(reason);
  }
  FramedExchange::all_reduce_sum(words);
}

void MpiExchange::refuse(const std::string& reason) {
  if (on_mpis_thread()) {
    FramedExchange::refuse(reason);
  }
}

void MpiExchange::fail(const Error& error, bool for_good) {
  Failure failure = Failure::of(error, who());
  if (for_good) {
    leave_with(failure);
    return;
  }
  if (failure.kind == Failure::Kind::kLost) {
    failure.kind = Failure::Kind::kRefused;
  }
  refuse_with(failure);
}

void MpiExchange::begin_sum(std::span<std::int64_t> words) {
  MPI_Request& request = sums_.emplace_back(MPI_REQUEST_NULL);
  SYNCBN_MPI_CHECK(who(), MPI_Iallreduce(MPI_IN_PLACE, words.data(), static_cast<int>(words.size()),
                                         MPI_UINT64_T, MPI_SUM, comm_, &request));
}

void MpiExchange::wait_for_sum() {
  const auto start = Clock::now();
  std::optional<Clock::time_point> said;
  ++waited_for_;
  for (int done = 0;;) {
    SYNCBN_MPI_CHECK(who(), MPI_Test(&sums_.front(), &done, MPI_STATUS_IGNORE));
    if (done != 0) {
      sums_.pop_front();
      return;
    }
    const bool called = hear();
    const auto now = Clock::now();
    if (!said.has_value() && (called || now - start > timeout_)) {
      said = now;
      tell({});
    }
    if (said.has_value() && now - *said > timeout_ / 2) {
      give_up();
    }
    pause(start);
  }
}

/// Reads what others have said. Throws the failure of one that has left, unless it left after the
/// sum that this rank is in, which then comes to its end. Else returns whether one waits in vain
/// for this sum.
bool MpiExchange::hear() {
  for (;;) {
    if (left_.has_value() &&
        (waited_for_ > left_->sum || left_->failure.kind == Failure::Kind::kTimeout)) {
      left_->failure.raise(who());
    }
    int there = 0;
    MPI_Status status;
    SYNCBN_MPI_CHECK(who(), MPI_Iprobe(MPI_ANY_SOURCE, kTag, comm_, &there, &status));
    if (there == 0) {
      break;
    }
    Notice notice{};
    SYNCBN_MPI_CHECK(who(), MPI_Recv(&notice, sizeof(notice), MPI_BYTE, status.MPI_SOURCE, kTag,
                                     comm_, MPI_STATUS_IGNORE));
    if (notice.group != group_) {
      continue;
    }
    if (notice.failure.kind != Failure::Kind::kNone) {
      if (!left_.has_value()) {
        left_ = notice;
      }
      continue;
    }
    here_[static_cast<std::size_t>(status.MPI_SOURCE)] = notice.sum;
  }
  return std::find(here_.begin(), here_.end(), waited_for_) != here_.end();
}

/// Nobody hears from a rank that has not come.
void MpiExchange::give_up() {
  std::vector<int> missing;
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && here_[static_cast<std::size_t>(r)] < waited_for_) {
      missing.push_back(number(r));
    }
  }
  const std::string text = missing.empty()
                               ? "all ranks came to the exchange, which did not end within " +
                                     std::to_string(timeout_.count()) + " ms"
                               : missing_text(missing, timeout_);
  const Failure failure = Failure::of(Failure::Kind::kTimeout, text, missing);
  tell(failure);
  failure.raise(who());
}

void MpiExchange::say_farewell(const Failure& failure) {
  if (on_mpis_thread()) {
    tell(failure);
  }
}

void MpiExchange::tell(const Failure& failure) {
  forget_sent();
  sent_->push_back(Sent{Notice{group_, waited_for_, failure}, {}});
  Sent& sent = sent_->back();
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) {
      SYNCBN_MPI_CHECK(who(), MPI_Isend(&sent.notice, sizeof(Notice), MPI_BYTE, r, kTag, comm_,
                                        &sent.requests.emplace_back(MPI_REQUEST_NULL)));
    }
  }
}

/// What has arrived.
void MpiExchange::forget_sent() {
  sent_->remove_if([&](Sent& sent) {
    int done = 0;
    SYNCBN_MPI_CHECK(who(), MPI_Testall(static_cast<int>(sent.requests.size()),
                                        sent.requests.data(), &done, MPI_STATUSES_IGNORE));
    return done != 0;
  });
}

}  // namespace syncbn
