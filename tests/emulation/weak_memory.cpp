// SPDX-License-Identifier: Apache-2.0
#include "weak_memory.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace syncbn::emulation {
namespace {

constexpr std::size_t kMostPending = 48;

// Whole granules are read, of which a part may be outside of what is allocated.
__attribute__((no_sanitize("address"))) std::uint64_t granule_at(std::uintptr_t granule) {
  using Word __attribute__((may_alias)) = std::uint64_t;
  return *reinterpret_cast<const volatile Word*>(granule * 8);
}

std::uint64_t ones(std::size_t bytes) {
  return bytes == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (bytes * 8)) - 1;
}
std::uint64_t part(std::uint64_t granule, std::uintptr_t address, std::size_t bytes) {
  return granule >> (address % 8 * 8) & ones(bytes);
}
/// A bit for each byte of the granule.
std::uint8_t mask_of(std::uintptr_t address, std::size_t bytes) {
  return static_cast<std::uint8_t>(((1u << bytes) - 1) << address % 8);
}
std::uint64_t stored(std::uint64_t, std::uint64_t operand) { return operand; }

std::size_t filter_of(std::uintptr_t granule) { return granule >> 5 & 0xffff; }

}  // namespace

bool View::knows(Epoch epoch) const {
  if (many_ != nullptr && epoch / 64 < many_->size() &&
      ((*many_)[epoch / 64] >> epoch % 64 & 1) != 0) {
    return true;
  }
  const auto end = few_.begin() + count_;
  return std::find(few_.begin(), end, epoch) != end;
}

void View::fold() {
  auto all = many_ == nullptr ? std::vector<std::uint64_t>() : *many_;
  for (std::size_t i = 0; i < count_; ++i) {
    const Epoch epoch = few_[i];
    all.resize(std::max<std::size_t>(all.size(), epoch / 64 + 1));
    all[epoch / 64] |= std::uint64_t{1} << epoch % 64;
  }
  count_ = 0;
  many_ = std::make_shared<const std::vector<std::uint64_t>>(std::move(all));
}

void View::add(Epoch epoch) {
  if (count_ == few_.size()) {
    fold();
  }
  few_[count_++] = epoch;
}

void View::join(const View& other) {
  if (other.many_ != nullptr && other.many_ != many_) {
    if (many_ == nullptr) {
      many_ = other.many_;
    } else {
      const auto& from = *other.many_;
      bool more = from.size() > many_->size();
      for (std::size_t i = 0; !more && i < from.size(); ++i) {
        more = (from[i] & ~(*many_)[i]) != 0;
      }
      if (more) {
        auto all = *many_;
        all.resize(std::max(all.size(), from.size()));
        for (std::size_t i = 0; i < from.size(); ++i) {
          all[i] |= from[i];
        }
        many_ = std::make_shared<const std::vector<std::uint64_t>>(std::move(all));
      }
    }
  }
  for (std::size_t i = 0; i < other.count_; ++i) {
    if (!knows(other.few_[i])) {
      add(other.few_[i]);
    }
  }
}

bool WeakMemory::knows(const Observer& who, const Message& message) {
  return message.epoch == 0 || message.thread == who.thread || who.current.knows(message.epoch);
}

WeakMemory::History* WeakMemory::find(std::uintptr_t address) {
  if (touched_[filter_of(address / 8)] == 0) {
    return nullptr;
  }
  const auto found = histories_.find(address / 8);
  return found == histories_.end() ? nullptr : &found->second;
}

/// Writes to the same bytes that the thread knows of come before its own access.
void WeakMemory::settle_known(const Observer& who, std::uintptr_t granule) {
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    if (pending_[i].address / 8 == granule && knows(who, pending_[i].message)) {
      Pending one = std::move(pending_[i]);
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i--));
      take_effect(std::move(one));
    }
  }
}

void WeakMemory::take_effect(Pending one) {
  const std::uintptr_t granule = one.address / 8;
  const std::uint64_t before = granule_at(granule);
  History& history = histories_[granule];
  touched_[filter_of(granule)] = 1;
  if (history.empty()) {
    history.reserve(4);
    history.emplace_back();
    history.back().value = before;
  }
  const std::uint64_t value = one.update(part(before, one.address, one.bytes), one.operand);
  std::memcpy(reinterpret_cast<void*>(one.address), &value, one.bytes);
  if (one.update != &stored) {  // an atomic: part of the release sequence of what it read
    const auto joined = [](const SharedView& mine, const SharedView& theirs) {
      if (theirs == nullptr || mine == theirs) {
        return mine;
      }
      if (mine == nullptr) {
        return theirs;
      }
      auto both = std::make_shared<View>(*mine);
      both->join(*theirs);
      return SharedView(both);
    };
    const Message& last = newest(history, mask_of(one.address, one.bytes));
    one.message.released = joined(one.message.released, last.released);
    if (last.block == one.message.block) {
      one.message.released_in_block = joined(one.message.released_in_block, last.released_in_block);
    }
  }
  one.message.value = granule_at(granule);
  one.message.bytes = mask_of(one.address, one.bytes);
  one.message.sequence = ++sequence_;
  history.push_back(std::move(one.message));
}

WeakMemory::Message WeakMemory::message_of(Observer& who, const Order& order) {
  if (who.writing == 0) {
    who.writing = ++last_epoch_;
    who.current.add(who.writing);
  }
  Message out;
  out.epoch = who.writing;
  out.thread = who.thread;
  out.block = who.block;
  out.device = who.device;
  out.strong = order.strong;
  out.system = order.system;
  if (order.strong) {
    out.released = who.released;
    out.released_in_block = who.released_in_block;
  }
  return out;
}

