// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_meeting.hpp"

#include <algorithm>
#include <atomic>
#include <span>

#include "comm/pause.hpp"
#include "comm/rank_texts.hpp"

namespace syncbn {

MpiMeeting::MpiMeeting(MPI_Comm comm, std::vector<int> numbers, int group_size,
                       std::chrono::milliseconds timeout)
    : comm_(comm), numbers_(std::move(numbers)), group_size_(group_size), timeout_(timeout) {
  SYNCBN_MPI_CHECK("", MPI_Comm_rank(comm_, &rank_));
  SYNCBN_MPI_CHECK("", MPI_Comm_size(comm_, &size_));
  static std::atomic<int> made = 0;
  int agreed = ++made;
  SYNCBN_MPI_CHECK("", MPI_Allreduce(MPI_IN_PLACE, &agreed, 1, MPI_INT, MPI_MAX, comm_));
  made = agreed;
  constexpr int kLargestTag = 32766;  // MPI promises 32767
  arrival_tag_ = 2 * agreed % kLargestTag;
}

MpiMeeting::~MpiMeeting() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (broken_.has_value() || finalized != 0) {
    [[maybe_unused]] const auto* kept = sent_.release();
    return;
  }
  for (Sent& sent : *sent_) {
    MPI_Wait(&sent.request, MPI_STATUS_IGNORE);
  }
}

std::string MpiMeeting::who() const {
  return rank_of(number(), static_cast<std::size_t>(group_size_));
}

/// Of the ranks below, in levels. The first one has the most below it.
int MpiMeeting::height(int rank, int size) {
  int levels = 0;
  for (; first_below(rank) < size; rank = first_below(rank)) {
    ++levels;
  }
  return levels;
}

int MpiMeeting::depth(int rank) {
  int levels = 0;
  for (; rank > 0; rank = above(rank)) {
    ++levels;
  }
  return levels;
}

int MpiMeeting::limits(int size) { return height(0, size) + depth(size - 1); }

RankSet MpiMeeting::with_all_below(int rank) const {
  std::vector<int> those = {number(rank)};
  for (int r = rank + 1; r < size_; ++r) {
    int its = r;
    while (its > rank) {
      its = above(its);
    }
    if (its == rank) {
      those.push_back(number(r));
    }
  }
  return RankSet::of(those);
}

void MpiMeeting::meet(Kind kind, std::size_t bytes) {
  Arrival mine{};
  mine.kind = kind;
  mine.bytes = static_cast<std::int64_t>(bytes);
  if (rank_ == 0) {
    decide(mine, Clock::now() - decided_ > timeout_);
  } else if (const auto all = collect(mine); all.has_value()) {
    send(*all, above(rank_), arrival_tag_);
    const auto again = [&] {
      tell(verdict_);
      return collect(mine);
    };
    if (await_answer(again)) {
      tell(verdict_);
    }
  }
  heed();
}

/// Rank 0: answers all ranks. late: this one; they may have come and gone, so those that wait are
/// asked to come again.
void MpiMeeting::decide(const Arrival& mine, bool late) {
  std::optional<Arrival> all = collect(mine);
  if (all.has_value() && late && all->kind != Kind::kRefused) {
    Verdict question{};
    question.answer = Answer::kAsk;
    tell(question);
    all = collect(mine);
  }
  if (!all.has_value()) {
    return;
  }
  decided_ = Clock::now();
  if (all->kind == Kind::kRefused) {
    verdict_ = all->failure;
  } else if (all->has_odd()) {
    const std::string text = divergence_text(
        number(0), static_cast<std::size_t>(group_size_), static_cast<std::size_t>(all->bytes),
        static_cast<int>(all->odd_rank), static_cast<std::size_t>(all->odd_bytes));
    verdict_.set(Answer::kDivergence, text, all->odd.list());
  } else {
    verdict_.set(Answer::kGo, "", {});
  }
  tell(verdict_);
}

