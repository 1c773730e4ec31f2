// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "comm/shared_barrier.hpp"
#include "syncbn/communicator.hpp"

namespace syncbn {

/// One rank's exchanges through slots. An exchange is a row of barriers. To each a rank brings what
/// it has published and the others have not all had, and all go on from where the one ends that
/// brought least: so ranks need not have the same parts ready. No rank waits for another after the
/// last barrier, so that an exchange succeeds, like a barrier, for all ranks or for none.
class SlotExchange : public Communicator, public SumInParts {
 public:
  using milliseconds = std::chrono::milliseconds;

  explicit SlotExchange(SharedBarrier barrier) : barrier_(std::move(barrier)) {}

  void open(std::span<const std::int64_t> in, std::span<std::int64_t> out) override;
  void publish(std::size_t words) override;
  bool wait(std::size_t words, milliseconds slice) override;

  int rank() const override { return static_cast<int>(barrier_.rank()); }
  int size() const override { return static_cast<int>(barrier_.size()); }
  SumInParts* parts() override { return this; }
  void all_reduce_sum(std::span<std::int64_t> words) override;
  void abandon(const std::string& reason) override;
  /// Comes to the next barrier with the reason in place of a message, and does not wait there: that
  /// is made up for by the next exchange. In the middle of an exchange this is abandon.
  void refuse(const std::string& reason) override;

  void reset(SharedBarrier barrier) {
    *this = SlotExchange(std::move(barrier));
    begin_again();
  }

  SharedBarrier& barrier() { return barrier_; }
  const SharedBarrier& barrier() const { return barrier_; }

 private:
  bool wait_for(std::size_t bytes, milliseconds slice);
  void finish();
  void come();
  void advance();
  std::size_t common_end();
  void add_piece(std::size_t length) const;
  void sum_stripe(std::size_t length) const;
  void collect_stripes() const;
  std::uint64_t* words(std::size_t rank) const;
  std::uint64_t* stripe(std::size_t rank, std::uint64_t number) const;
  [[noreturn]] void throw_mismatch(std::size_t other) const;
  std::string refusal_of(std::size_t rank) const;

  SharedBarrier barrier_;
  // The exchange under way. Bytes are counted from the message's first.
  bool under_way_ = false;
  bool arrived_ = false;  ///< at a barrier that it has not seen met
  bool refused_ = false;  ///< and has no message there
  const std::byte* in_ = nullptr;
  std::byte* out_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t published_ = 0;
  std::size_t brought_ = 0;  ///< by all ranks
  std::size_t stripes_ = 0;  ///< of which ranks have summed a stripe each, and not yet collected
};

}  // namespace syncbn
