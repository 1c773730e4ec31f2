// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "syncbn/batch_norm.hpp"
#include "syncbn/export.hpp"
#include "syncbn/group_passes.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/tensor.hpp"

/// A direction of a layer on one rank, for those who own the exchange themselves. It has two doors:
/// begin writes this rank's message; the caller sums the messages of all ranks (any int64 SUM
/// all-reduce does); finish makes statistics of the sum and writes the outputs. Both are here for
/// the CPU and for CUDA, where they enqueue kernels and wait for nothing. On the CPU one rank
/// alone, or a group whose sum travels in parts, has a direction in one call.
///
/// All functions throw InvalidArgument before they write anything.
namespace syncbn {

/// The messages of all ranks as one. words: what follows the header. On CUDA it follows the header
/// in memory, too, and dtype says in which format it is; on the CPU the header says it. In the
/// welford mode words are the ranks' records, one after another; on CUDA each behind its header.
struct Merged {
  const std::int64_t* header = nullptr;
  const std::int64_t* words = nullptr;
  DType dtype = DType::kFloat32;
  int ranks = 1;
};

/// What a forward updates besides its output; each may be absent.
struct Running {
  MutableTensorView mean = {};
  MutableTensorView var = {};
  std::int64_t* batches = nullptr;      ///< one more, unless the batch is empty
  std::int64_t* call = nullptr;         ///< one more
  std::int64_t* count = nullptr;        ///< elements per channel over all ranks
  std::optional<double> momentum = {};  ///< empty: cumulative averaging by `batches`

  /// Throws InvalidArgument where the counter of batches cannot be used. CPU.
  SYNCBN_API void check() const;
  /// Updates them. CPU.
  SYNCBN_API void update(const double* mean, const double* var, std::int64_t channels,
                         std::int64_t elements) const;
};

/// A forward. info: two words, which backward reads: elements per channel over all ranks, and the
/// call's fingerprint.
struct ForwardStep {
  ForwardPass pass = {};
  Statistics statistics = Statistics::kReproducible;
  std::uint64_t layer = 0;             ///< what ranks must share of the layer: layer_identity()
  const std::int64_t* call = nullptr;  ///< which call of it this is; null: 0
  std::int64_t backward = 0;           ///< the header's word kHeaderBackward
  Running running = {};
  std::int64_t* info = nullptr;
  std::int64_t* workspace = nullptr;  ///< CUDA: cuda::workspace_words() words
};

/// Words of the message of a forward in that mode.
SYNCBN_API std::int64_t forward_words(Statistics statistics, DType dtype, std::int64_t channels);

/// Sums of x into the message. The outputs of the pass may be absent.
SYNCBN_API void forward_begin(const ForwardStep& step, std::int64_t* message,
                              const Execution& execution);

/// The rest: statistics, what is updated, and y, unless it is absent.
SYNCBN_API void forward_finish(const ForwardStep& step, const Merged& merged,
                               const Execution& execution);

/// y, of statistics that are there.
SYNCBN_API void forward_map(const ForwardPass& pass, const Execution& execution);

/// Given statistics as a forward's, C entries each.
SYNCBN_API void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                                      double* mean, double* var, double* rstd, double eps,
                                      const Execution& execution);

/// A backward. pass.count is not read.
struct BackwardStep {
  BackwardPass pass = {};
  const std::int64_t* info = nullptr;  ///< the forward's
  double* coefficients = nullptr;      ///< room for 3 C numbers
  std::int64_t* workspace = nullptr;
};

/// Throws DivergenceError unless backward is of as many elements per channel as forward was.
SYNCBN_API void check_count(std::int64_t backward, std::int64_t forward);

/// Sums of the gradient into the message, and u, if it is there. copy: null, or on CUDA where the
/// message goes a second time.
SYNCBN_API void backward_begin(const BackwardStep& step, std::int64_t* message, std::int64_t* copy,
                               const Execution& execution);

/// Gradients of weight and bias, and dx. From u, where it is there. own: the message that this rank
/// sent, where pass.share.
SYNCBN_API void backward_finish(const BackwardStep& step, const std::int64_t* own,
                                const Merged& merged, const Execution& execution);

/// Gradients of weight and bias alone, of this rank's samples.
SYNCBN_API void backward_shares(const BackwardStep& step, const std::int64_t* own,
                                const Execution& execution);

}  // namespace syncbn
