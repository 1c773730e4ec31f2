// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "syncbn/executor.hpp"
#include "syncbn/export.hpp"
#include "syncbn/tensor.hpp"

/// The passes of synchronized batch normalization, for those who own the exchange themselves (a
/// framework with process groups of its own). Between local_* and finalize_* the caller sums the
/// message over all ranks: any int64 SUM all-reduce does. docs/numerics.md fixes every bit.
///
/// Tensors x, dy, y, dx have shape (N, C, spatial...), any strides, one dtype. Per-channel arrays
/// have C entries. A mask says which elements of the tensor in front of it count: the others are
/// left out of all sums and of the count, and y, dx and u are +0 there, whatever x and dy hold.
/// What is written to has a place for each entry: no stride is 0 where there are several.
/// All functions throw InvalidArgument before they write anything.
namespace syncbn {

/// Limits of the message format (docs/numerics.md, section 2).
inline constexpr int kMaxRanks = 2048;
inline constexpr std::int64_t kMaxCount = std::int64_t{1} << 36;
/// Keeps the length of a message far from overflow.
inline constexpr std::int64_t kMaxChannels = std::int64_t{1} << 31;

/// Words in front of the channels' words: count, fingerprint, its square, flags, who takes part in
/// backward, and three that are 0 (docs/numerics.md, section 2).
inline constexpr int kHeaderWords = 8;
/// Where a forward's message says who takes part in backward, for the caller: the core writes 0 and
/// reads nothing.
inline constexpr int kHeaderBackward = 4;

/// What runs a call: an executor for CPU tensors, a stream (cudaStream_t) for CUDA tensors. By
/// default the calling thread alone, and the default stream.
struct Execution {
  Execution() : executor(&serial_executor()) {}
  Execution(Executor& cpu_executor) : executor(&cpu_executor) {}
  static Execution on_stream(void* cuda_stream) {
    Execution execution;
    execution.stream = cuda_stream;
    return execution;
  }
  Executor* executor;
  void* stream = nullptr;
};

enum class ActivationKind : std::uint8_t { kNone, kRelu, kLeakyRelu };
inline constexpr int kActivationCount = 3;  ///< how many there are

/// What is applied to the normalized value, after a residual has been added.
struct Activation {
  ActivationKind kind = ActivationKind::kNone;
  double negative_slope = 0.01;  ///< kLeakyRelu: finite
};

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

/// int64 words per channel of a message: 6 (float16), 19 (bfloat16, float32), 83 (float64).
SYNCBN_API int words_per_channel(DType dtype);

/// kHeaderWords + channels * words_per_channel(dtype).
SYNCBN_API std::int64_t message_words(DType dtype, std::int64_t channels);

enum class Direction : std::uint8_t { kForward, kBackward };

/// 20 bits that all ranks of one exchange must share. `layer` and `call` are the caller's names for
/// the layer and for the how-manieth call of it this is.
SYNCBN_API std::uint32_t fingerprint(std::uint64_t layer, std::uint64_t call, Direction direction,
                                     std::int64_t channels, double eps);

/// The backward exchange's fingerprint, derived from the forward one's.
SYNCBN_API std::uint32_t backward_fingerprint(std::uint32_t forward);

/// What the header of a summed message says.
struct MessageInfo {
  std::int64_t count = 0;     ///< elements per channel over all ranks
  bool agree = false;         ///< all fingerprints equal, at most one dtype among ranks with data
  bool any_rejected = false;  ///< a rank could not take part (its input was refused)
  bool any_data = false;      ///< at least one rank had samples; dtype is then set
  DType dtype = DType::kFloat32;  ///< of the ranks with data
};

/// Reads the header of a message summed over `ranks` ranks.
SYNCBN_API MessageInfo read_header(const std::int64_t* merged, int ranks);

/// Throws DivergenceError unless all ranks agree, InvalidArgument when the count is beyond
/// kMaxCount.
SYNCBN_API void check_header(const MessageInfo& info);

/// This rank's header and zero words: what a rank sends whose own input was refused, so that the
/// other ranks learn of it at once. message: kHeaderWords words.
SYNCBN_API void rejection_header(std::uint32_t fingerprint, std::int64_t* message);

/// Sums of x and x*x over this rank's samples as exact integers.
/// message: message_words(x.dtype, C) words, written whole. If no element counts (N = 0, an empty
/// spatial axis, all masked out) they are zeros.
SYNCBN_API void local_moments(const TensorView& x, const MaskView& mask, std::int64_t* message,
                              std::uint32_t fingerprint, const Execution& execution);

/// mean, biased var and rstd = 1/sqrt(var + eps) from a summed message (docs/numerics.md, section
/// 3); identical on every rank. count = 0 gives zeros. When the header disagrees, mean, var and
/// rstd are NaN in every channel. words: the channels' words, C times
/// words_per_channel(info.dtype).
SYNCBN_API void finalize_moments(const MessageInfo& info, const std::int64_t* words, double* mean,
                                 double* var, double* rstd, std::int64_t channels, double eps,
                                 const Execution& execution);

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
SYNCBN_API void normalize(const Normalization& pass, const Execution& execution);

/// The factor of cumulative averaging when `batches` came before this one.
SYNCBN_API double cumulative_factor(double batches);

/// running <- (1 - factor) * running + factor * batch value, with the unbiased variance (section
/// 5). count = 0 changes nothing. Either tensor may be absent.
SYNCBN_API void update_running_statistics(const MutableTensorView& running_mean,
                                          const MutableTensorView& running_var, const double* mean,
                                          const double* var, std::int64_t channels,
                                          std::int64_t count, double factor);

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
SYNCBN_API void local_gradients(const GradientSums& pass, std::int64_t* message,
                                std::uint32_t fingerprint, const Execution& execution);

/// What is made of those sums: coefficients c1, c2, c3 of the input's gradient, and gradients of
/// weight and bias (section 6).
struct ParameterGradients {
  const double* mean = nullptr;
  const double* rstd = nullptr;
  TensorView weight = {};
  double* coefficients = nullptr;  ///< 3 * channels, c1 of all channels first
  MutableTensorView dweight = {};  ///< C entries of any dtype, or absent
  MutableTensorView dbias = {};
  std::int64_t channels = 0;  ///< gradients_of_one_rank has those of x
};
/// From a summed message, with global gradients of weight and bias. Coefficients are NaN when the
/// header disagrees or its count is not `count`.
SYNCBN_API void finalize_gradients(const MessageInfo& info, const std::int64_t* words,
                                   const ParameterGradients& to, std::int64_t count,
                                   const Execution& execution);

/// This rank's own share of the gradients of weight and bias, from the words of the message that it
/// sent. The coefficients are not written, nor is the weight read.
SYNCBN_API void affine_gradient_shares(const std::int64_t* words, DType dtype,
                                       const ParameterGradients& to, const Execution& execution);

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
SYNCBN_API void input_gradient(const InputGradient& pass, const Execution& execution);

// A group of one rank sends nothing, so its statistics need no message. Bits are those of the
// functions above; more than kMaxCount elements per channel are an InvalidArgument. CPU tensors.

/// local_moments, read_header and finalize_moments in one.
SYNCBN_API MessageInfo moments_of_one_rank(const TensorView& x, const MaskView& mask, double* mean,
                                           double* var, double* rstd, double eps,
                                           const Execution& execution);

/// local_gradients, read_header and finalize_gradients in one. On one rank the global gradients of
/// weight and bias are its own share, too.
SYNCBN_API MessageInfo gradients_of_one_rank(const GradientSums& pass, const ParameterGradients& to,
                                             std::int64_t count, const Execution& execution);

/// A whole direction: moments and normalize. Where it pays, sums of some channels are taken while
/// the results of those before them are on their way to memory.
struct ForwardPass {
  TensorView x = {};  ///< as in Normalization, as what follows
  MaskView mask = {};
  TensorView weight = {};
  TensorView bias = {};
  TensorView residual = {};
  MutableTensorView y = {};
  std::uint8_t* activation_mask = nullptr;
  double* mean = nullptr;  ///< written, C entries each
  double* var = nullptr;
  double* rstd = nullptr;
  double eps = 1e-5;
  Activation activation = {};
};
SYNCBN_API MessageInfo forward_of_one_rank(const ForwardPass& pass, const Execution& execution);

/// Sums of gradients, what is made of them, and the input's gradient, from u if there is one.
struct BackwardPass {
  TensorView dy = {};
  TensorView x = {};
  MaskView mask = {};
  const double* mean = nullptr;
  const double* rstd = nullptr;
  ActivationGradient through = {};
  TensorView weight = {};
  MutableTensorView u = {};
  MutableTensorView dx = {};
  MutableTensorView dweight = {};
  MutableTensorView dbias = {};
  bool share = true;  ///< dweight and dbias are this rank's own share; on one rank all there is
  std::int64_t count = 0;  ///< elements per channel over all ranks
};
SYNCBN_API MessageInfo backward_of_one_rank(const BackwardPass& pass, const Execution& execution);

/// For a forward that wrote y = leaky_relu((x - mean) * rstd * weight + bias) over x: gives back x,
/// up to rounding (docs/activation.md has the bound), and the activation mask.
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

/// The gradient of normalize with constant statistics (evaluation): dx = weight * rstd * u, u being
/// dy come back through the activation already.
SYNCBN_API void evaluation_input_gradient(const TensorView& u, const MaskView& mask,
                                          const double* rstd, const TensorView& weight,
                                          const MutableTensorView& dx, const Execution& execution);

}  // namespace syncbn