void WeakMemory::observe(Observer& who, const Message& message, const Order& order) {
  const bool in_scope = message.device == who.device || (message.system && order.system);
  if (!order.strong || !message.strong || !in_scope) {
    return;
  }
  const bool mate = message.block == who.block;
  for (const SharedView& view : {message.released, mate ? message.released_in_block : nullptr}) {
    if (view != nullptr) {
      (mate ? who.seen_in_block : who.seen).join(*view);
      if (order.acquire && (mate || !order.block_scope)) {
        who.current.join(*view);
      }
    }
  }
}

bool WeakMemory::read(Observer& who, std::uintptr_t address, std::size_t bytes, const Order& order,
                      std::uint64_t* value) {
  if (!pending_.empty()) {
    settle_known(who, address / 8);
  }
  const History* const history = find(address);
  if (history == nullptr) {
    *value = 0;
    std::memcpy(value, reinterpret_cast<const void*>(address), bytes);
    return false;
  }
  const std::uint8_t mask = mask_of(address, bytes);
  const auto last_read = who.last_read.find(address / 8);
  const std::uint64_t read_before = last_read == who.last_read.end() ? 0 : last_read->second;
  // Back to the newest write that the thread knows of, or has read from.
  std::size_t oldest = history->size();
  bool unknown = false;
  while (--oldest > 0) {
    const Message& one = (*history)[oldest];
    const bool concerns = (one.bytes & mask) != 0;
    if (one.sequence <= read_before || (concerns && knows(who, one))) {
      break;
    }
    unknown = unknown || concerns;
  }
  std::size_t at = history->size() - 1;
  if (unknown) {
    at = random_.one_in(2) ? at : oldest + random_.below(at - oldest + 1);
    who.last_read[address / 8] = (*history)[at].sequence;
  }
  const Message& got = (*history)[at];
  *value = part(got.value, address, bytes);
  // Who wrote what it got, which is not the last write to other bytes of the eight.
  const auto writer =
      std::find_if(history->rend() - static_cast<std::ptrdiff_t>(at) - 1, history->rend(),
                   [&](const Message& one) { return (one.bytes & mask) != 0; });
  observe(who, *writer, order);
  return !order.strong && unknown;
}

const WeakMemory::Message& WeakMemory::newest(const History& history, std::uint8_t bytes) {
  return *std::find_if(history.rbegin(), history.rend(),
                       [&](const Message& one) { return (one.bytes & bytes) != 0; });
}

bool WeakMemory::write(Observer& who, std::uintptr_t address, std::size_t bytes, const Order& order,
                       std::uint64_t value) {
  return update(who, address, bytes, order, &stored, value, false, nullptr);
}

bool WeakMemory::update(Observer& who, std::uintptr_t address, std::size_t bytes,
                        const Order& order, Update update, std::uint64_t operand, bool wanted,
                        std::uint64_t* before) {
  settle_known(who, address / 8);
  if (order.release) {
    fence(who, {.release = true, .block_scope = order.block_scope});
  }
  const History* const history = find(address);
  bool race = false;
  if (history != nullptr) {
    const Message& last = newest(*history, mask_of(address, bytes));
    race = !(order.strong && last.strong) && !knows(who, last);
  }
  if (wanted) {
    const std::uint64_t old = part(granule_at(address / 8), address, bytes);
    *before = old;
    if (history != nullptr) {
      observe(who, newest(*history, mask_of(address, bytes)), order);
    }
    operand = update(old, operand);
  }
  Pending one{address, bytes, update, operand, message_of(who, order)};
  if (wanted) {
    one.update = [](std::uint64_t, std::uint64_t value) { return value; };
  }
  if (wanted || order.release || pending_.size() >= kMostPending || !random_.one_in(4)) {
    take_effect(std::move(one));
  } else {
    pending_.push_back(std::move(one));
  }
  return race;
}

void WeakMemory::fence(Observer& who, const Order& order) {
  if (order.acquire) {
    who.current.join(who.seen_in_block);
    if (!order.block_scope) {
      who.current.join(who.seen);
      who.seen = {};
    }
    who.seen_in_block = {};
  }
  if (order.sequential && !order.block_scope) {
    who.current.join(sequential_);
  }
  if (!order.release) {
    return;
  }
  if (order.block_scope) {
    who.released_in_block = std::make_shared<const View>(who.current);
    who.writing = 0;
    return;
  }
  if (order.sequential) {
    sequential_.join(who.current);
  }
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    if (knows(who, pending_[i].message)) {
      Pending one = std::move(pending_[i]);
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i--));
      take_effect(std::move(one));
    }
  }
  who.released = std::make_shared<const View>(who.current);
  who.released_in_block = nullptr;
  who.writing = 0;
}

void WeakMemory::barrier(const std::vector<Observer*>& all) {
  View together;
  for (const Observer* one : all) {
    together.join(one->current);
  }
  for (Observer* one : all) {
    one->current = together;
    one->writing = 0;
  }
}

void WeakMemory::pause() {
  if (!pending_.empty() && random_.one_in(8)) {
    const auto at = pending_.begin() + static_cast<std::ptrdiff_t>(random_.below(pending_.size()));
    Pending one = std::move(*at);
    pending_.erase(at);
    take_effect(std::move(one));
  }
}

void WeakMemory::settle() {
  while (!pending_.empty()) {
    const std::size_t at = random_.below(pending_.size());
    std::swap(pending_[at], pending_.back());
    Pending one = std::move(pending_.back());
    pending_.pop_back();
    take_effect(std::move(one));
  }
}

}  // namespace syncbn::emulation
