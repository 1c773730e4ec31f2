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
#include "syncbn/export.h"
#include "syncbn/options.hpp"
#include "syncbn/tensor.hpp"

/// Batch normalization whose statistics are shared by all ranks of a communicator.
namespace syncbn {

namespace cuda {
class Communicator;
}
struct SavedState;
struct LayerState;

/// The caller's allocator, for memory that outlives a call. Without functions the library uses
/// operator new on the CPU, and cudaMallocAsync and cudaFreeAsync on CUDA.
struct Allocator {
  void* context = nullptr;  ///< the first argument of both functions
  /// Returns memory of the device, at a multiple of 64 bytes, for work that is enqueued on the
  /// stream from now on (a cudaStream_t; null on the CPU). If there is no memory, it returns null
  /// or throws.
  void* (*allocate)(void* context, std::size_t bytes, Device device, void* stream) = nullptr;
  /// Takes the memory back once the work that is on the stream has ended. It must not throw.
  void (*release)(void* context, void* memory, std::size_t bytes, Device device,
                  void* stream) = nullptr;
};

/// The results of a training forward that its backward needs. The backward also checks its
/// arguments against them. Keep one Saved for each forward whose backward is still to come, and
/// use it again for later forwards: from the second forward of a shape on it allocates nothing. A
/// forward that throws leaves its Saved empty. A Saved that was moved from is refused by every
/// forward; assign another Saved to it first.
class SYNCBN_API Saved {
 public:
  Saved() : Saved(Allocator()) {}
  explicit Saved(const Allocator& allocator);
  Saved(Saved&& other) noexcept = default;
  Saved& operator=(Saved&& other) noexcept = default;

  /// Statistics of the whole batch: C entries each, with the same bits on every rank, in memory of
  /// x's device. They are empty before the first forward.
  [[nodiscard]] std::span<const double> mean() const noexcept { return values(0); }
  [[nodiscard]] std::span<const double> var() const noexcept { return values(1); }  ///< biased
  [[nodiscard]] std::span<const double> rstd() const noexcept { return values(2); }

  /// Returns the number of elements per channel over all ranks; 0 before the first forward. On
  /// CUDA it waits for the forward's stream, and throws DivergenceError if the ranks did not make
  /// the same call.
  std::int64_t count() const;

 private:
  friend class BatchNorm;
  std::span<const double> values(std::size_t which) const noexcept;
  std::shared_ptr<SavedState> state_;
};

/// One layer of one rank, for tensors on the CPU or on CUDA. It does what torch.nn.SyncBatchNorm
/// does, but the caller owns the parameters and buffers. Every rank of the communicator has such a
/// layer and makes the same calls.
///
/// Only one thread at a time may call a layer. Layers that share a communicator belong to one
/// thread. On the CPU a call returns when its outputs are written. On CUDA a call enqueues its work
/// on the execution's stream and, from the second call of a shape on, waits for nothing, except
/// with a staged_communicator. All calls of a layer use one stream, or the caller orders them. The
/// stream must outlive the layer and its Saved, because they release their memory on it.
///
/// Errors have the layer's name and the numbers of the ranks that caused them. Every rank gets an
/// error. If a rank's argument is refused, that rank gets InvalidArgument and the others PeerLost.
/// If the ranks' calls do not match, all get DivergenceError. If a rank does not come, they get
/// ExchangeTimeout or PeerLost. A failed call counts as a call on every rank. It leaves running
/// statistics as they were. Outputs are undefined after ExchangeTimeout and PeerLost, and unchanged
/// after InvalidArgument and DivergenceError. On CUDA no call waits to see whether the ranks' calls
/// match. If they do not, the statistics, y and dx are NaN, running statistics stay as they were,
/// and check() and Saved::count() throw.
class SYNCBN_API BatchNorm {
 public:
  struct Options {
    std::int64_t channels = kNoChannels;  ///< C, 0 to 2^31; required
    /// The layer's own name, for example its path in the model. It is the same on all ranks, and
    /// no other layer of the communicator has it at the same time: ranks tell layers apart by it.
    /// Errors begin with it. The layer copies it. A group of one rank needs no name.
    std::string_view name = {};
    double eps = 1e-5;  ///< finite, not negative
    /// In [0, 1]: running <- (1 - momentum) * running + momentum * batch value, where the value of
    /// the variance is the unbiased one. Without a momentum the layer averages cumulatively.
    std::optional<double> momentum = 0.1;
    Activation activation = {};
    Statistics statistics = Statistics::kReproducible;  ///< of a training forward
  };

  /// x has shape (N, C, spatial...) and any strides. N may be 0 and may differ between ranks. A
  /// rank without samples passes an x of the group's dtype. Only x and y are required.
  struct Forward {
    TensorView x = {};
    MaskView mask = {};        ///< (N, spatial...): elements left out do not count and are +0 in y
    TensorView weight = {};    ///< C entries of any dtype, like all tensors per channel; absent: 1
    TensorView bias = {};      ///< absent: 0
    TensorView residual = {};  ///< like x; added before the activation
    /// Like x. It may be the memory of residual, or, if no backward follows, of x.
    MutableTensorView y = {};
    /// Updated unless no rank has a sample. Give both running statistics or neither.
    MutableTensorView running_mean = {};
    MutableTensorView running_var = {};
    /// On x's device. Cumulative averaging needs it.
    std::int64_t* num_batches_tracked = nullptr;
  };

