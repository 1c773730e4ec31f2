// SPDX-License-Identifier: Apache-2.0
#include "comm/slot_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"
#include "tensors/checks.hpp"

namespace syncbn {
namespace {

constexpr std::size_t kWord = sizeof(std::uint64_t);
/// From this length on, three and more ranks sum a stripe each and then copy the stripes of the
/// others, which costs one barrier more; below, every rank sums everything.
constexpr std::size_t kStripedBytes = std::size_t{32} << 10;
/// Of the text by which a rank refuses an exchange.
constexpr std::size_t kReasonBytes = 512;
/// A wait without end: the barrier has a limit of its own.
constexpr std::chrono::milliseconds kLong = std::chrono::hours(1);

void add_words(std::uint64_t* __restrict to, const std::uint64_t* __restrict from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    to[i] += from[i];
  }
}

void copy_bytes(void* to, const void* from, std::size_t n) {
  if (n > 0) {  // memcpy refuses null even then
    std::memcpy(to, from, n);
  }
}

}  // namespace

void SlotExchange::open(std::span<const std::int64_t> in, std::span<std::int64_t> out) {
  if (out.size() != in.size()) {
    throw InvalidArgument("out: got " + std::to_string(out.size()) + " words, expected " +
                          std::to_string(in.size()));
  }
  barrier_.check_usable();
  if (under_way_) {
    throw Error(barrier_.who() + "an exchange is under way already");
  }
  in_ = reinterpret_cast<const std::byte*>(in.data());
  out_ = reinterpret_cast<std::byte*>(out.data());
  bytes_ = in.size_bytes();
  published_ = brought_ = stripes_ = 0;
  under_way_ = true;
  if (refused_) {
    barrier_.begin_waits_again();
  } else {
    arrived_ = false;
    barrier_.begin_waits();
  }
}

void SlotExchange::publish(std::size_t words) {
  barrier_.check_process();
  if (words > bytes_ / kWord || words < published_ / kWord) {
    throw InvalidArgument("publish: got " + std::to_string(words) + " words, expected " +
                          std::to_string(published_ / kWord) + " to " +
                          std::to_string(bytes_ / kWord));
  }
  published_ = words * kWord;
  try {
    if (arrived_ && barrier_.met()) {
      advance();
    }
    come();
  } catch (...) {
    under_way_ = false;
    throw;
  }
}

bool SlotExchange::wait(std::size_t words, milliseconds slice) {
  check_timeout(slice, "slice", 0);
  if (words > bytes_ / kWord) {
    throw InvalidArgument("wait: got " + std::to_string(words) + " words, expected 0 to " +
                          std::to_string(bytes_ / kWord));
  }
  return wait_for(words * kWord, slice);
}

/// Until so many bytes of the result are there, or, if those are all, the exchange is over.
bool SlotExchange::wait_for(std::size_t bytes, milliseconds slice) {
  barrier_.check_process();
  const milliseconds until = barrier_.waited() + slice;
  try {
    come();
    while (under_way_ && (bytes == bytes_ || brought_ - stripes_ < bytes)) {
      if (!arrived_) {
        throw Error("wait: got " + std::to_string(bytes) + " bytes, expected those published, " +
                    std::to_string(published_));
      }
      if (!barrier_.wait(until - barrier_.waited())) {
        return false;
      }
      advance();
      come();
    }
  } catch (...) {
    under_way_ = false;
    throw;
  }
  return true;
}

void SlotExchange::finish() {
  published_ = bytes_;
  while (!wait_for(bytes_, kLong)) {
  }
}

void SlotExchange::all_reduce_sum(std::span<std::int64_t> words) {
  open(words, words);
  finish();
}

void SlotExchange::abandon(const std::string& reason) {
  bool unheard = false;  // some have not come to the exchange that this rank refused
  try {
    unheard = refused_ && !barrier_.met();
  } catch (const Error&) {
    unheard = false;  // the group is broken already
  }
  if (unheard) {
    barrier_.abandon(refusal_of(barrier_.rank()), RankArea::Cause::kRefused);
  } else {
    barrier_.abandon(reason);
  }
  under_way_ = false;
}

void SlotExchange::refuse(const std::string& reason) {
  if (under_way_) {
    return abandon(reason);
  }
  try {
    barrier_.check_usable();
    if (refused_) {
      barrier_.begin_waits_again();
      while (!barrier_.wait(kLong)) {
      }
    }
    const std::uint64_t next = barrier_.number() + 1;
    const std::size_t length = std::min(reason.size(), kReasonBytes);
    copy_bytes(barrier_.slot(barrier_.rank(), next), reason.data(), length);
    barrier_.area(barrier_.rank()).message[next % 2].set(length, 0, 1);
    arrived_ = refused_ = true;
    barrier_.arrive();
  } catch (const Error&) {
    return;  // the group is broken, as the others know
  }
}

std::string SlotExchange::refusal_of(std::size_t rank) const {
  const auto& message = barrier_.area(rank).message[barrier_.number() % 2];
  const auto* text = reinterpret_cast<const char*>(barrier_.slot(rank, barrier_.number()));
  return {text, strnlen(text, std::min<std::size_t>(message.bytes, kReasonBytes))};
}

