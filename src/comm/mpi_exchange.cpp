// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_exchange.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "comm/pause.hpp"
#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

/// MPI counts in int.
int count_of(std::size_t count, const char* what) {
  if (count > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    throw InvalidArgument(std::string(what) + ": got " + std::to_string(count) +
                          ", expected at most 2^31 - 1");
  }
  return static_cast<int>(count);
}

}  // namespace

MpiExchange::MpiExchange(MPI_Comm comm, std::vector<int> numbers, int group_size,
                         std::chrono::milliseconds timeout)
    : comm_(comm), timeout_(timeout) {
  SYNCBN_MPI_CHECK("", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  meeting_ = std::make_unique<MpiMeeting>(comm_, std::move(numbers), group_size, timeout);
}

MpiExchange::~MpiExchange() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  const bool kept = meeting_->broken().has_value() || finalized != 0;
  meeting_.reset();
  if (kept) {
    [[maybe_unused]] const Memory* memory = memory_.release();
  } else {
    MPI_Comm_free(&comm_);
  }
}

/// Runs an exchange; an error of this rank that the others do not see makes it leave the group.
template <class Body>
void MpiExchange::or_leave(const Body& body) {
  if (const auto& why = meeting_->broken(); why.has_value()) {
    throw PeerLost(meeting_->who() + broken_text(*why));
  }
  try {
    meeting_->settle();
    body();
  } catch (const DivergenceError&) {
    throw;
  } catch (const PeerLost&) {  // one that refused comes again, and otherwise it is broken
    throw;
  } catch (const InvalidArgument& error) {
    refuse(error.what());
    throw;
  } catch (const std::exception& error) {
    abandon(error.what());
    throw;
  }
}

void MpiExchange::all_reduce_sum(std::span<std::int64_t> words) {
  or_leave([&] {
    const int count = count_of(words.size(), "words");
    meeting_->meet(Kind::kSum, words.size_bytes());
    // Not in the caller's memory, which may be gone when MPI writes after a timeout.
    memory_->words.assign(words.begin(), words.end());
    MPI_Request request = MPI_REQUEST_NULL;
    SYNCBN_MPI_CHECK(meeting_->who(), MPI_Iallreduce(MPI_IN_PLACE, memory_->words.data(), count,
                                                     MPI_UINT64_T, MPI_SUM, comm_, &request));
    finish(request);
    std::copy(memory_->words.begin(), memory_->words.end(), words.begin());
  });
}

void MpiExchange::refuse(const std::string& reason) {
  const int own = meeting_->number();
  meeting_->refuse(Answer::kRefused, refused_text(own, reason), {own});
}

void MpiExchange::fail(const Error& error) {
  std::string text = error.what();
  if (text.starts_with(meeting_->who())) {
    text.erase(0, meeting_->who().size());
  }
  if (const auto* divergence = dynamic_cast<const DivergenceError*>(&error)) {
    meeting_->refuse(Answer::kDivergence, text, divergence->ranks());
  } else if (const auto* lost = dynamic_cast<const PeerLost*>(&error)) {
    meeting_->refuse(Answer::kRefused, text, lost->ranks());
  } else if (const auto* timeout = dynamic_cast<const ExchangeTimeout*>(&error)) {
    meeting_->leave(Answer::kTimeout, text, timeout->ranks());
  } else {
    abandon(text);
  }
}

void MpiExchange::finish(MPI_Request& request) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (int done = 0;;) {
    SYNCBN_MPI_CHECK(meeting_->who(), MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    if (done != 0) {
      return;
    }
    if (Clock::now() - start > timeout_) {
      throw ExchangeTimeout(
          meeting_->who() + "the exchange began with all ranks and did not end within " +
          std::to_string(timeout_.count()) + " ms; MPI does not tell which rank is missing");
    }
    pause(start);
  }
}

}  // namespace syncbn
