// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "syncbn/communicator.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/export.hpp"
#include "syncbn/message.hpp"
#include "syncbn/options.hpp"
#include "syncbn/tensor.hpp"

/// A direction of a layer on one rank, for those who own the exchange themselves. It has two doors:
/// begin writes this rank's message; the caller sums the messages of all ranks; finish makes
/// statistics of the sum and writes the outputs. Both are here for the CPU and for CUDA. One rank
/// alone, and a group on the CPU whose sum travels in parts, has a direction in one call.
///
/// Tensors x, dy, y, dx have shape (N, C, spatial...), any strides, one dtype; arrays of doubles
/// have C entries. All lies on x's device, messages and counters included. What is written to has a
/// place for each entry: no stride is 0 where there are several.
///
/// On CUDA functions enqueue kernels on the stream, wait for nothing and allocate nothing, so that
/// they can be captured in a CUDA graph. What depends on other ranks stays on the device. The
/// caller's current device is that of the tensors, which have at most 8 spatial axes that no
/// strides merge. The first sums for a dtype on a device load the kernels of its steps there.
///
/// All functions throw InvalidArgument before they write anything; on CUDA Unavailable without
/// kernels or driver, and Error when CUDA reports that earlier work on the device failed.
namespace syncbn {

/// Bytes of an activation mask: one bit per element of x, set where the activation hands the
/// gradient on unchanged. Its order depends on the shape and strides of x alone.
SYNCBN_API std::int64_t activation_mask_bytes(const TensorView& x);

/// How the output's gradient comes back through the activation. Where it was positive is read from
/// `activation_mask`, or, without one, computed again from x, weight and bias (not after a
/// residual).
struct ActivationGradient {
  Activation activation;
  TensorView weight;
  TensorView bias;
  const std::uint8_t* activation_mask = nullptr;
};

/// y = activation((x - mean) * rstd * weight + bias + residual) (docs/numerics.md, section 4).
struct ForwardPass {
  TensorView x = {};
  MaskView mask = {};        ///< what it leaves out does not count and is +0 in y
  TensorView weight = {};    ///< C entries of any dtype, or absent: 1
  TensorView bias = {};      ///< or absent: 0
  TensorView residual = {};  ///< like x, or absent
  MutableTensorView y = {};  ///< like x, any strides, may be x or residual itself
  /// activation_mask_bytes(x) bytes, or null; bits of elements that do not count mean nothing.
  std::uint8_t* activation_mask = nullptr;
  double* mean = nullptr;  ///< written
  double* var = nullptr;   ///< biased
  double* rstd = nullptr;
  double eps = 1e-5;
  Activation activation = {};
};

/// dx = c1*u + c2*(x - mean) + c3 (section 6), u being dy come back through the activation, and the
/// gradients of weight and bias.
struct BackwardPass {
  TensorView dy = {};
  TensorView x = {};
  MaskView mask = {};
  const double* mean = nullptr;
  const double* rstd = nullptr;
  ActivationGradient through = {};
  TensorView weight = {};
  MutableTensorView u = {};   ///< written unless absent (the residual's gradient); may be dy
  MutableTensorView dx = {};  ///< may be dy or x
  MutableTensorView dweight = {};
  MutableTensorView dbias = {};
  bool share = true;  ///< dweight and dbias are this rank's own share; on one rank all there is
  std::int64_t count = 0;  ///< the step sets it
};

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
  std::int64_t* batches = nullptr;       ///< one more, unless the batch is empty
  std::int64_t* call = nullptr;          ///< one more
  std::int64_t* count = nullptr;         ///< elements per channel over all ranks
  std::optional<double> momentum = 0.1;  ///< empty: cumulative averaging by `batches`
};

/// The factor of cumulative averaging when `batches` came before this one.
SYNCBN_API double cumulative_factor(double batches);

/// Two words that a forward leaves for its backward: elements per channel over all ranks (on CUDA
/// -1 if they disagreed), and the call's fingerprint.
inline constexpr int kInfoWords = 2;

struct ForwardStep {
  ForwardPass pass = {};
  Statistics statistics = Statistics::kReproducible;
  std::uint64_t layer = 0;             ///< what ranks must share of the layer: layer_identity()
  const std::int64_t* call = nullptr;  ///< which call of it this is; null: 0
  std::int64_t backward = 0;           ///< the header's word kHeaderBackward
  Running running = {};
  std::int64_t* info = nullptr;       ///< kInfoWords words
  std::int64_t* workspace = nullptr;  ///< CUDA: workspace_words() words
};

/// Words of the message of a forward in that mode.
SYNCBN_API std::int64_t forward_words(Statistics statistics, DType dtype, std::int64_t channels);

