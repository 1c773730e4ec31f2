// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "syncbn/executor.hpp"
#include "syncbn/step.hpp"
#include "syncbn/tensor.hpp"

// The passes of a step on the CPU, one piece of work each. The doors have checked the arguments.
// Per-channel arrays have C entries. docs/numerics.md fixes every bit.
namespace syncbn {

/// Sums of x and x*x over this rank's samples as exact integers.
/// message: message_words(x.dtype, C) words, written whole. If no element counts (N = 0, an empty
/// spatial axis, all masked out) they are zeros.
void local_moments(const TensorView& x, const MaskView& mask, std::int64_t* message,
                   std::uint32_t fingerprint, const Execution& execution);

/// mean, biased var and rstd = 1/sqrt(var + eps) from a summed message (docs/numerics.md, section
/// 3); identical on every rank. count = 0 gives zeros. When the header disagrees, mean, var and
/// rstd are NaN in every channel. words: the channels' words, C times
/// words_per_channel(info.dtype).
void finalize_moments(const MessageInfo& info, const std::int64_t* words, double* mean, double* var,
                      double* rstd, std::int64_t channels, double eps, const Execution& execution);

/// y = activation((x - mean) * rstd * weight + bias + residual) (section 4).
struct Normalization {
  TensorView x = {};
  MaskView mask = {};
  const double* mean = nullptr;
  const double* rstd = nullptr;
  TensorView weight = {};    ///< C entries of any dtype, or absent: 1
  TensorView bias = {};      ///< or absent: 0
  TensorView residual = {};  ///< like x, or absent
  MutableTensorView y = {};  ///< x's shape and dtype, any strides, may be x or residual itself
  /// activation_mask_bytes(x) bytes, or null; bits of elements that do not count mean nothing.
  std::uint8_t* activation_mask = nullptr;
  Activation activation = {};
};
void normalize(const Normalization& pass, const Execution& execution);

/// running <- (1 - factor) * running + factor * batch value, with the unbiased variance (section
/// 5). count = 0 changes nothing. Either tensor may be absent.
void update_running_statistics(const MutableTensorView& running_mean,
                               const MutableTensorView& running_var, const double* mean,
                               const double* var, std::int64_t channels, std::int64_t count,
                               double factor);

/// Sums of u and u*x over this rank's samples, u being dy come back through the activation.
struct GradientSums {
  TensorView dy = {};  ///< like x
  TensorView x = {};
  MaskView mask = {};
  const double* mean = nullptr;  ///< read, as rstd, where the activation's sign is computed again
  const double* rstd = nullptr;
  ActivationGradient through = {};
  MutableTensorView u = {};  ///< written unless absent (the residual's gradient); may be dy
};
/// message: as in local_moments.
void local_gradients(const GradientSums& pass, std::int64_t* message, std::uint32_t fingerprint,
                     const Execution& execution);

/// What is made of those sums: coefficients c1, c2, c3 of the input's gradient, and gradients of
/// weight and bias (section 6).
struct ParameterGradients {
  const double* mean = nullptr;
  const double* rstd = nullptr;
  TensorView weight = {};
  double* coefficients = nullptr;  ///< 3 * channels, c1 of all channels first
  MutableTensorView dweight = {};  ///< C entries of any dtype, or absent
  MutableTensorView dbias = {};
  std::int64_t channels = 0;
};
/// From a summed message, with global gradients of weight and bias. Coefficients are NaN when the
/// header disagrees or its count is not `count`.
void finalize_gradients(const MessageInfo& info, const std::int64_t* words,
                        const ParameterGradients& to, std::int64_t count,
                        const Execution& execution);

/// This rank's own share of the gradients of weight and bias, from the words of the message that it
/// sent. The coefficients are not written, nor is the weight read.
void affine_gradient_shares(const std::int64_t* words, DType dtype, const ParameterGradients& to,
                            const Execution& execution);

/// dx = c1*u + c2*(x - mean) + c3 (section 6), u being dy come back through the activation.
struct InputGradient {
  TensorView dy = {};
  TensorView x = {};
  MaskView mask = {};
  const double* mean = nullptr;
  const double* rstd = nullptr;
  const double* coefficients = nullptr;
  ActivationGradient through = {};
  MutableTensorView dx = {};  ///< x's shape and dtype, any strides, may be dy or x
};
void input_gradient(const InputGradient& pass, const Execution& execution);

/// As the functions of syncbn/step.hpp.
void recover_input_on_cpu(const InputRecovery& pass, const Execution& execution);
void evaluation_input_gradient_on_cpu(const TensorView& u, const MaskView& mask, const double* rstd,
                                      const TensorView& weight, const MutableTensorView& dx,
                                      const Execution& execution);

/// Whole directions of one rank, which need no message: with the bits of the functions above.
/// pass.count: the forward's. CPU.
MessageInfo forward_of_one_rank(const ForwardPass& pass, const Execution& execution);
MessageInfo backward_of_one_rank(const BackwardPass& pass, const Execution& execution);

/// The same for a rank of a group; backward: the header's word.
Reached forward_in_group(const ForwardPass& pass, GroupSum& group, std::uint32_t fingerprint,
                         std::int64_t backward, const Execution& execution);
Reached backward_in_group(const BackwardPass& pass, GroupSum& group, std::uint32_t fingerprint,
                          const Execution& execution);

// The statistics of the "welford" mode (docs/options.md), in place of local_moments and
// finalize_moments: 8 bytes a channel and rank (16 for float64), of which a sum brings each to a
// place of its own. The same on every rank and from run to run, but not independent of how samples
// lie on ranks.

/// Words of one rank's record: its count, then mean and M2 = sum of (x - mean)^2 per channel, as
/// two binary32 numbers in one word (two binary64 numbers in two words for float64).
std::int64_t welford_words(DType dtype, std::int64_t channels);

/// Count, mean and M2 of this rank's samples by Welford's recurrence. message: kHeaderWords +
/// welford_words(x.dtype, C) words, written whole.
void local_welford(const TensorView& x, const MaskView& mask, std::int64_t* message,
                   std::uint32_t fingerprint, const Execution& execution);

/// mean, biased var and rstd of all ranks' samples from their records, in rank order (Chan, Golub
/// and LeVeque 1983), identical on every rank. records: of rank r from stride * r on. A count of 0
/// gives zeros; a header that disagrees, NaN.
void merge_welford(const MessageInfo& info, const std::int64_t* records, double* mean, double* var,
                   double* rstd, std::int64_t channels, int ranks, std::int64_t stride, double eps);

}  // namespace syncbn
