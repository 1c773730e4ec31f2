// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "step/passes.hpp"
#include "syncbn/error.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/step.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn {

/// All that differs between devices in a step, and that a layer and a group ask of one. Functions
/// have the arguments of those of syncbn/step.hpp that they serve, which has checked them.
struct DevicePasses {
  // The doors.
  void (*forward_sums)(const ForwardStep& step, std::int64_t* message, const Execution& execution);
  /// Of the merged message, and what is updated.
  void (*forward_statistics)(const ForwardStep& step, const Merged& merged,
                             const Execution& execution);
  void (*update)(const ForwardStep& step, const Execution& execution);
  void (*normalize)(const Normalization& pass, const Execution& execution);
  void (*evaluation_statistics)(const TensorView& running_mean, const TensorView& running_var,
                                double* mean, double* var, double* rstd, double eps,
                                const Execution& execution);
  void (*recover_input)(const InputRecovery& pass, const Execution& execution);
  void (*gradient_sums)(const BackwardStep& step, const GradientSums& pass, std::int64_t* message,
                        std::int64_t* copy, const Execution& execution);
  /// to.dweight and to.dbias are this rank's share where own is not null.
  void (*gradients)(const BackwardStep& step, const ParameterGradients& to, const std::int64_t* own,
                    const Merged& merged, const Execution& execution);
  /// The same as if this rank were alone; without coefficients on the CPU.
  void (*shares)(const ParameterGradients& to, const std::int64_t* own, DType dtype,
                 const Execution& execution);
  void (*input_gradient)(const InputGradient& pass, const Execution& execution);
  void (*evaluation_input_gradient)(const TensorView& u, const MaskView& mask, const double* rstd,
                                    const TensorView& weight, const MutableTensorView& dx,
                                    const Execution& execution);
  /// Null: the doors one after the other are as good.
  Reached (*forward_at_once)(const ForwardStep& step, GroupSum& group,
                             const Execution& execution) = nullptr;
  Reached (*backward_at_once)(const BackwardStep& step, GroupSum& group,
                              const Execution& execution) = nullptr;
  std::int64_t (*workspace_words)(DType dtype, std::int64_t channels) = nullptr;  ///< CUDA

  // Memory, in the order of the stream. What follows the first two is CUDA's.
  void* (*allocate)(void* stream, std::size_t bytes);  ///< may throw std::bad_alloc
  void (*release)(void* stream, void* memory) noexcept;
  void (*zero)(void* stream, void* memory, std::size_t bytes) = nullptr;
  void (*copy)(void* stream, void* to, const void* from, std::size_t bytes) = nullptr;  ///< there
  /// To memory of the host; waits for the stream.
  void (*fetch)(void* stream, void* to, const void* from, std::size_t bytes) = nullptr;
  /// From memory of the host; waits: a device that reads pageable memory directly may read it late.
  void (*bring)(void* stream, void* to, const void* from, std::size_t bytes) = nullptr;
  /// Tells a stream of the current device from all that the process has, or had. Zero while it is
  /// captured, or if CUDA cannot say.
  std::uint64_t (*stream_number)(void* stream) noexcept = nullptr;
};

const DevicePasses& cpu_passes();
/// Throws Unavailable in a build without CUDA.
const DevicePasses& cuda_passes();

inline const DevicePasses& passes_of(Device device) {
  return device == Device::kCpu ? cpu_passes() : cuda_passes();
}

/// Of what takes tensors on the CPU alone.
inline void check_on_cpu(Device device) {
  if (device != Device::kCpu) {
    cuda_passes();
    throw InvalidArgument(
        "device: got a CUDA tensor, expected one on CPU; CUDA tensors go to syncbn/batch_norm.hpp");
  }
}

}  // namespace syncbn
