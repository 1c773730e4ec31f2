// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_exchange.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

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
    : comm_(comm), numbers_(std::move(numbers)), group_size_(group_size), timeout_(timeout) {
  SYNCBN_MPI_CHECK("", MPI_Comm_rank(comm_, &rank_));
  SYNCBN_MPI_CHECK("", MPI_Comm_size(comm_, &size_));
  SYNCBN_MPI_CHECK("", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  static std::atomic<int> made = 0;
  int agreed = ++made;
  SYNCBN_MPI_CHECK("", MPI_Allreduce(MPI_IN_PLACE, &agreed, 1, MPI_INT, MPI_MAX, comm_));
  made = agreed;
  constexpr int kLargestTag = 32766;  // MPI promises 32767
  arrival_tag_ = 2 * agreed % kLargestTag;
}

MpiExchange::~MpiExchange() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (broken_.has_value() || finalized != 0) {
    [[maybe_unused]] const Memory* kept = memory_.release();
    return;
  }
  for (Sent& sent : memory_->sent) {
    MPI_Wait(&sent.request, MPI_STATUS_IGNORE);
  }
  MPI_Comm_free(&comm_);
}

std::string MpiExchange::who() const {
  return rank_of(number(rank_), static_cast<std::size_t>(group_size_));
}

/// Runs an exchange; an error of this rank that the others do not see makes it leave the group.
template <class Body>
void MpiExchange::or_leave(const Body& body) {
  if (broken_.has_value()) {
    throw PeerLost(who() + "the group is broken: " + *broken_);
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
    abandon(error.what());
    throw;
  }
}

void MpiExchange::all_reduce_sum(std::span<std::int64_t> words) {
  or_leave([&] {
    const int count = count_of(words.size(), "words");
    meet(Kind::kSum, words.size_bytes());
    // Not in the caller's memory, which may be gone when MPI writes after a timeout.
    memory_->words.assign(words.begin(), words.end());
    MPI_Request request = MPI_REQUEST_NULL;
    SYNCBN_MPI_CHECK(who(), MPI_Iallreduce(MPI_IN_PLACE, memory_->words.data(), count, MPI_UINT64_T,
                                           MPI_SUM, comm_, &request));
    finish(request);
    std::copy(memory_->words.begin(), memory_->words.end(), words.begin());
  });
}

void MpiExchange::all_gather(std::span<const std::byte> in, std::span<std::byte> out) {
  or_leave([&] {
    const int count = count_of(in.size(), "in");
    const std::size_t expected = in.size() * static_cast<std::size_t>(size_);
    if (out.size() != expected) {
      throw InvalidArgument(gather_size_text(out.size(), expected));
    }
    meet(Kind::kGather, in.size());
    memory_->mine.assign(in.begin(), in.end());
    memory_->all.resize(out.size());
    MPI_Request request = MPI_REQUEST_NULL;
    SYNCBN_MPI_CHECK(who(), MPI_Iallgather(memory_->mine.data(), count, MPI_BYTE,
                                           memory_->all.data(), count, MPI_BYTE, comm_, &request));
    finish(request);
    std::copy(memory_->all.begin(), memory_->all.end(), out.begin());
  });
}

void MpiExchange::abandon(const std::string& reason) {
  leave(Answer::kLost, left_text(number(rank_), reason), {number(rank_)});
}

void MpiExchange::refuse(const std::string& reason) {
  send_refusal(Answer::kRefused, left_text(number(rank_), reason), {number(rank_)});
}

void MpiExchange::fail(const Error& error) {
  std::string text = error.what();
  if (text.starts_with(who())) {
    text.erase(0, who().size());
  }
  if (const auto* divergence = dynamic_cast<const DivergenceError*>(&error)) {
    send_refusal(Answer::kDivergence, text, divergence->ranks());
  } else if (const auto* lost = dynamic_cast<const PeerLost*>(&error)) {
    send_refusal(Answer::kRefused, text, lost->ranks());
  } else if (const auto* timeout = dynamic_cast<const ExchangeTimeout*>(&error)) {
    leave(Answer::kTimeout, text, timeout->ranks());
  } else {
    abandon(text);
  }
}

/// All ranks are at the same exchange of `bytes` bytes, or all throw.
void MpiExchange::meet(Kind kind, std::size_t bytes) {
  arrival_.kind = kind;
  arrival_.bytes = static_cast<std::int64_t>(bytes);
  if (rank_ == 0) {
    decide();
  } else {
    send(arrival_, 0, arrival_tag_);
    await_answer(arrival_);
  }
  heed();
}

