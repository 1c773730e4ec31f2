// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu/cpu_passes.hpp"
#include "cpu/kernels.hpp"
#include "cpu/packed.hpp"

namespace syncbn::cpu {

/// An element-wise pass by the vector kernels. What is given must outlive this.
class VectorMap {
 public:
  /// y from x, with a residual if not null; constants are set before it runs.
  VectorMap(const SampleView& x, const SampleView* residual, const SampleView& y,
            const std::uint8_t* activation_mask, const Activation& activation);
  /// dx from dy and x. Constants of the gradient are set before it runs.
  VectorMap(const SampleView& dy, const SampleView& x, const SampleView& dx,
            const Pullback& pullback);
  /// x from y = leaky_relu(normalize(x)).
  VectorMap(const SampleView& y, const SampleView& x, std::uint8_t* activation_mask,
            const NormalizeConstants& constants, double negative_slope);

  VectorMap(const VectorMap&) = delete;
  VectorMap& operator=(const VectorMap&) = delete;

  /// Whether the kernels can do it.
  bool possible() const { return possible_; }
  bool in_rows() const { return rows_; }
  /// Whether its stores go past the caches.
  bool streams() const { return task_.stream; }
  PackedConstants& constants() { return packed_; }

  /// All of it, dealt to threads.
  void run(Executor& executor) const;
  /// Planes: the task of channels [begin, end) of all samples, without items.
  ElementsTask task(std::int64_t begin, std::int64_t end) const;
  /// On this thread.
  void run(const ElementsTask& task) const {
    (rows_ ? kernels_->map_rows : kernels_->map_planes)(x_->dtype, pass_, task);
  }

 private:
  VectorMap(ElementPass pass, const SampleView& x, const SampleView* other, const SampleView& out,
            const std::uint8_t* activation_mask, const ActivationConstants& activation);

  const Kernels* kernels_;
  ElementPass pass_;
  const SampleView* x_;
  bool rows_ = false;
  bool possible_ = false;
  PackedConstants packed_;
  ElementsTask task_;  ///< of all channels
};

}  // namespace syncbn::cpu