  /// Pass the forward's x, mask, weight and bias, and x in the same memory, unchanged. Another x is
  /// refused, and so is a mask, weight or bias that is missing or new. The residual is not needed
  /// again, because Saved has the signs of the activation.
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

  /// Give both running statistics or neither. Without them the statistics of the local batch are
  /// used.
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

  /// The backward of an evaluation with running statistics. dweight and dbias are local sums. With
  /// a residual and an activation, dx must not be the memory of dy.
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

  /// Makes a layer of one rank alone, on either device. If it has a name, it may evaluate but not
  /// train, because a forgotten group would mean a layer without synchronization. Pass
  /// self_communicator() to say that one rank is meant.
  explicit BatchNorm(const Options& options, const Allocator& allocator = {})
      : BatchNorm(options, sizeof(options), nullptr, nullptr, allocator) {}
  /// Makes a layer for tensors on the CPU. The communicator must outlive the layer; without it the
  /// layer refuses training calls. Throws InvalidArgument.
  BatchNorm(const Options& options, Communicator& communicator, const Allocator& allocator = {})
      : BatchNorm(options, sizeof(options), &communicator, nullptr, allocator) {}
  /// Makes a layer for tensors on CUDA.
  BatchNorm(const Options& options, cuda::Communicator& communicator,
            const Allocator& allocator = {})
      : BatchNorm(options, sizeof(options), nullptr, &communicator, allocator) {}
  /// All calls of a layer that was moved from throw InvalidArgument.
  BatchNorm(BatchNorm&& other) noexcept = default;
  BatchNorm& operator=(BatchNorm&& other) noexcept = default;
  ~BatchNorm();  // not inline: GCC 12 warns of it in std::optional

  /// Computes y = activation((x - mean) / sqrt(var + eps) * weight + bias + residual) for training,
  /// with mean and var over N, the spatial axes and all ranks. Makes one all_reduce_sum.
  void forward(const Forward& arguments, Saved& saved, const Execution& execution = {}) {
    sized_forward(arguments, sizeof(arguments), saved, execution);
  }

  /// Computes the gradients of the forward that filled `saved`, and does not change `saved`. Makes
  /// one all_reduce_sum.
  void backward(const Backward& arguments, const Saved& saved, const Execution& execution = {}) {
    sized_backward(arguments, sizeof(arguments), saved, execution);
  }

  /// Computes the y of forward() with constant statistics. It exchanges nothing, so some ranks
  /// alone may call it.
  void evaluate(const Evaluate& arguments, const Execution& execution = {}) {
    sized_evaluate(arguments, sizeof(arguments), execution);
  }

  /// Computes the gradients of evaluate(). It exchanges nothing.
  void evaluate_backward(const EvaluateBackward& arguments, const Execution& execution = {}) {
    sized_evaluate_backward(arguments, sizeof(arguments), execution);
  }

  /// Sets the momentum of the forwards that follow. It is the only option that may change, and the
  /// only one that may differ between ranks.
  void set_momentum(std::optional<double> momentum);

  /// Counts a failed call and tells the other ranks. Use it in code around a layer that refuses a
  /// forward before the layer is called.
  void abandon_forward(const std::string& reason);

  [[nodiscard]] const std::string& name() const;
  [[nodiscard]] std::int64_t channels() const { return options().channels; }
  /// Returns the options as they are now. Their name is valid while the layer lives.
  [[nodiscard]] const Options& options() const;
  /// Returns the group of a layer for the CPU. Null: the group is gone, or the layer is on CUDA.
  [[nodiscard]] Communicator* group() const;

  /// Returns how many training forwards were called since the group's last reset, failed calls
  /// included.
  [[nodiscard]] std::uint64_t calls() const;

  /// On CUDA it waits for the stream. It throws DivergenceError if the ranks' last forwards did not
  /// match, and Error if CUDA reports a failure. On the CPU it does nothing, because the calls
  /// themselves throw.
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

/// Checks arguments as BatchNorm::forward does, for callers with an exchange of their own. Throws
/// InvalidArgument. Arguments that pass are not refused later.
SYNCBN_API void check_forward(const BatchNorm::Options& options,
                              const BatchNorm::Forward& arguments);

/// Checks arguments as BatchNorm::backward does.
SYNCBN_API void check_backward(const BatchNorm::Backward& arguments);

/// Returns the hash that ForwardStep::layer of syncbn/step.hpp takes. It covers all that ranks must
/// have in common besides channels and eps, field by field. residual, weight, bias: whether the
/// layer has one.
SYNCBN_API std::uint64_t layer_identity(std::uint64_t layer, const Activation& activation,
                                        Statistics statistics, bool residual, bool weight = false,
                                        bool bias = false);

}  // namespace syncbn
