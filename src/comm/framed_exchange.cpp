// SPDX-License-Identifier: Apache-2.0
#include "syncbn/framed_exchange.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "comm/failure.hpp"
#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"
#include "tensors/checks.hpp"

namespace syncbn {
namespace {

using detail::Failure;
using detail::kFailureWords;
using Words = std::vector<std::int64_t>;

// A frame begins with two numbers that must be equal on all ranks, each with its square: the bits
// of the length below 2^20, so that sums of squares fit a word, and those above. Then comes how
// many ranks bring no message.
constexpr std::size_t kTags = 2;
constexpr int kTagBits = 20;
constexpr std::size_t kAbsent = 2 * kTags;
constexpr std::size_t kPrefixWords = kAbsent + 1;

void write_prefix(Words& frame, std::size_t length) {
  const std::array<std::size_t, kTags> tags = {length % (std::size_t{1} << kTagBits),
                                               length >> kTagBits};
  for (std::size_t i = 0; i < kTags; ++i) {
    frame[2 * i] = static_cast<std::int64_t>(tags[i]);
    frame[2 * i + 1] = static_cast<std::int64_t>(tags[i] * tags[i]);
  }
  frame[kAbsent] = 0;
}

/// Whether all ranks bring a message of one length: sum of squares = square of the sum / ranks.
bool all_bring_the_same(const Words& frame, int ranks) {
  bool same = frame[kAbsent] == 0;
  for (std::size_t i = 0; i < kTags; ++i) {
    same = same && ranks * frame[2 * i + 1] == frame[2 * i] * frame[2 * i];
  }
  return same;
}

}  // namespace

struct __attribute__((visibility("hidden"))) FramedExchange::State {
  int rank = 0;
  std::vector<int> numbers;  ///< what errors call the ranks
  int group_size = 0;
  std::size_t frame_words = 0;
  Words frame, rest;                  ///< for the next exchange
  std::deque<Words> sums;             ///< that were begun; a deque moves none
  std::optional<Failure> refusal;     ///< of an exchange that this rank has not waited for
  std::optional<std::string> broken;  ///< why there are no further exchanges
  State* kept_before = nullptr;       ///< of the group's end

  std::size_t ranks() const { return numbers.size(); }