/// Sums of x into the message. The outputs of the pass may be absent.
SYNCBN_API void forward_begin(const ForwardStep& step, std::int64_t* message,
                              const Execution& execution);

/// The rest: statistics, what is updated, and y, unless it is absent. Without a merged header the
/// statistics are there: y alone.
SYNCBN_API void forward_finish(const ForwardStep& step, const Merged& merged,
                               const Execution& execution);

/// What is updated, of statistics and info that are there. Of the pass x says the device and the
/// channels.
SYNCBN_API void forward_update(const ForwardStep& step, const Execution& execution);

/// Given statistics as a forward's. var: or null.
SYNCBN_API void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                                      double* mean, double* var, double* rstd, double eps,
                                      const Execution& execution);

/// For a forward that wrote y = leaky_relu((x - mean) * rstd * weight + bias) over x: gives back x,
/// up to rounding (docs/options.md has the bound), and the activation mask.
struct InputRecovery {
  TensorView y = {};
  const double* mean = nullptr;
  const double* rstd = nullptr;
  TensorView weight = {};  ///< no entry is 0
  TensorView bias = {};
  MutableTensorView x = {};                 ///< like y, may be y
  std::uint8_t* activation_mask = nullptr;  ///< activation_mask_bytes(x) bytes
  double negative_slope = 0.01;             ///< not 0
};
SYNCBN_API void recover_input(const InputRecovery& pass, const Execution& execution);

struct BackwardStep {
  BackwardPass pass = {};
  const std::int64_t* info = nullptr;  ///< the forward's; null: of none, and nobody compares
  double* coefficients = nullptr;      ///< room for 3 C numbers
  std::int64_t* workspace = nullptr;
};

/// Sums of the gradient into the message, and u, if it is there. copy: null, or on CUDA where the
/// message goes a second time. Nothing compares the pass with its forward: without the forward's
/// weight, activation or bias dx is another one, and no error says so.
SYNCBN_API void backward_begin(const BackwardStep& step, std::int64_t* message, std::int64_t* copy,
                               const Execution& execution);

/// Gradients of weight and bias, and dx. From u, where it is there. own: the message that this rank
/// sent, where pass.share. Without a merged header the statistics are constants: dx = weight * rstd
/// * u, unless it is absent, and where own is there gradients of weight and bias of this rank's
/// samples; where u is absent dy has come back through the activation already.
SYNCBN_API void backward_finish(const BackwardStep& step, const std::int64_t* own,
                                const Merged& merged, const Execution& execution);

/// The exchange of a direction that is made in one call.
struct GroupSum {
  SumInParts* sum = nullptr;  ///< null: this rank is alone
  bool in_parts = true;       ///< whether parts travel while others are computed
  int ranks = 1;
  /// This rank's message and the sum of all, message_words(x.dtype, C) words each. Alone on the CPU
  /// there are none, and on CUDA there is the first.
  std::span<std::int64_t> message = {};
  std::span<std::int64_t> merged = {};
  /// What else a merged header has to be to go on, besides all right; may be empty. CPU.
  std::function<bool(const MessageInfo& info)> accept = {};
  std::chrono::milliseconds slice = std::chrono::hours(1);  ///< of a wait
  MessageInfo info = {};                                    ///< given back on the CPU
};

enum class Reached : std::uint8_t {
  kOutput,     ///< all outputs are there
  kExchange,   ///< `merged` is there, and was not accepted
  kPublished,  ///< a slice ended; all of `message` is published, and the sum goes on
};

/// begin, the sum and finish in one, with the same bits. Where it pays, sums of some channels are
/// taken while those before them are on their way to the other ranks, and the output of others on
/// its way to memory. Until kOutput the outputs hold anything; y may be x. Throws what the sum
/// throws; after another error the caller has to abandon the group unless the sum is complete.
/// The statistics are those of Statistics::kReproducible.
SYNCBN_API Reached forward_at_once(const ForwardStep& step, GroupSum& group,
                                   const Execution& execution);
SYNCBN_API Reached backward_at_once(const BackwardStep& step, GroupSum& group,
                                    const Execution& execution);

/// int64 words of scratch memory on CUDA for the sums of one direction: zero before the first use,
/// zero again after each. Directions that may run at the same time need one each.
SYNCBN_API std::int64_t workspace_words(DType dtype, std::int64_t channels);

/// Such memory, for passes on this stream of the current device alone; it lasts as long as the
/// process. Null while the stream is captured, because a graph may be replayed beside it, and where
/// there is no memory.
SYNCBN_API std::int64_t* stream_workspace(DType dtype, std::int64_t channels, void* stream);

}  // namespace syncbn
