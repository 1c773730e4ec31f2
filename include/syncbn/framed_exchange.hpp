// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "syncbn/communicator.hpp"
#include "syncbn/export.h"
#include "syncbn/message.hpp"

namespace syncbn {

namespace detail {
struct Failure;
}

/// A group over any all-reduce that sums equally many int64 words of all ranks. A class derived
/// from it brings that all-reduce, in two halves.
///
/// Such an all-reduce hangs, or ends the process, if ranks bring different lengths or none. So an
/// exchange first sums a frame, which has one length in all calls. The frame says how many words
/// the rank brings, or that the rank brings none. It has room for the first words. Words that do
/// not fit follow in a second sum.
///
/// If lengths differ, every rank gets DivergenceError. If a rank refuses its call, the others get
/// PeerLost. In both cases the group goes on. After any other error the group is broken, and later
/// calls throw PeerLost.
class SYNCBN_API FramedExchange : public Communicator {
 public:
  /// The words of a message that fit a frame: those of 512 channels of float32.
  static constexpr std::size_t kFrameWords = kHeaderWords + 512 * 19;

  /// rank and size: of this end. frame_words: the words of a message that fit the frame, the same
  /// on all ranks.
  FramedExchange(int rank, int size, std::size_t frame_words = kFrameWords);
  FramedExchange(const FramedExchange&) = delete;
  FramedExchange& operator=(const FramedExchange&) = delete;
  /// Memory of sums that are not complete stays allocated.
  ~FramedExchange() override;

  int rank() const override;
  int size() const override;
  void all_reduce_sum(std::span<std::int64_t> words) override;
  /// refuse and abandon take part in the next exchange of the other ranks, and do not wait for it.
  void refuse(const std::string& reason) override;
  void abandon(const std::string& reason) override;

 protected:
  /// Begins to sum `words` over all ranks, in place, without waiting. All ranks begin the same sums
  /// in the same order. The memory stays valid until the sum is complete.
  virtual void begin_sum(std::span<std::int64_t> words) = 0;

  /// Waits until the oldest sum that was begun is complete. Throws ExchangeTimeout or PeerLost,
  /// with the ranks to blame, on every rank if not all ranks come.
  virtual void wait_for_sum() = 0;

  /// Tells the other ranks that this one leaves the group. By default the next exchange tells them.
  virtual void say_farewell(const detail::Failure& failure);

  /// Refuses the next exchange, or leaves the group. The others get the failure as their error.
  void refuse_with(const detail::Failure& failure);
  void leave_with(const detail::Failure& failure);

  /// Waits for the exchange that this rank refused, unless it has already done so.
  void settle();

  /// Sets the rank numbers in errors, for a group that is a part of a larger group of `size` ranks.
  void call_ranks(std::vector<int> numbers, int size);
  [[nodiscard]] int number(int rank) const;
  /// Returns "rank R of N: ", which begins an error's text.
  [[nodiscard]] std::string who() const;
  [[nodiscard]] bool is_broken() const;

 private:
  struct State;
  void check_usable() const;
  void exchange(std::span<std::int64_t> words);
  template <class Half>
  void or_break(const Half& half);
  void begin(std::vector<std::int64_t> words);
  std::vector<std::int64_t> finish();
  std::vector<detail::Failure> heard();
  [[noreturn]] void raise(const std::vector<detail::Failure>& of) const;
  void say(const detail::Failure& failure);
  std::unique_ptr<State> state_;
};

}  // namespace syncbn
