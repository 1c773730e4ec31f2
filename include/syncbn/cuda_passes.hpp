// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "syncbn/export.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/tensor.hpp"

/// The passes of syncbn/passes.hpp for tensors on CUDA, with the same bits. Everything that a pass
/// reads or writes is memory of the stream's device, per-channel arrays and messages included; the
/// passes enqueue kernels on the stream, wait for nothing and allocate nothing, so that they can be
/// captured in a CUDA graph. What depends on other ranks (count, disagreement) stays on the device.
///
/// Tensors have device kCuda, the caller's current device is theirs, and at most 8 spatial axes
/// that no strides merge. All functions throw before they enqueue: InvalidArgument, Unavailable
/// without kernels or driver, or Error when CUDA reports that earlier work on the device failed.
/// The first sums for a dtype on a device load the kernels of its training steps there.
namespace syncbn::cuda {

/// Throws Unavailable in a build without kernels, as every function below does then.
SYNCBN_API void require_built();

struct Stream {
  void* handle = nullptr;   ///< a cudaStream_t
  int multiprocessors = 0;  ///< to size grids for; 0 asks the device. Never changes a bit
};

/// Words of the state that a forward leaves on the device: the count over all ranks (-1 if they
/// disagreed) and the call's fingerprint.
inline constexpr int kInfoWords = 2;

/// int64 words of scratch memory for the sums of one pass: zero before the first use, zero again
/// after each. Passes that may run at the same time need one each.
SYNCBN_API std::int64_t workspace_words(DType dtype, std::int64_t channels);

/// Such memory, for passes on this stream of the current device alone; it lasts as long as the
/// process. Null while the stream is captured, because a graph may be replayed beside it, and where
/// there is no memory.
SYNCBN_API std::int64_t* stream_workspace(DType dtype, std::int64_t channels, const Stream& stream);

/// What the header of a forward is made of. layer, call and eps: as in syncbn::fingerprint; call is
/// a counter on the device, or null (0). backward: this rank's counters of who takes part in it.
struct ForwardCall {
  std::uint64_t layer = 0;
  const std::int64_t* call = nullptr;
  double eps = 0;
  std::int64_t backward = 0;
};

/// Sums of x and x*x. message: message_words(x.dtype, C) words, written whole. mask: as in
/// passes.hpp, on the device; its elements are counted there.
SYNCBN_API void local_moments(const TensorView& x, const MaskView& mask, const ForwardCall& call,
                              std::int64_t* message, std::int64_t* workspace, const Stream& stream);

/// Buffers that training updates, each absent or null or on the device.
struct RunningStatistics {
  MutableTensorView mean;
  MutableTensorView var;
  std::int64_t* num_batches_tracked = nullptr;
  std::int64_t* call = nullptr;   ///< counts calls of the layer; part of what ranks must share
  std::int64_t* count = nullptr;  ///< the last call's count, as info has it
};

/// mean, var and rstd (C entries each) and info (kInfoWords) from a message summed over `ranks`
/// ranks. dtype: of the group's messages.
SYNCBN_API void finalize_moments(const std::int64_t* merged, DType dtype, int ranks, double* mean,
                                 double* var, double* rstd, std::int64_t* info,
                                 std::int64_t channels, double eps, const Stream& stream);
/// The same and update_running_statistics, in one kernel where a momentum is given.
SYNCBN_API void finalize_moments(const std::int64_t* merged, DType dtype, int ranks, double* mean,
                                 double* var, double* rstd, std::int64_t* info,
                                 std::int64_t channels, double eps,
                                 const RunningStatistics& running, std::optional<double> momentum,
                                 const Stream& stream);

/// The welford mode's statistics (syncbn/welford.hpp). message: kHeaderWords +
/// welford_words(x.dtype, C) words, written whole. The same bits on any grid.
SYNCBN_API void local_welford(const TensorView& x, const MaskView& mask, const ForwardCall& call,
                              std::int64_t* message, const Stream& stream);

/// As finalize_moments, from the messages of all ranks, gathered one after another in rank order.
SYNCBN_API void merge_welford(const std::int64_t* messages, DType dtype, int ranks, double* mean,
                              double* var, double* rstd, std::int64_t* info, std::int64_t channels,
                              double eps, const Stream& stream);

/// As syncbn::normalize.
SYNCBN_API void normalize(const Normalization& pass, const Stream& stream);

/// Running statistics, both counters plus 1 (num_batches_tracked unless the count is 0; call
/// always), and the count. momentum empty: 1 / num_batches_tracked. Nothing but call and count
/// changes if the ranks disagreed.
SYNCBN_API void update_running_statistics(const RunningStatistics& running, const double* mean,
                                          const double* var, const std::int64_t* info,
                                          std::int64_t channels, std::optional<double> momentum,
                                          const Stream& stream);

/// mean and rstd for evaluation from running statistics.
SYNCBN_API void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                                      double* mean, double* rstd, double eps, const Stream& stream);

/// As syncbn::local_gradients. info: the forward's; null gives the fingerprint 0. copy: null, or
/// where the message goes a second time, for who has the first one summed in its place.
SYNCBN_API void local_gradients(const GradientSums& pass, const std::int64_t* info,
                                std::int64_t* message, std::int64_t* workspace,
                                const Stream& stream, std::int64_t* copy = nullptr);

/// Coefficients from a summed message, and the gradients of weight and bias: global ones from it,
/// or, if `own` is not null, this rank's share from the message that it sent. NaN coefficients when
/// the header disagrees or its count is not the forward's (info; null asks for no count).
SYNCBN_API void finalize_gradients(const std::int64_t* merged, DType dtype, int ranks,
                                   const std::int64_t* own, const std::int64_t* info,
                                   const ParameterGradients& to, const Stream& stream);

/// As syncbn::input_gradient.
SYNCBN_API void input_gradient(const InputGradient& pass, const Stream& stream);

/// As syncbn::recover_input.
SYNCBN_API void recover_input(const InputRecovery& pass, const Stream& stream);

/// dx = weight * rstd * u (constant statistics).
SYNCBN_API void evaluation_input_gradient(const TensorView& u, const MaskView& mask,
                                          const double* rstd, const TensorView& weight,
                                          const MutableTensorView& dx, const Stream& stream);

}  // namespace syncbn::cuda
