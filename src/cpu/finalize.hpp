// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu/windows.hpp"
#include "statistics/finalize.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/tensor.hpp"

// From exact sums, as words or in windows, to what the passes give. count >= 1.
namespace syncbn::cpu {

/// Runs body(begin, end) for channels whose words vector code finalizes.
template <class Body>
void for_each_channel(std::int64_t channels, Executor& executor, const Body& body) {
  constexpr std::int64_t kGrain = 1024;  // 20 to 50 us, at which a second thread pays
  executor.parallel_for(0, channels, kGrain, body);
}

/// Arrays of all channels.
struct Moments {
  std::int64_t count;
  double eps;
  double* mean;
  double* var;
  double* rstd;
};
/// words: of channel 0 of all.
void finalize(DType dtype, const std::int64_t* words, std::int64_t begin, std::int64_t end,
              const Moments& moments);
/// windows: of the channels from `begin` on.
void finalize(DType dtype, Windows& windows, std::int64_t begin, const Moments& moments);

/// Arrays of all channels, coefficients as finalize_gradients of passes.hpp gives them, or null.
struct Gradients {
  std::int64_t count;
  const double* mean;
  const double* rstd;
  TensorView weight;
  double* coefficients;
  MutableTensorView dweight;
  MutableTensorView dbias;
  std::int64_t channels;

  void store(const ChannelGradients& of, std::int64_t channel) const;
};
void finalize(DType dtype, const std::int64_t* words, std::int64_t begin, std::int64_t end,
              const Gradients& gradients);
void finalize(DType dtype, Windows& windows, std::int64_t begin, const Gradients& gradients);

/// running <- the contract's update with values[c] * correction.
void update_running(const MutableTensorView& running, const double* values, std::int64_t channels,
                    double factor, double correction);

}  // namespace syncbn::cpu