/// Waits for the ranks below: what they and this one bring. Nothing where one of them does not come
/// or has left, which all ranks then know.
std::optional<Arrival> MpiMeeting::collect(const Arrival& mine) {
  const int first = first_below(rank_);
  std::vector<Arrival> below(static_cast<std::size_t>(std::max(0, end_below() - first)));
  std::size_t missing = below.size();
  const auto of = [&](int rank) -> Arrival& {
    return below[static_cast<std::size_t>(rank - first)];
  };
  for (const auto& [from, other] : std::exchange(early_, {})) {
    of(from) = other;
    --missing;
  }
  const auto start = Clock::now();
  while (missing > 0) {
    Arrival other{};
    if (const auto from = receive(MPI_ANY_SOURCE, arrival_tag_, other); from.has_value()) {
      if (other.kind == Kind::kLeft) {
        end(other.failure.answer, other.failure.text.data(), other.failure.about.list());
        return std::nullopt;
      }
      if (of(*from).kind != Kind::kMissing) {
        early_.emplace_back(*from, other);
        continue;
      }
      of(*from) = other;
      --missing;
    } else if (Clock::now() - start > height(rank_, size_) * timeout_) {
      std::vector<int> late;
      for (int r = first; r < end_below(); ++r) {
        if (of(r).kind == Kind::kMissing) {
          late.push_back(number(r));
        }
      }
      end(Answer::kTimeout, missing_text(late, timeout_), late);
      return std::nullopt;
    } else {
      pause(start);
    }
  }
  return together(mine, below);
}

/// Refusals, or who brings something else than this rank.
Arrival MpiMeeting::together(const Arrival& mine, const std::vector<Arrival>& below) const {
  Arrival all = mine;
  Answer type = Answer::kRefused;
  std::string text;
  std::vector<int> refusing;
  for (std::size_t i = 0; i < below.size(); ++i) {
    const Arrival& other = below[i];
    const int rank = first_below(rank_) + static_cast<int>(i);
    if (other.kind == Kind::kRefused) {
      const std::vector<int> about = other.failure.about.list();
      refusing.insert(refusing.end(), about.begin(), about.end());
      text += (text.empty() ? "" : "; ") + std::string(other.failure.text.data());
      type = std::min(type, other.failure.answer);  // kDivergence is the smaller one
    } else if (other.kind == mine.kind && other.bytes == mine.bytes) {
      all.odd.add(other.odd);
      if (!all.has_odd() && other.has_odd()) {
        all.odd_rank = other.odd_rank;
        all.odd_bytes = other.odd_bytes;
        all.odd_kind = other.odd_kind;
      }
    } else {
      RankSet those = with_all_below(rank);
      if (other.has_odd() && other.odd_kind == mine.kind && other.odd_bytes == mine.bytes) {
        those.remove(other.odd);
      }
      all.odd.add(those);
      if (!all.has_odd()) {
        all.odd_rank = number(rank);
        all.odd_bytes = other.bytes;
        all.odd_kind = other.kind;
      }
    }
  }
  if (!refusing.empty()) {
    all.kind = Kind::kRefused;
    all.failure.set(type, text, refusing);
  }
  return all;
}

/// The other ranks: waits for rank 0's answer. again(): what to tell where it asks once more, or
/// nothing, and then this gives false. Rank 0 that comes within the time limit has answered after
/// height + 1 of them; each rank gives up before those below it, which then hear why.
template <class Again>
bool MpiMeeting::await_answer(const Again& again) {
  auto start = Clock::now();
  for (;;) {
    if (receive(above(rank_), arrival_tag_ + 1, verdict_).has_value()) {
      if (verdict_.answer != Answer::kAsk) {
        return true;
      }
      const std::optional<Arrival> all = again();
      if (!all.has_value()) {
        return false;
      }
      send(*all, above(rank_), arrival_tag_);
      start = Clock::now();
    } else if (Clock::now() - start > (height(0, size_) + depth(rank_)) * timeout_) {
      const int missing = number(above(rank_));
      const std::string text = missing_text({missing}, timeout_);
      verdict_.set(Answer::kTimeout, text, {missing});
      tell(verdict_);
      leave(Answer::kLost, text, {missing});
      throw ExchangeTimeout(who() + text, {missing});
    } else {
      pause(start);
    }
  }
}