/// Rank 0: waits for all ranks, and answers all of them.
void MpiExchange::decide() {
  const bool late = Clock::now() - decided_ > timeout_;
  std::vector<Arrival> arrivals;
  if (!collect(arrivals) || answer_refusals(arrivals)) {
    return;
  }
  if (late) {  // they may have come and gone: those that wait come again
    Verdict question{};
    question.answer = Answer::kAsk;
    tell(question);
    if (!collect(arrivals) || answer_refusals(arrivals)) {
      return;
    }
  }
  decided_ = Clock::now();
  std::vector<int> odd;
  std::string text;
  for (int r = 1; r < size_; ++r) {
    const Arrival& other = arrivals[static_cast<std::size_t>(r)];
    if (other.kind == arrival_.kind && other.bytes == arrival_.bytes) {
      continue;
    }
    if (odd.empty()) {
      text = divergence_text(number(0), static_cast<std::size_t>(group_size_),
                             static_cast<std::size_t>(arrival_.bytes), number(r),
                             static_cast<std::size_t>(other.bytes), other.kind != arrival_.kind);
    }
    odd.push_back(number(r));
  }
  answer(odd.empty() ? Answer::kGo : Answer::kDivergence, text, odd);
}

/// Rank 0: waits for a message of every rank; false if it answered why they do not come.
bool MpiExchange::collect(std::vector<Arrival>& arrivals) {
  arrivals.assign(static_cast<std::size_t>(size_), Arrival{});  // kMissing
  arrivals[0] = arrival_;
  int missing = size_ - 1;
  for (const auto& [from, other] : std::exchange(early_, {})) {
    arrivals[static_cast<std::size_t>(from)] = other;
    --missing;
  }
  const auto start = Clock::now();
  while (missing > 0) {
    Arrival other;
    if (const auto from = receive(MPI_ANY_SOURCE, arrival_tag_, other); from.has_value()) {
      Arrival& its = arrivals[static_cast<std::size_t>(*from)];
      if (other.kind == Kind::kLeft) {
        answer(other.failure.answer, other.failure.text.data(), other.failure.about.list());
        return false;
      }
      if (its.kind != Kind::kMissing) {
        early_.emplace_back(*from, other);
        continue;
      }
      its = other;
      --missing;
    } else if (Clock::now() - start > timeout_) {
      std::vector<int> late;
      for (int r = 1; r < size_; ++r) {
        if (arrivals[static_cast<std::size_t>(r)].kind == Kind::kMissing) {
          late.push_back(number(r));
        }
      }
      answer(Answer::kTimeout, missing_text(late, timeout_), late);
      return false;
    } else {
      pause(start);
    }
  }
  return true;
}

/// Rank 0: whether ranks that came refuse the exchange, which all then learn.
bool MpiExchange::answer_refusals(const std::vector<Arrival>& arrivals) {
  std::string text;
  std::vector<int> ranks;
  Answer type = Answer::kRefused;
  for (const Arrival& other : arrivals) {
    if (other.kind == Kind::kRefused) {
      const std::vector<int> about = other.failure.about.list();
      ranks.insert(ranks.end(), about.begin(), about.end());
      text += (text.empty() ? "" : "; ") + std::string(other.failure.text.data());
      type = std::min(type, other.failure.answer);  // kDivergence is the smaller one
    }
  }
  if (!ranks.empty()) {
    decided_ = Clock::now();
    answer(type, text, ranks);
  }
  return !ranks.empty();
}

/// The other ranks: rank 0 that comes within `timeout` has answered after twice that.
void MpiExchange::await_answer(const Arrival& mine) {
  auto start = Clock::now();
  for (;;) {
    if (receive(0, arrival_tag_ + 1, verdict_).has_value()) {
      if (verdict_.answer != Answer::kAsk) {
        return;
      }
      send(mine, 0, arrival_tag_);
      start = Clock::now();
    } else if (Clock::now() - start > 2 * timeout_) {
      const std::string text = missing_text({number(0)}, timeout_);
      abandon(text);
      throw ExchangeTimeout(who() + text, {number(0)});
    } else {
      pause(start);
    }
  }
}

/// What rank 0 answered.
void MpiExchange::heed() {
  const std::string text = verdict_.text.data();
  const std::vector<int> about = verdict_.about.list();
  switch (verdict_.answer) {
    case Answer::kAsk:  // answered already
    case Answer::kGo:
      return forget_sent();
    case Answer::kDivergence:
      forget_sent();
      throw DivergenceError(text, about);
    case Answer::kRefused:
      forget_sent();
      throw PeerLost(who() + text, about);
    case Answer::kTimeout:
      broken_ = text;
      throw ExchangeTimeout(who() + text, about);
    case Answer::kLost:
      broken_ = text;
      throw PeerLost(who() + text, about);
  }
}

