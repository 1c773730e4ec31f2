// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/export.hpp"
#include "syncbn/options.hpp"
#include "syncbn/tensor.hpp"

/// Batch normalization whose statistics are shared by all ranks of a communicator.
namespace syncbn {

namespace cuda {
class Communicator;
}
struct SavedState;
struct LayerState;

/// Where memory that outlives a call comes from, for a caller with an allocator of its own. Without
/// functions: operator new on the CPU, cudaMallocAsync and cudaFreeAsync on CUDA.
struct Allocator {
  void* context = nullptr;  ///< handed to both functions
  /// Memory of the device for what is enqueued on the stream (a cudaStream_t; null on the CPU)
  /// from now on, at a multiple of 64 bytes. Null or an exception: there is none.
  void* (*allocate)(void* context, std::size_t bytes, Device device, void* stream) = nullptr;
  /// Gets it back after what was enqueued on the stream. Throws nothing.
  void (*release)(void* context, void* memory, std::size_t bytes, Device device,
                  void* stream) = nullptr;
};

/// What a training forward hands to its backward, and by what the backward is held to that forward.
/// The caller holds one for each forward whose backward is to come, and uses it again for later
/// forwards: from the second one of a shape on it allocates nothing. A forward that throws leaves
/// it without content. One that was moved from has none, and a forward refuses it until another is
/// assigned to it.
class SYNCBN_API Saved {
 public:
  Saved() : Saved(Allocator()) {}
  explicit Saved(const Allocator& allocator);
  Saved(Saved&& other) noexcept = default;
  Saved& operator=(Saved&& other) noexcept = default;

  /// Statistics of the whole batch, C entries each, the same bits on every rank; in memory of x's
  /// device. Empty before the first forward.
  [[nodiscard]] std::span<const double> mean() const noexcept { return values(0); }
  [[nodiscard]] std::span<const double> var() const noexcept { return values(1); }  ///< biased
  [[nodiscard]] std::span<const double> rstd() const noexcept { return values(2); }

  /// Elements per channel over all ranks; 0 before the first forward. On CUDA this waits for the
  /// forward's stream, and throws DivergenceError if the ranks did not make the same call.
  std::int64_t count() const;

 private:
  friend class BatchNorm;
  std::span<const double> values(std::size_t which) const noexcept;
  std::shared_ptr<SavedState> state_;
};

/// One layer of one rank, for tensors on the CPU or on CUDA: C++'s torch.nn.SyncBatchNorm, with the
/// parameters and buffers in the caller's hands. Every rank of the communicator has one and makes
/// the same calls of it.
///
/// One thread at a time calls a layer; different layers are independent, but share a communicator
/// only in one thread. On the CPU a call returns when its outputs are written. On CUDA it enqueues
/// on the execution's stream and waits for nothing, from the second call of a shape on; all calls
/// of a layer are on one stream, or the caller orders them. That stream outlives the layer and its
/// Saved, whose memory goes back on it.
///
/// Errors carry the layer's name and the ranks that they are about. Every rank gets one:
/// InvalidArgument on the rank whose argument is refused and PeerLost on the others;
/// DivergenceError when the ranks' calls do not match; ExchangeTimeout and PeerLost when a rank
/// does not come. A failed call counts as a call on every rank. After it outputs hold anything, and
/// running statistics what they held; after InvalidArgument and DivergenceError outputs are
/// untouched, too. On CUDA nobody waits to see whether the ranks' calls match. If they do not, the
/// statistics, y and dx are NaN, running statistics are left alone, and check() and Saved::count()
/// throw.
class SYNCBN_API BatchNorm {
 public:
  struct Options {
    std::int64_t channels = 0;  ///< C
    /// The layer's own name, for example its path in the model, the same on all ranks: by it they
    /// tell layers apart, and errors name it. Copied. No other layer of the communicator has it at
    /// the same time. A group of one rank needs none.
    std::string_view name = {};
    double eps = 1e-5;  ///< finite, not negative
    /// In [0, 1]: running <- (1 - momentum) * running + momentum * batch value, for the variance
    /// the unbiased one. Empty: cumulative averaging.
    std::optional<double> momentum = 0.1;
    Activation activation = {};
    Statistics statistics = Statistics::kReproducible;  ///< of a training forward
  };

  /// x: (N, C, spatial...), any strides; N may be 0 and may differ between ranks. A rank without
  /// samples passes an x of the group's dtype. All others may be absent, but for y.
  struct Forward {
    TensorView x = {};
    MaskView mask = {};      ///< (N, spatial...): what it leaves out does not count and is +0 in y
    TensorView weight = {};  ///< C entries of any dtype, as all that is per channel; absent: 1
    TensorView bias = {};    ///< absent: 0
    TensorView residual = {};  ///< like x; added before the activation
    /// Like x. May be residual, and x where no backward follows, which needs x.
    MutableTensorView y = {};
    MutableTensorView running_mean = {};  ///< updated unless nobody has a sample; both or neither
    MutableTensorView running_var = {};
    /// On x's device; needed for cumulative averaging.
    std::int64_t* num_batches_tracked = nullptr;
  };

  /// x, mask, weight, bias: those of the forward, and x in the same memory, unchanged. Another x,
  /// or one of the others left out or added, is refused. A residual is not needed again: Saved has
  /// what the activation made of it.
  struct Backward {
    TensorView dy = {};  ///< like x
    TensorView x = {};
    MaskView mask = {};
    TensorView weight = {};
    TensorView bias = {};
    MutableTensorView dx = {};         ///< like x; may be dy or x
    MutableTensorView dweight = {};    ///< C entries, or absent
    MutableTensorView dbias = {};      ///< C entries, or absent
    MutableTensorView dresidual = {};  ///< like x, or absent; may be dy
    AffineGradients affine = AffineGradients::kShare;
  };