  /// Each rank's failure, or the length that it brings, in a place of its own.
  Words said(const Failure& own) const {
    Words all(ranks() * kFailureWords, 0);
    std::memcpy(all.data() + static_cast<std::size_t>(rank) * kFailureWords, &own, sizeof(own));
    return all;
  }
};

FramedExchange::FramedExchange(int rank, int size, std::size_t frame_words)
    : state_(std::make_unique<State>()) {
  check_ranks(size);
  check_rank(rank, size);
  State& state = *state_;
  state.rank = rank;
  state.numbers.resize(static_cast<std::size_t>(size));
  std::iota(state.numbers.begin(), state.numbers.end(), 0);
  state.group_size = size;
  state.frame_words = frame_words;
}

FramedExchange::~FramedExchange() {
  if (!state_->sums.empty()) {  // what sums them may still write there; a leak checker finds it
    static std::atomic<State*> kept = nullptr;
    State* const state = state_.release();
    state->kept_before = kept.exchange(state);
  }
}

int FramedExchange::rank() const { return state_->rank; }
int FramedExchange::size() const { return static_cast<int>(state_->ranks()); }
bool FramedExchange::is_broken() const { return state_->broken.has_value(); }
int FramedExchange::number(int rank) const {
  return state_->numbers[static_cast<std::size_t>(rank)];
}
std::string FramedExchange::who() const {
  return rank_of(number(rank()), static_cast<std::size_t>(state_->group_size));
}

void FramedExchange::call_ranks(std::vector<int> numbers, int size) {
  state_->numbers = std::move(numbers);
  state_->group_size = size;
}

void FramedExchange::check_usable() const {
  if (state_->broken.has_value()) {
    throw PeerLost(who() + broken_text(*state_->broken));
  }
}

void FramedExchange::all_reduce_sum(std::span<std::int64_t> words) {
  check_usable();
  try {
    settle();
    exchange(words);
  } catch (const DivergenceError&) {  // of which, and of the next two, all ranks know
    throw;
  } catch (const ExchangeTimeout&) {
    throw;
  } catch (const PeerLost&) {
    throw;
  } catch (const std::exception& error) {
    abandon(error.what());
    throw;
  }
}

void FramedExchange::exchange(std::span<std::int64_t> words) {
  Words frame = std::move(state_->frame);
  frame.resize(kPrefixWords + state_->frame_words);
  const std::size_t framed = std::min(words.size(), state_->frame_words);
  write_prefix(frame, words.size());
  std::copy_n(words.begin(), framed, frame.begin() + kPrefixWords);
  begin(std::move(frame));
  frame = finish();
  if (!all_bring_the_same(frame, size())) {
    Failure own{};
    own.words = static_cast<std::int64_t>(words.size());
    begin(state_->said(own));
    raise(heard());
  }
  if (words.size() > framed) {
    const auto beyond = words.subspan(framed);
    Words rest = std::move(state_->rest);
    rest.assign(beyond.begin(), beyond.end());
    begin(std::move(rest));
    rest = finish();
    std::copy(rest.begin(), rest.end(), beyond.begin());
    state_->rest = std::move(rest);
  }
  std::copy_n(frame.begin() + kPrefixWords, framed, words.begin());  // unchanged after an error
  state_->frame = std::move(frame);
}

/// Runs a half of the all-reduce; the errors of one that all ranks know break the group.
template <class Half>
void FramedExchange::or_break(const Half& half) {
  const auto breaks = [&](const Error& error) {
    const std::string text = error.what();
    state_->broken = text.substr(text.starts_with(who()) ? who().size() : 0);
  };
  try {
    half();
  } catch (const ExchangeTimeout& error) {
    breaks(error);
    throw;
  } catch (const PeerLost& error) {
    breaks(error);
    throw;
  }
}

void FramedExchange::begin(std::vector<std::int64_t> words) {
  state_->sums.push_back(std::move(words));
  or_break([&] { begin_sum(state_->sums.back()); });
}

std::vector<std::int64_t> FramedExchange::finish() {
  or_break([&] { wait_for_sum(); });
  Words words = std::move(state_->sums.front());
  state_->sums.pop_front();
  return words;
}

/// What all ranks have said; one that left has broken the group.
std::vector<Failure> FramedExchange::heard() {
  const Words said = finish();
  std::vector<Failure> of(state_->ranks());
  std::memcpy(of.data(), said.data(), said.size() * sizeof(std::int64_t));
  for (const Failure& failure : of) {
    if (failure.kind == Failure::Kind::kLost) {
      state_->broken = failure.text.data();
    }
  }
  return of;
}

/// Throws the ranks' failures, or, without one, who brings another length.
void FramedExchange::raise(const std::vector<Failure>& of) const {
  std::string text;
  Failure::Kind kind = Failure::Kind::kNone;
  std::vector<int> about;
  for (const Failure& failure : of) {
    if (failure.kind != Failure::Kind::kNone) {
      text += (text.empty() ? "" : "; ") + std::string(failure.text.data());
      kind = kind == Failure::Kind::kNone ? failure.kind : std::min(kind, failure.kind);
      const std::vector<int> ranks = failure.about.list();
      about.insert(about.end(), ranks.begin(), ranks.end());
    }
  }
  if (kind != Failure::Kind::kNone) {
    Failure::of(kind, text, about).raise(who());
  }
  const auto bytes = [&](int r) {
    return sizeof(std::int64_t) * static_cast<std::size_t>(of[static_cast<std::size_t>(r)].words);
  };
  int other = 0;
  while (other + 1 < size() && bytes(other) == bytes(rank())) {
    ++other;
  }
  for (int r = 1; r < size(); ++r) {
    if (bytes(r) != bytes(0)) {
      about.push_back(number(r));
    }
  }
  throw DivergenceError(
      divergence_text(number(rank()), static_cast<std::size_t>(state_->group_size), bytes(rank()),
                      number(other), bytes(other)),
      about);
}

void FramedExchange::say(const Failure& failure) {
  Words frame(kPrefixWords + state_->frame_words);
  frame[kAbsent] = 1;
  begin(std::move(frame));
  begin(state_->said(failure));
}

void FramedExchange::settle() {
  if (state_->refusal.has_value()) {
    finish();
    heard();
    state_->refusal.reset();
    check_usable();
  }
}

void FramedExchange::refuse(const std::string& reason) {
  const int own = number(rank());
  refuse_with(Failure::of(Failure::Kind::kRefused, refused_text(own, reason), {own}));
}

void FramedExchange::refuse_with(const Failure& failure) {
  if (state_->broken.has_value()) {
    return;
  }
  try {
    settle();
    say(failure);
    state_->refusal = failure;
  } catch (const std::exception& error) {
    abandon(error.what());
  }
}

void FramedExchange::abandon(const std::string& reason) {
  const int own = number(rank());
  leave_with(Failure::of(Failure::Kind::kLost, left_text(own, reason), {own}));
}

void FramedExchange::leave_with(const Failure& failure) {
  if (state_->broken.has_value()) {
    return;
  }
  state_->broken = failure.text.data();
  Failure told = failure;
  if (state_->refusal.has_value()) {  // nobody may have heard of it yet
    told = *state_->refusal;
    told.kind = Failure::Kind::kLost;
  }
  try {
    say_farewell(told);
  } catch (const std::exception& error) {  // the others come to their time limit
    *state_->broken += std::string("; the other ranks were not told: ") + error.what();
  }
}

void FramedExchange::say_farewell(const Failure& failure) { say(failure); }

}  // namespace syncbn
