#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/export.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/tensor.hpp"

/// Batch normalization whose statistics are shared by all ranks of a communicator.
namespace syncbn {

enum class Statistics : std::uint8_t {
  kReproducible,  ///< exact sums: the bits do not depend on the number of ranks
  kWelford,       ///< per rank mean and M2, gathered and merged (syncbn/welford.hpp)
};

struct BatchNormOptions {
  double eps = 1e-5;                     ///< finite, not negative
  std::optional<double> momentum = 0.1;  ///< in [0, 1]; empty: cumulative averaging
  /// The caller's number for this layer, the same on all ranks, which tells it from others of its
  /// shape. Among several ranks from 1 on; one rank needs none.
  std::uint64_t layer = 0;
  /// How many calls of it came before, the same on all ranks. Left at 0, a layer's calls meet in
  /// the order in which they come.
  std::uint64_t call = 0;
  Activation activation = {};
  Statistics statistics = Statistics::kReproducible;  ///< of the forward direction
};

/// What all ranks must have in common of a layer besides channels and eps, hashed field by field:
/// in the place of the layer's number in syncbn::fingerprint.
SYNCBN_API std::uint64_t layer_identity(std::uint64_t layer, const Activation& activation,
                                        Statistics statistics, bool residual);

/// Buffers that training updates. mean and var: C entries of any dtype, or absent.
/// num_batches_tracked may be null unless momentum is empty.
struct RunningStatistics {
  MutableTensorView mean;
  MutableTensorView var;
  std::int64_t* num_batches_tracked = nullptr;
};

/// Statistics of the whole batch, the same bits on every rank; what backward needs besides x.
struct BatchStatistics {
  std::vector<double> mean;
  std::vector<double> var;  ///< biased
  std::vector<double> rstd;
  std::int64_t count = 0;  ///< elements per channel over all ranks
  std::uint32_t fingerprint = 0;
  Activation activation = {};
  std::vector<std::uint8_t> activation_mask = {};  ///< if a residual was added before it
  std::uint64_t layer = 0;                         ///< as errors of backward name it
  std::uint64_t call = 0;
};

/// Which sum dweight and dbias hold.
enum class AffineGradients : std::uint8_t {
  kShare,   ///< this rank's own samples; summed over ranks they are the whole gradient
  kGlobal,  ///< all ranks' samples, the same on every rank
};

/// Training forward: y = activation((x - mean) / sqrt(var + eps) * weight + bias + residual) with
/// mean and var over N, the spatial axes and all ranks. x: (N, C, spatial...), N may be 0 and may
/// differ between ranks. mask: (N, spatial...), or absent; what it leaves out does not count and is
/// +0 in y. A rank whose elements are all masked out is one without samples. residual: like x, or
/// absent. A rank without samples passes an x of the
/// group's dtype. Updates `running` unless the global count is 0. Makes one all_reduce_sum, or one
/// all_gather with Statistics::kWelford.
/// Throws on every rank: InvalidArgument on the rank whose argument is refused and PeerLost on the
/// others; DivergenceError when the ranks' calls do not match. Nothing is changed then. After
/// ExchangeTimeout and PeerLost `y` holds anything, and `running` what it held.
SYNCBN_API BatchStatistics batch_norm_forward(
    const TensorView& x, const MaskView& mask, const TensorView& weight, const TensorView& bias,
    const TensorView& residual, const MutableTensorView& y, const RunningStatistics& running,
    const BatchNormOptions& options, Communicator& communicator, const Execution& execution);

/// The same with statistics that the caller keeps, in their memory: from the second call of a shape
/// on, neither this nor batch_norm_backward allocates anything, with serial_executor() or a
/// ThreadPool, in groups of one rank, of threads or over shared memory. Threads keep what they need
/// for that, at most 16 blocks of 2 MiB each; wider layers allocate. After an exception
/// `statistics` holds anything.
SYNCBN_API void batch_norm_forward(const TensorView& x, const MaskView& mask,
                                   const TensorView& weight, const TensorView& bias,
                                   const TensorView& residual, const MutableTensorView& y,
                                   const RunningStatistics& running,
                                   const BatchNormOptions& options, Communicator& communicator,
                                   const Execution& execution, BatchStatistics& statistics);

/// Training backward. mask, weight, bias: as in forward (bias is looked at if there is an
/// activation). dx: gradient of x. dweight, dbias: C entries or absent. dresidual: gradient of the
/// residual, or absent; like x, may be dy. Makes one all_reduce_sum. Errors as in
/// batch_norm_forward.
SYNCBN_API void batch_norm_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                                    const TensorView& weight, const TensorView& bias,
                                    const BatchStatistics& statistics, const MutableTensorView& dx,
                                    const MutableTensorView& dweight,
                                    const MutableTensorView& dbias,
                                    const MutableTensorView& dresidual, AffineGradients which,
                                    Communicator& communicator, const Execution& execution);

/// The checks of batch_norm_forward's arguments, for those who own the exchange themselves: what
/// passes them is not refused later. Throws InvalidArgument.
SYNCBN_API void check_forward(const TensorView& x, const MaskView& mask, const TensorView& weight,
                              const TensorView& bias, const TensorView& residual,
                              const MutableTensorView& y, const MutableTensorView& running_mean,
                              const MutableTensorView& running_var,
                              const std::int64_t* num_batches_tracked,
                              const BatchNormOptions& options, int ranks);

/// The same for batch_norm_backward.
SYNCBN_API void check_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                               const TensorView& weight, const MutableTensorView& dx,
                               const MutableTensorView& dweight, const MutableTensorView& dbias,
                               const MutableTensorView& dresidual, AffineGradients which,
                               int ranks);

/// Evaluation: normalizes with running_mean and running_var (C entries each) or, when both are
/// absent, with the statistics of the local batch. No exchange. Of the options, eps and activation
/// count.
SYNCBN_API void batch_norm_evaluate(const TensorView& x, const MaskView& mask,
                                    const TensorView& weight, const TensorView& bias,
                                    const TensorView& residual, const TensorView& running_mean,
                                    const TensorView& running_var, const MutableTensorView& y,
                                    const BatchNormOptions& options, const Execution& execution);

/// Backward of batch_norm_evaluate with running statistics; dweight and dbias are local sums.
/// dresidual: as in batch_norm_backward. With a residual and an activation dx must not be dy.
SYNCBN_API void batch_norm_evaluate_backward(
    const TensorView& dy, const TensorView& x, const MaskView& mask, const TensorView& weight,
    const TensorView& bias, const TensorView& residual, const TensorView& running_mean,
    const TensorView& running_var, const MutableTensorView& dx, const MutableTensorView& dweight,
    const MutableTensorView& dbias, const MutableTensorView& dresidual,
    const BatchNormOptions& options, const Execution& execution);

}  // namespace syncbn