/// Tells the others, as rank 0 or through it, that this rank is not in the exchange to come.
void MpiExchange::send_refusal(Answer type, const std::string& text,
                               const std::vector<int>& about) {
  if (broken_.has_value() || !on_mpis_thread()) {
    return;
  }
  try {
    settle();
    if (rank_ == 0) {
      decided_ = Clock::now();
      Verdict no{};
      no.set(type, text, about);
      tell(no);
    } else {
      refusal_.kind = Kind::kRefused;
      refusal_.failure.set(type, text, about);
      send(refusal_, 0, arrival_tag_);
    }
    refused_ = true;
  } catch (const Error& error) {
    abandon(error.what());
  }
}

/// The other half of an exchange that this rank refused.
void MpiExchange::settle() {
  if (!std::exchange(refused_, false)) {
    return;
  }
  if (rank_ > 0) {
    await_answer(refusal_);
  } else if (std::vector<Arrival> arrivals; collect(arrivals)) {
    return forget_sent();
  }
  if (verdict_.answer == Answer::kTimeout || verdict_.answer == Answer::kLost) {
    heed();
  }
  forget_sent();
}

/// Tells the others, as rank 0 or through it, and does not wait for them.
void MpiExchange::leave(Answer type, const std::string& text, const std::vector<int>& about) {
  if (broken_.has_value()) {
    return;
  }
  broken_ = text;
  if (!on_mpis_thread()) {
    return;
  }
  try {
    if (rank_ == 0) {
      answer(type, text, about);
    } else {
      Arrival farewell{};
      farewell.kind = Kind::kLeft;
      if (refused_) {  // nobody may have heard of it yet
        farewell.failure = refusal_.failure;
        farewell.failure.answer = Answer::kLost;
      } else {
        farewell.failure.set(type, text, about);
      }
      send(farewell, 0, arrival_tag_);
    }
  } catch (const Error& error) {  // of MPI; the others come to their time limit
    broken_ = *broken_ + "; the other ranks were not told: " + error.what();
  }
}

void MpiExchange::answer(Answer what, const std::string& text, const std::vector<int>& about) {
  verdict_.set(what, text, about);
  tell(verdict_);
}

void MpiExchange::tell(const Verdict& what) {
  for (int r = 1; r < size_; ++r) {
    send(what, r, arrival_tag_ + 1);
  }
}

template <class Message>
void MpiExchange::send(const Message& message, int to, int tag) {
  const auto bytes = std::as_bytes(std::span(&message, 1));
  Sent& sent = memory_->sent.emplace_back(MPI_REQUEST_NULL,
                                          std::vector<std::byte>(bytes.begin(), bytes.end()));
  SYNCBN_MPI_CHECK(who(), MPI_Isend(sent.message.data(), static_cast<int>(bytes.size()), MPI_BYTE,
                                    to, tag, comm_, &sent.request));
}

/// Those that arrived. A rank that refused or ended may not have read the others.
void MpiExchange::forget_sent() {
  memory_->sent.remove_if([&](Sent& sent) {
    int done = 0;
    SYNCBN_MPI_CHECK(who(), MPI_Test(&sent.request, &done, MPI_STATUS_IGNORE));
    return done != 0;
  });
}

/// The next message of this kind, if there is one; its sender.
template <class Message>
std::optional<int> MpiExchange::receive(int from, int tag, Message& message) {
  int there = 0;
  MPI_Status status;
  SYNCBN_MPI_CHECK(who(), MPI_Iprobe(from, tag, comm_, &there, &status));
  if (there == 0) {
    return std::nullopt;
  }
  SYNCBN_MPI_CHECK(who(), MPI_Recv(&message, sizeof(message), MPI_BYTE, status.MPI_SOURCE, tag,
                                   comm_, MPI_STATUS_IGNORE));
  return status.MPI_SOURCE;
}

void MpiExchange::finish(MPI_Request& request) {
  const auto start = Clock::now();
  for (int done = 0;;) {
    SYNCBN_MPI_CHECK(who(), MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    if (done != 0) {
      return;
    }
    if (Clock::now() - start > timeout_) {
      throw ExchangeTimeout(who() + "the exchange began with all ranks and did not end within " +
                            std::to_string(timeout_.count()) +
                            " ms; MPI does not tell which rank is missing");
    }
    pause(start);
  }
}

}  // namespace syncbn