  /// Both running statistics, or neither: then those of the local batch.
  struct Evaluate {
    TensorView x = {};
    MaskView mask = {};
    TensorView weight = {};
    TensorView bias = {};
    TensorView residual = {};
    TensorView running_mean = {};
    TensorView running_var = {};
    MutableTensorView y = {};
  };

  /// Of an evaluation with running statistics. dweight and dbias are local sums. With a residual
  /// and an activation dx must not be dy.
  struct EvaluateBackward {
    TensorView dy = {};
    TensorView x = {};
    MaskView mask = {};
    TensorView weight = {};
    TensorView bias = {};
    TensorView residual = {};
    TensorView running_mean = {};
    TensorView running_var = {};
    MutableTensorView dx = {};
    MutableTensorView dweight = {};
    MutableTensorView dbias = {};
    MutableTensorView dresidual = {};
  };

  /// A layer of one rank alone, on either device. With a name it may evaluate but not train: a
  /// group that was forgotten would be a layer without synchronization. self_communicator() says
  /// that one rank is meant.
  explicit BatchNorm(const Options& options, const Allocator& allocator = {})
      : BatchNorm(options, sizeof(options), nullptr, nullptr, allocator) {}
  /// For tensors on the CPU. The communicator outlives the layer, whose training calls are refused
  /// once it is gone. Throws InvalidArgument.
  BatchNorm(const Options& options, Communicator& communicator, const Allocator& allocator = {})
      : BatchNorm(options, sizeof(options), &communicator, nullptr, allocator) {}
  /// The same for tensors on CUDA.
  BatchNorm(const Options& options, cuda::Communicator& communicator,
            const Allocator& allocator = {})
      : BatchNorm(options, sizeof(options), nullptr, &communicator, allocator) {}
  /// All calls of one that was moved from throw InvalidArgument.
  BatchNorm(BatchNorm&& other) noexcept = default;
  BatchNorm& operator=(BatchNorm&& other) noexcept = default;
  ~BatchNorm();  // not inline: GCC 12 warns of it in std::optional

  /// Training: y = activation((x - mean) / sqrt(var + eps) * weight + bias + residual) with mean
  /// and var over N, the spatial axes and all ranks. Makes one exchange: an all_reduce_sum, or an
  /// all_gather with Statistics::kWelford.
  void forward(const Forward& arguments, Saved& saved, const Execution& execution = {}) {
    sized_forward(arguments, sizeof(arguments), saved, execution);
  }

  /// The gradients of that forward; `saved` is its, and stays as it is. Makes one all_reduce_sum.
  void backward(const Backward& arguments, const Saved& saved, const Execution& execution = {}) {
    sized_backward(arguments, sizeof(arguments), saved, execution);
  }

  /// The same y with constant statistics. Exchanges nothing, and may be called on some ranks alone.
  void evaluate(const Evaluate& arguments, const Execution& execution = {}) {
    sized_evaluate(arguments, sizeof(arguments), execution);
  }

  void evaluate_backward(const EvaluateBackward& arguments, const Execution& execution = {}) {
    sized_evaluate_backward(arguments, sizeof(arguments), execution);
  }

  /// Of the forwards that follow. The only option that may change, and that ranks need not share.
  void set_momentum(std::optional<double> momentum);

  /// For those who wrap a layer and refuse a forward themselves: counts it as a call that failed,
  /// and tells the other ranks.
  void abandon_forward(const std::string& reason);

  [[nodiscard]] const std::string& name() const;
  [[nodiscard]] std::int64_t channels() const { return options().channels; }
  /// As they are now; their name is good while the layer lives.
  [[nodiscard]] const Options& options() const;
  /// The group of a layer for the CPU; null where it is gone, and for a layer on CUDA.
  [[nodiscard]] Communicator* group() const;

  /// How many training forwards were called, those that failed included, since the group's last
  /// reset.
  [[nodiscard]] std::uint64_t calls() const;

  /// On CUDA waits for the stream, and throws DivergenceError if the ranks' last forwards did not
  /// match, Error if CUDA reports a failure. Does nothing on the CPU, where calls throw themselves.
  void check(const Execution& execution = {});

 private:
  // The size that the caller was compiled with: later versions append members.
  BatchNorm(const Options& options, std::size_t size, Communicator* on_cpu,
            cuda::Communicator* on_cuda, const Allocator& allocator);
  void sized_forward(const Forward& arguments, std::size_t size, Saved& saved,
                     const Execution& execution);
  void sized_backward(const Backward& arguments, std::size_t size, const Saved& saved,
                      const Execution& execution);
  void sized_evaluate(const Evaluate& arguments, std::size_t size, const Execution& execution);
  void sized_evaluate_backward(const EvaluateBackward& arguments, std::size_t size,
                               const Execution& execution);

  SYNCBN_LOCAL LayerState& state() const;

  std::shared_ptr<LayerState> state_;
};

/// The checks of BatchNorm::forward's arguments, for those who own the exchange themselves: what
/// passes them is not refused later. Throws InvalidArgument.
SYNCBN_API void check_forward(const BatchNorm::Options& options,
                              const BatchNorm::Forward& arguments);

/// The same for BatchNorm::backward.
SYNCBN_API void check_backward(const BatchNorm::Backward& arguments);

/// What all ranks must have in common of a layer besides channels and eps, hashed field by field:
/// ForwardStep::layer of syncbn/step.hpp. residual, weight, bias: whether there
/// is one.
SYNCBN_API std::uint64_t layer_identity(std::uint64_t layer, const Activation& activation,
                                        Statistics statistics, bool residual, bool weight = false,
                                        bool bias = false);

}  // namespace syncbn
