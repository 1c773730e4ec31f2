// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "step/passes.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "syncbn/tensor.hpp"

// The passes of step/passes.hpp on CUDA, with the same bits: step.hpp says how they behave.
namespace syncbn::cuda {

std::int64_t workspace_words(DType dtype, std::int64_t channels);

/// What the header of a forward is made of. layer, call and eps: as in fingerprint(); call is
/// a counter on the device, or null (0). backward: this rank's counters of who takes part in it.
struct ForwardCall {
  std::uint64_t layer = 0;
  const std::int64_t* call = nullptr;
  double eps = 0;
  std::int64_t backward = 0;
  std::int64_t place = 0;  ///< of this rank's record, in words behind the header
};

/// Sums of x and x*x. message: message_words(x.dtype, C) words, written whole. The
/// mask's elements are counted on the device.
void local_moments(const TensorView& x, const MaskView& mask, const ForwardCall& call,
                   std::int64_t* message, std::int64_t* workspace, const Stream& stream);

/// mean, var and rstd (C entries each) and info (kInfoWords) from a message summed over `ranks`
/// ranks, and update_running_statistics, in one kernel where a momentum is given. dtype: of the
/// group's messages.
void finalize_moments(const std::int64_t* merged, DType dtype, int ranks, double* mean, double* var,
                      double* rstd, std::int64_t* info, std::int64_t channels, double eps,
                      const Running& running, const Stream& stream);

/// The welford mode's statistics: the message's header, and welford_words(x.dtype, C) words at the
/// record's place. The same bits on any grid.
void local_welford(const TensorView& x, const MaskView& mask, const ForwardCall& call,
                   std::int64_t* message, const Stream& stream);

/// As finalize_moments, from the records of all ranks, one after another in rank order.
void merge_welford(const std::int64_t* merged, DType dtype, int ranks, double* mean, double* var,
                   double* rstd, std::int64_t* info, std::int64_t channels, double eps,
                   const Stream& stream);

/// As syncbn::normalize.
void normalize(const Normalization& pass, const Stream& stream);

/// Running statistics, both counters plus 1 (batches unless the count is 0; call
/// always), and the count. Without a momentum 1 / batches is the factor. Nothing but call and count
/// changes if the ranks disagreed.
void update_running_statistics(const Running& running, const double* mean, const double* var,
                               const std::int64_t* info, std::int64_t channels,
                               const Stream& stream);

/// mean and rstd for evaluation from running statistics.
void evaluation_statistics(const TensorView& running_mean, const TensorView& running_var,
                           double* mean, double* rstd, double eps, const Stream& stream);

/// As syncbn::local_gradients. info: the forward's; null gives the fingerprint 0. copy: null, or
/// where the message goes a second time, for who has the first one summed in its place.
void local_gradients(const GradientSums& pass, const std::int64_t* info, std::int64_t* message,
                     std::int64_t* workspace, const Stream& stream, std::int64_t* copy = nullptr);

/// Coefficients from a summed message, and the gradients of weight and bias: global ones from it,
/// or, if `own` is not null, this rank's share from the message that it sent. NaN coefficients when
/// the header disagrees or its count is not the forward's (info; null asks for no count).
void finalize_gradients(const std::int64_t* merged, DType dtype, int ranks, const std::int64_t* own,
                        const std::int64_t* info, const ParameterGradients& to,
                        const Stream& stream);

/// As syncbn::input_gradient.
void input_gradient(const InputGradient& pass, const Stream& stream);

/// As syncbn::recover_input.
void recover_input(const InputRecovery& pass, const Stream& stream);

/// dx = weight * rstd * u (constant statistics).
void evaluation_input_gradient(const TensorView& u, const MaskView& mask, const double* rstd,
                               const TensorView& weight, const MutableTensorView& dx,
                               const Stream& stream);

}  // namespace syncbn::cuda
