// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "syncbn/communicator.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/export.h"
#include "syncbn/message.hpp"
#include "syncbn/options.hpp"
#include "syncbn/tensor.hpp"

/// A direction (forward or backward) of a layer on one rank, for callers with an exchange of their
/// own. A direction has two doors. `begin` writes this rank's message. The caller sums the messages
/// of all ranks. `finish` computes the statistics from the sum and writes the outputs. One rank
/// alone, and a group on the CPU whose sums travel in parts, can make a direction in one call
/// (forward_at_once, backward_at_once). This header has no promise of compatibility between
/// versions.
///
/// Tensors x, dy, y and dx have shape (N, C, spatial...), any strides and one dtype. Arrays of
/// doubles have C entries. All memory is on x's device, also messages and counters. Outputs must
/// not have stride 0 along an axis of more than one entry.
///
/// On CUDA the functions enqueue kernels on the stream. They wait for nothing and allocate nothing,
/// so a CUDA graph can capture them. Values that depend on other ranks stay on the device. The
/// caller's current device must be the tensors' device. On CUDA a tensor may have at most 8 spatial
/// axes, counted after axes are merged where strides allow. The first sums of a dtype on a device
/// load the kernels for that dtype.
///
/// All functions throw InvalidArgument before they write anything. On CUDA they throw Unavailable
/// without kernels or a driver, and Error if CUDA reports that earlier work on the device failed.
namespace syncbn {

/// Returns the bytes of an activation mask. It has a bit for each element of x, which is set where
/// the activation passes the gradient on unchanged. The order of the bits depends only on the shape
/// and strides of x.
SYNCBN_API std::int64_t activation_mask_bytes(const TensorView& x);

/// The activation that a backward goes back through. The signs of its input are read from
/// `activation_mask`. Without a mask they are computed again from x, weight and bias; after a
/// residual this is not possible.
struct ActivationGradient {
  Activation activation;
  TensorView weight;
  TensorView bias;
  const std::uint8_t* activation_mask = nullptr;
};

/// y = activation((x - mean) * rstd * weight + bias + residual) (docs/numerics.md, section 4).
struct ForwardPass {
  TensorView x = {};
  MaskView mask = {};        ///< elements that it leaves out do not count and are +0 in y
  TensorView weight = {};    ///< C entries of any dtype; absent: 1
  TensorView bias = {};      ///< C entries of any dtype; absent: 0
  TensorView residual = {};  ///< like x, or absent
  MutableTensorView y = {};  ///< like x, any strides; may be the memory of x or residual
  /// Receives activation_mask_bytes(x) bytes, or is null. Bits of elements that do not count are
  /// undefined.
  std::uint8_t* activation_mask = nullptr;
  double* mean = nullptr;  ///< written, like var and rstd
  double* var = nullptr;   ///< biased
  double* rstd = nullptr;
  double eps = 1e-5;
  Activation activation = {};
};

/// dx = c1*u + c2*(x - mean) + c3 (section 6), and the gradients of weight and bias. u is dy after
/// it went back through the activation.
struct BackwardPass {
  TensorView dy = {};
  TensorView x = {};
  MaskView mask = {};
  const double* mean = nullptr;
  const double* rstd = nullptr;
  ActivationGradient through = {};
  TensorView weight = {};
  MutableTensorView u = {};   ///< receives the residual's gradient; may be absent, or dy
  MutableTensorView dx = {};  ///< may be dy or x
  MutableTensorView dweight = {};
  MutableTensorView dbias = {};
  bool share = true;  ///< true: dweight and dbias are this rank's share; false: the global sums
  std::int64_t count = 0;  ///< set by the step
};

/// The sum of the messages of all ranks. `words` points to the words after the header: in the
/// welford mode the ranks' records, one after another. On CUDA they follow the header in memory,
/// and `dtype` says their format; on the CPU the header says it.
struct Merged {
  const std::int64_t* header = nullptr;
  const std::int64_t* words = nullptr;
  DType dtype = DType::kFloat32;
  int ranks = 1;
};

/// The statistics and counters that a forward updates. Each may be absent.
struct Running {
  MutableTensorView mean = {};
  MutableTensorView var = {};
  std::int64_t* batches = nullptr;       ///< raised by 1, unless the batch is empty
  std::int64_t* call = nullptr;          ///< raised by 1
  std::int64_t* count = nullptr;         ///< receives the elements per channel over all ranks
  std::optional<double> momentum = 0.1;  ///< empty: cumulative averaging by `batches`
};

/// Returns the factor of cumulative averaging for a batch that comes after `batches` others.
SYNCBN_API double cumulative_factor(double batches);

/// A forward leaves two words for its backward: the elements per channel over all ranks (on CUDA -1
/// if the ranks disagreed), and the call's fingerprint.
inline constexpr int kInfoWords = 2;

/// The arguments of the two doors of a forward.
struct ForwardStep {
  ForwardPass pass = {};
  Statistics statistics = Statistics::kReproducible;
  std::uint64_t layer = 0;             ///< layer_identity(), the same on all ranks
  const std::int64_t* call = nullptr;  ///< the number of this call of the layer; null: 0
  std::int64_t backward = 0;           ///< the header's word kHeaderBackward
  Running running = {};
  std::int64_t* info = nullptr;       ///< kInfoWords words
  std::int64_t* workspace = nullptr;  ///< CUDA: workspace_words() words
  int rank = 0;                       ///< only the welford mode needs it, and the number of ranks
  int ranks = 1;
};

/// Returns the number of words of a forward's message in that mode. With the number of ranks it
/// has a place for the record of each, in the welford mode.
SYNCBN_API std::int64_t forward_words(Statistics statistics, DType dtype, std::int64_t channels,
                                      int ranks = 1);

/// Writes the sums of x into the message; in the welford mode this rank's record to its place, and
/// zeros to the others'. The outputs of the pass may be absent.
SYNCBN_API void forward_begin(const ForwardStep& step, std::int64_t* message,
                              const Execution& execution);

/// Computes the statistics from the merged message, does forward_update, and writes y unless it is
/// absent. Without a merged header it takes the statistics of the pass and writes only y.
SYNCBN_API void forward_finish(const ForwardStep& step, const Merged& merged,
                               const Execution& execution);

/// Updates step.running from statistics and info that were computed before. x only gives the device
/// and the number of channels.
SYNCBN_API void forward_update(const ForwardStep& step, const Execution& execution);

/// Converts running statistics to the mean, var and rstd of a pass. var may be null.
SYNCBN_API void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                                      double* mean, double* var, double* rstd, double eps,
                                      const Execution& execution);