std::uint64_t* SlotExchange::words(std::size_t rank) const {
  return reinterpret_cast<std::uint64_t*>(barrier_.slot(rank, barrier_.number()));
}

std::uint64_t* SlotExchange::stripe(std::size_t rank, std::uint64_t number) const {
  return reinterpret_cast<std::uint64_t*>(barrier_.slot(rank, number) + kPieceBytes);
}

/// To the next barrier, if there is something to bring or to collect there.
void SlotExchange::come() {
  if (!under_way_ || arrived_ || (published_ == brought_ && stripes_ == 0 && bytes_ > 0)) {
    return;
  }
  const std::uint64_t next = barrier_.number() + 1;
  const std::size_t length = std::min(published_ - brought_, kPieceBytes);
  copy_bytes(barrier_.slot(barrier_.rank(), next), in_ + brought_, length);
  barrier_.area(barrier_.rank()).message[next % 2].set(bytes_, brought_ + length, 0);
  arrived_ = true;
  barrier_.arrive();
}

/// After a barrier: reads the others' slots.
void SlotExchange::advance() {
  arrived_ = false;
  if (std::exchange(refused_, false)) {
    return;
  }
  const std::size_t length = common_end() - brought_;
  if (stripes_ > 0) {
    collect_stripes();
    stripes_ = 0;
  }
  if (barrier_.size() > 2 && length >= kStripedBytes) {
    sum_stripe(length);
    stripes_ = length;
  } else {
    add_piece(length);
  }
  brought_ += length;
  under_way_ = brought_ < bytes_ || stripes_ > 0;
}

/// Where the piece ends that all ranks have brought. Every rank sees the same.
std::size_t SlotExchange::common_end() {
  std::size_t end = brought_ + std::min(bytes_ - brought_, kPieceBytes);
  for (std::size_t r = 0; r < barrier_.size(); ++r) {
    const auto& other = barrier_.area(r).message[barrier_.number() % 2];
    if (other.bytes != bytes_ || other.refused != 0) {
      throw_mismatch(r);
    }
    end = std::min<std::size_t>(end, other.end);
  }
  if (end < brought_) {  // what other processes write can be anything
    const std::string reason = "the memory of the group was overwritten";
    barrier_.abandon(reason, RankArea::Cause::kFault);
    throw PeerLost(barrier_.who() + reason);
  }
  return end;
}

void SlotExchange::throw_mismatch(std::size_t other) const {
  const auto brought = [&](std::size_t rank) -> const auto& {
    return barrier_.area(rank).message[barrier_.number() % 2];
  };
  std::vector<int> odd;
  std::string refusals;
  for (std::size_t r = 0; r < barrier_.size(); ++r) {
    if (brought(r).refused != 0) {
      odd.push_back(barrier_.number(r));
      refusals += (refusals.empty() ? "" : "; ") + refused_text(odd.back(), refusal_of(r));
    }
  }
  if (!odd.empty()) {
    throw PeerLost(barrier_.who() + refusals, odd);
  }
  for (std::size_t r = 1; r < barrier_.size(); ++r) {
    if (brought(r).bytes != brought(0).bytes) {
      odd.push_back(barrier_.number(r));
    }
  }
  throw DivergenceError(divergence_text(barrier_.number(barrier_.rank()), barrier_.numbers_of(),
                                        bytes_, barrier_.number(other), brought(other).bytes),
                        odd);
}

void SlotExchange::add_piece(std::size_t length) const {
  if (out_ != in_) {
    copy_bytes(out_ + brought_, in_ + brought_, length);
  }
  auto* to = reinterpret_cast<std::uint64_t*>(out_ + brought_);
  for (std::size_t r = 0; r < barrier_.size(); ++r) {
    if (r != barrier_.rank()) {
      add_words(to, words(r), length / kWord);
    }
  }
}

/// This rank's share of the piece, for the next barrier.
void SlotExchange::sum_stripe(std::size_t length) const {
  const std::size_t n = length / kWord;
  const std::size_t begin = n * barrier_.rank() / barrier_.size();
  const std::size_t count = n * (barrier_.rank() + 1) / barrier_.size() - begin;
  std::uint64_t* to = stripe(barrier_.rank(), barrier_.number() + 1);
  copy_bytes(to, words(0) + begin, count * kWord);
  for (std::size_t r = 1; r < barrier_.size(); ++r) {
    add_words(to, words(r) + begin, count);
  }
}

/// Of the piece before, whose shares lie in this barrier's slots.
void SlotExchange::collect_stripes() const {
  std::byte* const to = out_ + brought_ - stripes_;
  const std::size_t n = stripes_ / kWord;
  for (std::size_t r = 0; r < barrier_.size(); ++r) {
    const std::size_t begin = n * r / barrier_.size();
    const std::size_t end = n * (r + 1) / barrier_.size();
    copy_bytes(to + begin * kWord, stripe(r, barrier_.number()), (end - begin) * kWord);
  }
}

}  // namespace syncbn
