// SPDX-License-Identifier: Apache-2.0
#include "comm/shared_barrier.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "comm/futex.hpp"
#include "comm/rank_texts.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// Rounds of looking before a waiting rank yields, and of yielding before it sleeps. A rank that
/// shares the core only comes while this one yields: measured, 200 rounds of looking take 15 µs.
constexpr int kSpins = 20;
constexpr int kYields = 60;
/// How long it sleeps at most before it looks whether the others still live.
constexpr milliseconds kSleep(50);

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// `state`: the number of the last barrier that all ranks have reached, and who has broken the
/// group, if anybody has (its rank + 1).
constexpr std::uint64_t pack(std::uint64_t met, int breaker) {
  return met << 16 | static_cast<std::uint64_t>(breaker + 1);
}
constexpr std::uint64_t met_of(std::uint64_t state) { return state >> 16; }
constexpr int breaker_of(std::uint64_t state) { return static_cast<int>(state & 0xffff) - 1; }
constexpr int kNobody = -1;
/// A breaker that is no rank.
constexpr int kOverwritten = 0xfffe;

constexpr std::size_t whole_pages(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

constexpr std::size_t slot_bytes(std::size_t ranks) {
  return kPieceBytes + whole_pages(kPieceBytes / ranks);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

/// What the memory begins with.
struct SharedBarrier::Control {
  std::byte nonce[16];
  alignas(64) std::atomic<std::uint64_t> state;
  std::atomic<std::uint32_t> bell;  ///< the futex; counts changes of `state`
  std::atomic<std::uint32_t> sleepers;

  static std::size_t bytes_with_areas(std::size_t ranks) {
    return whole_pages(sizeof(Control) + ranks * sizeof(RankArea));
  }
};

std::size_t SharedBarrier::control_bytes(int ranks) {
  return Control::bytes_with_areas(static_cast<std::size_t>(ranks));
}

std::size_t SharedBarrier::memory_bytes(int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  return control_bytes(ranks) + n * 2 * slot_bytes(n);
}

SharedBarrier::SharedBarrier(std::byte* memory, std::vector<Peer> peers, int rank, int size,
                             milliseconds timeout, pid_t process)
    : memory_(memory),
      peers_(std::move(peers)),
      rank_(static_cast<std::size_t>(rank)),
      size_(static_cast<std::size_t>(size)),
      numbers_(size_),
      of_(size_),
      timeout_(timeout),
      slots_(Control::bytes_with_areas(size_)),
      slot_(slot_bytes(size_)),
      process_(process) {
  for (const Peer& peer : peers_) {
    alive_.push_back({peer.alive.get(), POLLIN, 0});
  }
  std::iota(numbers_.begin(), numbers_.end(), 0);
}

void SharedBarrier::call_ranks(std::vector<int> numbers, std::size_t of) {
  numbers_ = std::move(numbers);
  of_ = of;
}

std::string SharedBarrier::who() const { return rank_of(number(rank_), of_); }

SharedBarrier::Control& SharedBarrier::control() const {
  return *reinterpret_cast<Control*>(memory_);
}

RankArea& SharedBarrier::area(std::size_t rank) const {
  return reinterpret_cast<RankArea*>(memory_ + sizeof(Control))[rank];
}

bool SharedBarrier::in_own_process() const { return process_ == 0 || getpid() == process_; }

void SharedBarrier::check_process() const {
  if (!in_own_process()) {
    throw Error(who() + "process " + std::to_string(getpid()) +
                " was forked from the rank's process and has no part in its group");
  }
}

void SharedBarrier::check_usable() const {
  check_process();
  const std::uint64_t state = control().state.load();
  if (breaker_of(state) != kNobody) {
    throw_broken(state, false);
  }
}

bool SharedBarrier::broken() const {
  check_process();
  return breaker_of(control().state.load()) != kNobody;
}

void SharedBarrier::arrive() {
  ++number_;
  arrived_at_ = Clock::now();
  waited_before_ = waited_;
  area(rank_).arrived.store(number_);
  try_meet();
}

void SharedBarrier::begin_waits_again() {
  arrived_at_ = Clock::now();
  waited_ = waited_before_ = milliseconds(0);
}

/// Not only for the last rank that comes: it could die between arriving and saying so.
void SharedBarrier::try_meet() {
  for (std::size_t r = 0; r < size_; ++r) {
    if (area(r).arrived.load() < number_) {
      return;
    }
  }
  std::uint64_t before = pack(number_ - 1, kNobody);
  if (control().state.compare_exchange_strong(before, pack(number_, kNobody))) {
    ring();
  }
}

/// Whether this rank's barrier is met; throws if the group broke before.
bool SharedBarrier::met() const {
  for (;;) {
    std::uint64_t state = control().state.load();
    if (met_of(state) == number_) {
      return true;
    }
    // This rank has passed the barrier before, and no rank passes the next one without it.
    const bool possible = met_of(state) + 1 == number_;
    if (breaker_of(state) != kNobody && (possible || breaker_of(state) == kOverwritten)) {
      throw_broken(state, true);
    }
    if (possible) {
      return false;
    }
    // Nobody would wait for what comes of it: the others take this rank's word.
    if (control().state.compare_exchange_strong(state, pack(number_ - 1, kOverwritten))) {
      ring();
    }
  }
}

bool SharedBarrier::wait(milliseconds slice) {
  for (int i = 0; i < kSpins + kYields; ++i) {
    if (met()) {
      return true;
    }
    if (i < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
  const auto begin = Clock::now();
  const milliseconds before = waited_;
  for (bool slept = false;; slept = true) {
    try_meet();
    if (met()) {
      return true;
    }
    const auto now = Clock::now();
    const auto left = slice - duration_cast<milliseconds>(now - begin);
    const auto waited = waited_before_ + duration_cast<milliseconds>(now - arrived_at_);
    waited_ = before + slice - left;
    if (slept || left <= milliseconds(0)) {
      look_at_peers();
    }
    look_at_clock(waited);
    if (left <= milliseconds(0)) {
      return met();
    }
    sleep(std::min({kSleep, left, std::max(timeout_ - waited, milliseconds(1))}));
  }
}

void SharedBarrier::sleep(milliseconds limit) {
  Control& shared = control();
  // A change of state before the look at it is seen, a later one also changes the bell or wakes.
  shared.sleepers.fetch_add(1);
  const std::uint32_t bell = shared.bell.load();
  if (shared.state.load() == pack(number_ - 1, kNobody)) {
    futex_wait(shared.bell, bell, limit);
  }
  shared.sleepers.fetch_sub(1);
}

/// After a change of state.
void SharedBarrier::ring() const {
  Control& shared = control();
  shared.bell.fetch_add(1);
  if (shared.sleepers.load() > 0) {
    futex_wake_all(shared.bell);
  }
}

void SharedBarrier::look_at_peers() {
  if (alive_.empty() || poll(alive_.data(), static_cast<nfds_t>(alive_.size()), 0) <= 0) {
    return;
  }
  for (std::size_t i = 0; i < alive_.size(); ++i) {
    const Peer& peer = peers_[i];
    // One that came to this barrier before it ended has done its part of it.
    const auto r = static_cast<std::size_t>(peer.rank);
    if (alive_[i].revents != 0 && area(r).arrived.load() < number_) {
      break_at(number_ - 1, Cause::kDied,
               "rank " + std::to_string(number(r)) + " is gone: its process " +
                   std::to_string(peer.process) + " ended",
               {peer.rank});
      return;
    }
  }
}

void SharedBarrier::look_at_clock(milliseconds waited) {
  if (waited < timeout_) {
    return;
  }
  std::vector<int> missing;
  std::vector<int> numbers;
  for (std::size_t r = 0; r < size_; ++r) {
    if (area(r).arrived.load() < number_) {
      missing.push_back(static_cast<int>(r));
      numbers.push_back(number(r));
    }
  }
  if (!missing.empty()) {
    break_at(number_ - 1, Cause::kTimeout, missing_text(numbers, timeout_), missing);
  }
}

/// Breaks the group, unless it is broken or has met another barrier meanwhile.
bool SharedBarrier::break_at(std::uint64_t last_met, Cause cause, const std::string& text,
                             const std::vector<int>& about) {
  std::uint64_t before = pack(last_met, kNobody);
  if (control().state.load() != before) {
    return false;  // if this rank broke it, others are reading its reason
  }
  RankArea& mine = area(rank_);
  std::size_t length = std::min(text.size(), sizeof(mine.reason) - 1);
  while (length > 0 && length < text.size() &&
         (static_cast<unsigned char>(text[length]) & 0xc0u) == 0x80u) {
    --length;  // not in the middle of a character
  }
  mine.cause = cause;
  std::memcpy(mine.reason, text.data(), length);
  mine.reason[length] = '\0';
  mine.about = RankSet::of(about);
  const bool broken =
      control().state.compare_exchange_strong(before, pack(last_met, static_cast<int>(rank_)));
  if (broken) {
    ring();
  }
  return broken;
}

void SharedBarrier::abandon(const std::string& reason, Cause cause) {
  check_process();
  told_ = true;
  for (;;) {
    const std::uint64_t state = control().state.load();
    if (breaker_of(state) != kNobody ||
        break_at(met_of(state), cause, reason, {static_cast<int>(rank_)})) {
      return;
    }
  }
}

/// waiting: this rank waits while the group breaks; otherwise it comes to a broken group. The first
/// error says what happened, the later ones that it was before.
void SharedBarrier::throw_broken(std::uint64_t state, bool waiting) const {
  const int breaker = breaker_of(state);
  const std::string place = who();
  // What other processes write can be anything.
  if (static_cast<std::size_t>(breaker) >= size_) {
    throw PeerLost(place + "the memory of the group was overwritten");
  }
  const RankArea& its = area(static_cast<std::size_t>(breaker));
  const std::string reason(its.reason, strnlen(its.reason, sizeof(its.reason)));
  std::vector<int> about = its.about.list();
  for (int& rank : about) {
    rank = number(std::min(static_cast<std::size_t>(rank), size_ - 1));
  }
  const Cause cause = its.cause;
  const bool told = std::exchange(told_, true);
  if (cause == Cause::kTimeout && waiting) {
    throw ExchangeTimeout(place + reason, about);
  }
  const int from = number(static_cast<std::size_t>(breaker));
  const std::string what = cause == Cause::kLeft      ? left_text(from, reason)
                           : cause == Cause::kRefused ? refused_text(from, reason)
                                                      : reason;
  throw PeerLost(place + (told || cause == Cause::kTimeout ? broken_text(what) : what), about);
}

}  // namespace syncbn