/// The arguments of recover_input.
struct InputRecovery {
  TensorView y = {};
  const double* mean = nullptr;
  const double* rstd = nullptr;
  TensorView weight = {};  ///< without a 0
  TensorView bias = {};
  MutableTensorView x = {};                 ///< like y; may be the memory of y
  std::uint8_t* activation_mask = nullptr;  ///< activation_mask_bytes(x) bytes
  double negative_slope = 0.01;             ///< not 0
};
/// Computes x again after a forward that wrote y = leaky_relu((x - mean) * rstd * weight + bias)
/// over x, up to rounding (docs/options.md has the bound). Also writes the activation mask.
SYNCBN_API void recover_input(const InputRecovery& pass, const Execution& execution);

/// The arguments of the two doors of a backward.
struct BackwardStep {
  BackwardPass pass = {};
  /// The forward's info. If it is null, the backward is not compared with a forward.
  const std::int64_t* info = nullptr;
  double* coefficients = nullptr;     ///< room for 3 C numbers
  std::int64_t* workspace = nullptr;  ///< CUDA: workspace_words() words
};

/// Writes the sums of the gradient into the message, and u unless it is absent. On CUDA `copy` may
/// receive the message a second time; otherwise it is null. Nothing compares the arguments with the
/// forward's: if weight, activation or bias is forgotten, dx is wrong, and no error says so.
SYNCBN_API void backward_begin(const BackwardStep& step, std::int64_t* message, std::int64_t* copy,
                               const Execution& execution);

/// Writes the gradients of weight and bias, and dx, from u, or from dy if u is absent. `own` is the
/// message that this rank sent; it is needed with pass.share. Without a merged header the
/// statistics are constants: dx = weight * rstd * u, unless dx is absent, and with `own` the
/// gradients of weight and bias are those of this rank's samples. If u is
/// absent there, dy must already have gone back through the activation.
SYNCBN_API void backward_finish(const BackwardStep& step, const std::int64_t* own,
                                const Merged& merged, const Execution& execution);

/// The exchange of forward_at_once and backward_at_once.
struct GroupSum {
  SumInParts* sum = nullptr;  ///< null: this rank is alone
  bool in_parts = true;       ///< whether parts travel while other parts are computed
  int ranks = 1;
  /// This rank's message and the sum of all messages: message_words(x.dtype, C) words each. A rank
  /// alone needs neither on the CPU, and only `message` on CUDA.
  std::span<std::int64_t> message = {};
  std::span<std::int64_t> merged = {};
  /// An optional further check of the merged header, on the CPU.
  std::function<bool(const MessageInfo& info)> accept = {};
  std::chrono::milliseconds slice =
      std::chrono::hours(1);  ///< the longest wait of a call, to 2^40 ms
  MessageInfo info = {};      ///< a result, on the CPU
};

/// How far forward_at_once and backward_at_once came.
enum class Reached : std::uint8_t {
  kOutput,     ///< all outputs are written
  kExchange,   ///< `merged` is complete, and was not accepted
  kPublished,  ///< the slice ended; all of `message` is published, and the sum is under way
};

/// Makes begin, the sum and finish in one call, with the same bits. Where it pays, the sums of some
/// channels are computed while the sums of earlier channels travel to the other ranks and outputs
/// are stored. Outputs are undefined until the result is kOutput. y may be the memory of x. Errors
/// of the sum pass through. After any other error the caller must abandon the group, unless the sum
/// is complete. The statistics are those of Statistics::kReproducible.
SYNCBN_API Reached forward_at_once(const ForwardStep& step, GroupSum& group,
                                   const Execution& execution);
SYNCBN_API Reached backward_at_once(const BackwardStep& step, GroupSum& group,
                                    const Execution& execution);

/// Returns the int64 words of scratch memory that the sums of one direction need on CUDA. The
/// memory must be zero before the first use, and is zero again after each use. Directions that may
/// run at the same time need separate memory.
SYNCBN_API std::int64_t workspace_words(DType dtype, std::int64_t channels);

/// Returns such memory for passes on this stream of the current device. It lasts as long as the
/// process. The result is null if no memory is left, and while the stream is captured, because the
/// graph may be replayed beside the stream.
SYNCBN_API std::int64_t* stream_workspace(DType dtype, std::int64_t channels, void* stream);

}  // namespace syncbn
