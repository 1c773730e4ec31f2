#pragma once

#include <cstdint>

#include "syncbn/batch_norm.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/export.hpp"

/// The functions of syncbn/batch_norm.hpp for tensors on CUDA, with the same bits and the same
/// checks: passes and the exchange between them, in order on a stream. The functions wait for
/// nothing and allocate nothing; all memory is the caller's and lies on the stream's device, which
/// is the calling thread's current one.
///
/// What the host cannot see without waiting is no exception: when the calls of the ranks do not
/// match, statistics, y and dx are NaN, running statistics are left alone, and read_count throws.
/// An argument that is refused throws InvalidArgument on its rank, which leaves the group
/// (Communicator::abandon), before anything is enqueued.
namespace syncbn::cuda {

/// What a forward leaves on the device and its backward reads; the same bits on every rank.
struct BatchStatistics {
  double* mean = nullptr;        ///< C entries
  double* var = nullptr;         ///< C entries, biased
  double* rstd = nullptr;        ///< C entries
  std::int64_t* info = nullptr;  ///< kInfoWords: see read_count
  /// activation_mask_bytes(x) bytes, needed with a residual and an activation
  std::uint8_t* activation_mask = nullptr;
};

/// int64 words of scratch memory that each function below needs: zero before the first use, left as
/// the next use needs it. Calls that may run at the same time need one each. With kWelford a
/// forward has a record of each rank there; `ranks` is communicator.size() then (1 to 2048,
/// otherwise InvalidArgument), else it does not count.
SYNCBN_API std::int64_t batch_norm_workspace_words(
    DType dtype, std::int64_t channels, Statistics statistics = Statistics::kReproducible,
    int ranks = 1);

/// Training forward; see syncbn::batch_norm_forward. options.call must be 0 (running.call counts).
/// Makes one all_reduce_sum, or one all_gather with Statistics::kWelford, whose records are merged
/// in another order than on CPU.
SYNCBN_API void batch_norm_forward(const TensorView& x, const MaskView& mask,
                                   const TensorView& weight, const TensorView& bias,
                                   const TensorView& residual, const MutableTensorView& y,
                                   const RunningStatistics& running,
                                   const BatchStatistics& statistics,
                                   const BatchNormOptions& options, Communicator& communicator,
                                   std::int64_t* workspace, const Stream& stream);

/// Training backward; see syncbn::batch_norm_backward. statistics.activation_mask: the forward's if
/// it added a residual, else null. Makes one all_reduce_sum.
SYNCBN_API void batch_norm_backward(
    const TensorView& dy, const TensorView& x, const MaskView& mask, const TensorView& weight,
    const TensorView& bias, const BatchStatistics& statistics, const MutableTensorView& dx,
    const MutableTensorView& dweight, const MutableTensorView& dbias,
    const MutableTensorView& dresidual, const Activation& activation, AffineGradients which,
    Communicator& communicator, std::int64_t* workspace, const Stream& stream);

/// Evaluation; see syncbn::batch_norm_evaluate.
SYNCBN_API void batch_norm_evaluate(const TensorView& x, const MaskView& mask,
                                    const TensorView& weight, const TensorView& bias,
                                    const TensorView& residual, const TensorView& running_mean,
                                    const TensorView& running_var, const MutableTensorView& y,
                                    const BatchNormOptions& options, std::int64_t* workspace,
                                    const Stream& stream);

/// Backward of batch_norm_evaluate with running statistics; see
/// syncbn::batch_norm_evaluate_backward. activation_mask: activation_mask_bytes(x) bytes of scratch
/// memory, needed with a residual and an activation.
SYNCBN_API void batch_norm_evaluate_backward(
    const TensorView& dy, const TensorView& x, const MaskView& mask, const TensorView& weight,
    const TensorView& bias, const TensorView& residual, const TensorView& running_mean,
    const TensorView& running_var, const MutableTensorView& dx, const MutableTensorView& dweight,
    const MutableTensorView& dbias, const MutableTensorView& dresidual,
    const BatchNormOptions& options, std::uint8_t* activation_mask, std::int64_t* workspace,
    const Stream& stream);

}  // namespace syncbn::cuda
