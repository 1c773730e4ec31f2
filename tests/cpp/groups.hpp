// SPDX-License-Identifier: Apache-2.0
#pragma once

// Groups of each kind whose ranks are threads of the test, behind one interface.

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "syncbn/communicator.hpp"
#include "syncbn/framed_exchange.hpp"
#include "syncbn/shared_memory.hpp"

namespace syncbn::testing {

/// Brings the bytes of all ranks to each, in rank order.
inline void gather(Communicator& group, std::span<const std::byte> mine, std::span<std::byte> all) {
  std::vector<std::int64_t> words(all.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    words[static_cast<std::size_t>(group.rank()) * mine.size() + i] =
        std::to_integer<std::int64_t>(mine[i]);
  }
  group.all_reduce_sum(words);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::byte>(words[i]);
  }
}

enum class GroupKind { kThreads, kSharedMemory, kFramed };

inline std::string name(GroupKind kind) {
  return kind == GroupKind::kThreads        ? "Threads"
         : kind == GroupKind::kSharedMemory ? "SharedMemory"
                                            : "Framed";
}

class Group {
 public:
  virtual ~Group() = default;
  virtual int size() const = 0;
  virtual Communicator& rank(int rank) = 0;
};

class Threads final : public Group {
 public:
  Threads(int size, std::chrono::milliseconds timeout) : group_(size, timeout) {}
  int size() const override { return group_.size(); }
  Communicator& rank(int rank) override { return group_.rank(rank); }

 private:
  ThreadGroup group_;
};

/// Every rank maps the memory for itself, at an address of its own.
class SharedMemoryRanks final : public Group {
 public:
  SharedMemoryRanks(int size, std::chrono::milliseconds timeout) {
    std::vector<SharedMemoryOffer> offers;
    std::vector<std::byte> bytes;
    for (int r = 0; r < size; ++r) {
      offers.emplace_back(r, size);
      bytes.insert(bytes.end(), offers.back().bytes().begin(), offers.back().bytes().end());
    }
    for (SharedMemoryOffer& offer : offers) {
      auto opened = SharedMemoryGroup::open(std::move(offer), bytes, timeout);
      EXPECT_EQ(opened.why, "");
      ranks_.push_back(std::move(opened.group));
    }
  }
  int size() const override { return static_cast<int>(ranks_.size()); }
  SharedMemoryGroup& rank(int rank) override { return *ranks_.at(static_cast<std::size_t>(rank)); }

 private:
  std::vector<std::unique_ptr<SharedMemoryGroup>> ranks_;
};

/// Over an all-reduce of threads that goes on by itself, as a network's does.
class FramedEnd final : public FramedExchange {
 public:
  explicit FramedEnd(Communicator& end) : FramedExchange(end.rank(), end.size(), 40), end_(end) {}

 private:
  void begin_sum(std::span<std::int64_t> words) override {
    last_ = std::async(std::launch::async, [this, words, before = last_] {
              if (before.valid()) {
                before.wait();
              }
              end_.all_reduce_sum(words);
            }).share();
    sums_.push_back(last_);
  }
  void wait_for_sum() override {
    const auto sum = sums_.front();
    sums_.pop_front();
    sum.get();
  }

  Communicator& end_;
  std::shared_future<void> last_;
  std::deque<std::shared_future<void>> sums_;
};

class FramedRanks final : public Group {
 public:
  FramedRanks(int size, std::chrono::milliseconds timeout) : group_(size, timeout) {
    for (int r = 0; r < size; ++r) {
      ranks_.emplace_back(group_.rank(r));
    }
  }
  int size() const override { return group_.size(); }
  Communicator& rank(int rank) override { return ranks_.at(static_cast<std::size_t>(rank)); }

 private:
  ThreadGroup group_;
  std::deque<FramedEnd> ranks_;
};

inline std::unique_ptr<Group> make_group(
    GroupKind kind, int size, std::chrono::milliseconds timeout = ThreadGroup::kDefaultTimeout) {
  if (kind == GroupKind::kThreads) {
    return std::make_unique<Threads>(size, timeout);
  }
  if (kind == GroupKind::kFramed) {
    return std::make_unique<FramedRanks>(size, timeout);
  }
  return std::make_unique<SharedMemoryRanks>(size, timeout);
}

inline void expect_no_errors(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) {
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
      }
    }
  }
}

}  // namespace syncbn::testing
