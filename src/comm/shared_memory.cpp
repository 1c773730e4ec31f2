// SPDX-License-Identifier: Apache-2.0
#include "syncbn/shared_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "comm/shared_segment.hpp"
#include "comm/slot_exchange.hpp"
#include "syncbn/error.hpp"
#include "tensors/checks.hpp"

namespace syncbn {

using std::chrono::milliseconds;

namespace {

/// Of the text by which a rank tells the others why it has no group.
constexpr std::size_t kWhyBytes = 512;

}  // namespace

struct __attribute__((visibility("hidden"))) SharedMemoryOffer::Resources : LocalOffer {};

struct __attribute__((visibility("hidden"))) SharedMemoryGroup::State final : SlotExchange {
  State(Mapping mapping, Descriptor file, SharedBarrier at)
      : SlotExchange(std::move(at)), memory(std::move(mapping)), memory_file(std::move(file)) {}

  bool wait(std::size_t words, milliseconds slice) override {
    const bool there = SlotExchange::wait(words, slice);
    if (there) {
      memory_file.reset();
    }
    return there;
  }

  Mapping memory;
  Descriptor memory_file;  ///< on rank 0, until all ranks have mapped it
};

SharedMemoryOffer::SharedMemoryOffer(int rank, int size) {
  check_ranks(size);
  check_rank(rank, size);
  resources_ = std::make_shared<Resources>();
  make_offer(rank, size, SharedBarrier::memory_bytes(size), *resources_);
  std::memcpy(bytes_.data(), &resources_->content, sizeof(OfferContent));
}

SharedMemoryGroup::Opened SharedMemoryGroup::create(int rank, int size, const Gather& gather,
                                                    milliseconds timeout) {
  check_timeout(timeout);
  SharedMemoryOffer offer(rank, size);
  const auto ranks = static_cast<std::size_t>(size);
  std::vector<std::byte> offers(ranks * SharedMemoryOffer::kBytes);
  gather(offer.bytes(), offers);
  Opened opened;
  try {
    opened = open(std::move(offer), offers, timeout);
  } catch (const Error& error) {  // the others wait for what this rank says
    opened.why = error.what();
  }
  std::array<char, kWhyBytes> mine{};  // empty where the group is there
  opened.why.copy(mine.data(), mine.size() - 1);
  std::vector<char> all(ranks * mine.size());
  gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t r = 0; r < ranks; ++r) {
    const char* const why = all.data() + r * mine.size();
    if (*why != '\0') {
      return {nullptr,
              "rank " + std::to_string(r) + ": " + std::string(why, strnlen(why, kWhyBytes))};
    }
  }
  return opened;
}

SharedMemoryGroup::Opened SharedMemoryGroup::open(SharedMemoryOffer offer,
                                                  std::span<const std::byte> offers,
                                                  milliseconds timeout) {
  constexpr std::size_t kEach = SharedMemoryOffer::kBytes;
  if (offer.resources_ == nullptr) {
    syncbn::refuse("offer", "one that was used", "a fresh one");
  }
  LocalOffer& mine = *offer.resources_;
  const auto size = static_cast<std::size_t>(mine.content.size);
  const auto rank = static_cast<std::size_t>(mine.content.rank);
  if (mine.content.process != getpid()) {
    syncbn::refuse("offer", "that of process " + std::to_string(mine.content.process),
                   "this process's, " + std::to_string(getpid()));
  }
  check_timeout(timeout);
  if (offers.size() != size * kEach) {
    syncbn::refuse("offers", std::to_string(offers.size()) + " bytes",
                   std::to_string(size * kEach));
  }
  if (std::memcmp(offers.data() + rank * kEach, offer.bytes_.data(), kEach) != 0) {
    syncbn::refuse("offers", "other bytes at place " + std::to_string(rank), "this rank's offer");
  }
  std::vector<OfferContent> contents(size);
  for (std::size_t r = 0; r < size; ++r) {
    std::memcpy(&contents[r], offers.data() + r * kEach, sizeof(OfferContent));
  }
  Segment segment = open_segment(mine, contents, SharedBarrier::memory_bytes(mine.content.size));
  if (!segment.why.empty()) {
    return {nullptr, std::move(segment.why)};
  }
  std::byte* const memory = segment.memory.data();
  auto state =
      std::make_shared<State>(std::move(segment.memory), std::move(mine.memory_file),
                              SharedBarrier(memory, std::move(segment.peers), mine.content.rank,
                                            mine.content.size, timeout, getpid()));
  return {std::unique_ptr<SharedMemoryGroup>(new SharedMemoryGroup(std::move(state))), ""};
}

SharedMemoryGroup::~SharedMemoryGroup() {
  if (state_->barrier().in_own_process()) {
    state_->abandon("its end of the group was destroyed");
  }
}

int SharedMemoryGroup::rank() const { return state_->rank(); }
int SharedMemoryGroup::size() const { return state_->size(); }

SumInParts* SharedMemoryGroup::parts() { return state_.get(); }

void SharedMemoryGroup::all_reduce_sum(std::span<std::int64_t> words) {
  state_->all_reduce_sum(words);
  state_->memory_file.reset();
}

void SharedMemoryGroup::call_ranks(std::vector<int> numbers, int size) {
  const bool fit = std::all_of(numbers.begin(), numbers.end(),
                               [&](int number) { return number >= 0 && number < size; });
  if (numbers.size() != state_->barrier().size() || !fit) {
    throw InvalidArgument("numbers: got " + std::to_string(numbers.size()) + ", expected " +
                          std::to_string(state_->barrier().size()) + " of 0 to " +
                          std::to_string(size - 1));
  }
  state_->barrier().call_ranks(std::move(numbers), static_cast<std::size_t>(size));
}

bool SharedMemoryGroup::broken() const { return state_->barrier().broken(); }

void SharedMemoryGroup::set_timeout(milliseconds timeout) {
  check_timeout(timeout);
  state_->barrier().set_timeout(timeout);
}

void SharedMemoryGroup::abandon(const std::string& reason) { state_->abandon(reason); }
void SharedMemoryGroup::refuse(const std::string& reason) { state_->refuse(reason); }

void SharedMemoryGroup::reset(const Gather& gather) {
  state_->abandon("it makes the group anew");
  Opened opened = create(rank(), size(), gather, state_->barrier().timeout());
  if (opened.group == nullptr) {
    throw Error(opened.why);
  }
  const SharedBarrier& named = state_->barrier();
  opened.group->call_ranks(named.numbers(), static_cast<int>(named.numbers_of()));
  state_.swap(opened.group->state_);
  begin_again();
}

}  // namespace syncbn