/// What rank 0 answered.
void MpiMeeting::heed() {
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

void MpiMeeting::refuse(Answer type, const std::string& text, const std::vector<int>& about) {
  if (broken_.has_value() || !on_mpis_thread()) {
    return;
  }
  try {
    settle();
    decided_ = Clock::now();
    refusal_.kind = Kind::kRefused;
    refusal_.failure.set(type, text, about);
    tell(refusal_.failure);
    if (rank_ > 0) {
      send(refusal_, above(rank_), arrival_tag_);
    }
    refused_ = true;
  } catch (const Error& error) {
    abandon(error.what());
  }
}

void MpiMeeting::settle() {
  if (!std::exchange(refused_, false)) {
    return;
  }
  const auto again = [&] { return std::optional(refusal_); };
  if (collect(refusal_).has_value()) {
    if (rank_ == 0) {
      return forget_sent();
    }
    await_answer(again);
    if (verdict_.answer == Answer::kTimeout || verdict_.answer == Answer::kLost) {
      tell(verdict_);
    }
  }
  if (verdict_.answer == Answer::kTimeout || verdict_.answer == Answer::kLost) {
    heed();
  }
  forget_sent();
}

void MpiMeeting::abandon(const std::string& reason) {
  leave(Answer::kLost, left_text(number(), reason), {number()});
}

void MpiMeeting::leave(Answer type, const std::string& text, const std::vector<int>& about) {
  if (broken_.has_value()) {
    return;
  }
  broken_ = text;
  if (!on_mpis_thread()) {
    return;
  }
  try {
    if (refused_) {  // nobody may have heard of it yet
      end(Answer::kLost, refusal_.failure.text.data(), refusal_.failure.about.list());
    } else {
      end(type, text, about);
    }
  } catch (const Error& error) {  // of MPI; the others come to their time limit
    broken_ = *broken_ + "; the other ranks were not told: " + error.what();
  }
}

/// Tells the ranks above and below what ended the group.
void MpiMeeting::end(Answer what, const std::string& text, const std::vector<int>& about) {
  verdict_.set(what, text, about);
  tell(verdict_);
  if (rank_ > 0) {
    Arrival farewell{};
    farewell.kind = Kind::kLeft;
    farewell.failure = verdict_;
    send(farewell, above(rank_), arrival_tag_);
  }
}

/// The ranks below.
void MpiMeeting::tell(const Verdict& what) {
  for (int r = first_below(rank_); r < end_below(); ++r) {
    send(what, r, arrival_tag_ + 1);
  }
}

template <class Message>
void MpiMeeting::send(const Message& message, int to, int tag) {
  const auto bytes = std::as_bytes(std::span(&message, 1));
  Sent& sent =
      sent_->emplace_back(MPI_REQUEST_NULL, std::vector<std::byte>(bytes.begin(), bytes.end()));
  SYNCBN_MPI_CHECK(who(), MPI_Isend(sent.message.data(), static_cast<int>(bytes.size()), MPI_BYTE,
                                    to, tag, comm_, &sent.request));
}

/// Those that arrived. A rank that refused or ended may not have read the others.
void MpiMeeting::forget_sent() {
  sent_->remove_if([&](Sent& sent) {
    int done = 0;
    SYNCBN_MPI_CHECK(who(), MPI_Test(&sent.request, &done, MPI_STATUS_IGNORE));
    return done != 0;
  });
}

/// The next message of this kind, if there is one; its sender.
template <class Message>
std::optional<int> MpiMeeting::receive(int from, int tag, Message& message) {
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

}  // namespace syncbn
