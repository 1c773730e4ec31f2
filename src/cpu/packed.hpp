// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu/cpu_passes.hpp"
#include "cpu/kernels.hpp"
#include "tensors/activation_mask.hpp"
#include "tensors/scratch.hpp"

// Arguments of the passes in the form that the vector kernels take.
namespace syncbn::cpu {

/// The arrays of ElementConstants in one allocation, filled by vector kernels.
class PackedConstants {
 public:
  explicit PackedConstants(std::int64_t channels);
  void set_affine(const NormalizeConstants& from, std::int64_t begin, std::int64_t end);
  /// As set_affine, with the reciprocal of the scale.
  void set_inverse(const NormalizeConstants& from, std::int64_t channels);
  void set_gradient(const GradientConstants& from, std::int64_t begin, std::int64_t end);
  ElementConstants view() const;

 private:
  static constexpr int kArrays = 8;
  float* array(int i) const { return static_cast<float*>(values_.data()) + i * padded_; }
  void arrays_from(std::int64_t channel, float** to) {
    for (int i = 0; i < kArrays; ++i) {
      to[i] = array(i) + channel;
    }
  }
  std::int64_t padded_;
  Scratch values_;
};

inline Operand operand(const SampleView& view) {
  return {view.data, view.sample_stride, view.channel_stride, view.element_stride};
}

/// All of a task that tensors tell. other: null if there is none.
void set_tensors(ElementsTask& task, const SampleView& x, const SampleView* other,
                 const SampleView& out);

/// Whether the kernels can do it: a type and layout of theirs, and activation mask bits in the same
/// order.
bool vectorizable(const Kernels* kernels, const SampleView& x, Layout layout,
                  const std::uint8_t* activation_mask);

ActivationMaskOperand activation_mask_operand(const SampleView& x,
                                              const std::uint8_t* activation_mask);
ActivationConstants activation_constants(const Activation& activation);

}  // namespace syncbn::cpu
