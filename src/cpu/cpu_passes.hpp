// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "syncbn/executor.hpp"
#include "syncbn/options.hpp"
#include "syncbn/tensor.hpp"
#include "tensors/sample_view.hpp"

// The passes on CPU. Arguments have been checked; tensors are not empty. The view of x (of u in
// evaluation_input_gradient) says which elements count.
namespace syncbn::cpu {

struct Moments;  // cpu/finalize.hpp
struct Gradients;

/// Words of the sums of x and x*x per channel.
void moment_sums(const SampleView& x, std::int64_t* words, Executor& executor);

/// Mean and M2 per channel, as statistics/welford.hpp packs them.
void welford_records(const SampleView& x, std::int64_t* records, Executor& executor);

/// Channel constants, from which each element-wise pass derives its own.
struct NormalizeConstants {
  const double* mean;
  const double* rstd;
  const double* weight;  ///< as binary64
  const double* bias;
};
/// residual and activation_mask: null if there is none.
void normalize(const SampleView& x, const SampleView* residual, const SampleView& y,
               std::uint8_t* activation_mask, const NormalizeConstants& constants,
               const Activation& activation, Executor& executor);

/// How dy comes back through the activation: by `activation_mask`, or, if that is null, by
/// what normalize makes of x.
struct Pullback {
  Activation activation;
  NormalizeConstants affine;
  const std::uint8_t* activation_mask;
};

/// Words of the sums of u and u*x, u being dy pulled back; stored in u if not null.
void gradient_sums(const SampleView& dy, const SampleView& x, const SampleView* u,
                   std::int64_t* words, const Pullback& pullback, Executor& executor);

/// Those and the element-wise pass that follows, from u if it is not null. weight and bias as
/// binary64; to.coefficients: room.
void forward_of_one_rank(const SampleView& x, const SampleView* residual, const SampleView& y,
                         std::uint8_t* activation_mask, const double* weight, const double* bias,
                         const Activation& activation, const Moments& to, Executor& executor);
void backward_of_one_rank(const SampleView& dy, const SampleView& x, const SampleView* u,
                          const SampleView& dx, const Pullback& pullback, const Gradients& to,
                          Executor& executor);

/// How the sums of a group's ranks come together, from channel 0 on.
class GroupSums {
 public:
  virtual ~GroupSums() = default;
  /// Whether parts travel while others are computed.
  virtual bool streams() const = 0;
  /// This rank's words of the channels below `end` are there.
  virtual void publish(std::int64_t end) = 0;
  /// Whether those of all ranks are. If not, nothing further may be made of them now, but all words
  /// of this rank have to be published.
  virtual bool wait(std::int64_t end) = 0;
  /// Makes statistics of them. Several threads call it, for channels of their own.
  virtual void finalize(std::int64_t begin, std::int64_t end) = 0;
};

/// Whole directions of a rank of a group, by `group`; to: where that puts the statistics. words: of
/// this rank, of all channels. Whether the statistics and the output are there.
bool forward_in_group(const SampleView& x, const SampleView* residual, const SampleView& y,
                      std::uint8_t* activation_mask, const double* weight, const double* bias,
                      const Activation& activation, const Moments& to, std::int64_t* words,
                      GroupSums& group, Executor& executor);
bool backward_in_group(const SampleView& dy, const SampleView& x, const SampleView* u,
                       const SampleView& dx, const Pullback& pullback, const Gradients& to,
                       std::int64_t* words, GroupSums& group, Executor& executor);

struct GradientConstants {
  const double* mean;
  const double* rstd;
  const double* c1;
  const double* c2;
  const double* c3;
};
void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, const Pullback& pullback,
                    Executor& executor);
void evaluation_input_gradient(const SampleView& u, const SampleView& dx, const double* c1,
                               Executor& executor);

/// x and activation_mask from y = leaky_relu(normalize(x)).
void recover_input(const SampleView& y, const SampleView& x, std::uint8_t* activation_mask,
                   const NormalizeConstants& constants, double negative_slope, Executor& executor);

/// The plain loops: every type and layout, the same bits as the vector kernels.
namespace reference {
void normalize(const SampleView& x, const SampleView* residual, const SampleView& y,
               std::uint8_t* activation_mask, const NormalizeConstants& constants,
               const Activation& activation, Executor& executor);
void gradient_sums(const SampleView& dy, const SampleView& x, const SampleView* u,
                   std::int64_t* words, const Pullback& pullback, Executor& executor);
void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, const Pullback& pullback,
                    Executor& executor);
void evaluation_input_gradient(const SampleView& u, const SampleView& dx, const double* c1,
                               Executor& executor);
void recover_input(const SampleView& y, const SampleView& x, std::uint8_t* activation_mask,
                   const NormalizeConstants& constants, double negative_slope, Executor& executor);
}  // namespace reference

}  // namespace syncbn::cpu
