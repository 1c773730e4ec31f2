// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/cpu_passes.hpp"
#include "cpu/kernels.hpp"
#include "cpu/packed.hpp"
#include "cpu/windows.hpp"
#include "statistics/dtype.hpp"

namespace syncbn::cpu {

/// Where the sums of channels become what the caller wants of them. Several threads call it, for
/// channels of their own.
class SumsSink {
 public:
  virtual ~SumsSink() = default;
  /// windows: all that this rank has of the channels from `begin` on.
  virtual void publish(Windows& windows, std::int64_t begin) = 0;
};

/// A message's words, of all channels.
class WordsSink final : public SumsSink {
 public:
  WordsSink(DType dtype, std::int64_t* words)
      : per_channel_(format_of(dtype).words()), words_(words) {}
  void publish(Windows& windows, std::int64_t begin) override {
    for (std::int64_t c = 0; c < windows.channels(); ++c) {
      windows.write_words(c, words_ + (begin + c) * per_channel_);
    }
  }

 private:
  int per_channel_;
  std::int64_t* words_;
};

/// Sums of u and u*v by the vector kernels. What is given must outlive this.
class VectorSums {
 public:
  /// Of x and x*x.
  explicit VectorSums(const SampleView& x);
  /// Of u and u*x, u being dy pulled back; stored in u if not null.
  VectorSums(const SampleView& dy, const SampleView& x, const SampleView* u,
             const Pullback& pullback);

  /// Whether the kernels can do it.
  bool possible() const { return possible_; }
  bool in_rows() const { return rows_; }
  /// All channels, dealt to threads.
  void run(SumsSink& sink, Executor& executor) const;
  /// Planes: channels [begin, end) on this thread, while it does something else, if not null.
  Windows sum(std::int64_t begin, std::int64_t end, const Meanwhile* meanwhile) const;

 private:
  struct Share;
  void sum(const Share& share, const Meanwhile* meanwhile, Windows& windows) const;
  std::int64_t units() const;
  SumsTask task(std::int64_t channel, ElementConstants& constants) const;

  const Kernels* kernels_;
  const SampleView* u_;
  const SampleView* v_ = nullptr;  ///< null: u
  const SampleView* out_ = nullptr;
  const Pullback* pullback_ = nullptr;  ///< null: u is summed as it is
  bool rows_;
  bool possible_;
  std::optional<PackedConstants> packed_;
};

/// Words of all channels by the vector kernels, or by loops() where they cannot.
template <class Loops>
void sum_words(const VectorSums& sums, DType dtype, std::int64_t* words, Executor& executor,
               const Loops& loops) {
  if (!sums.possible()) {
    loops();
    return;
  }
  WordsSink sink(dtype, words);
  sums.run(sink, executor);
}

}  // namespace syncbn::cpu
