// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu/windows.hpp"
#include "syncbn/tensor.hpp"

// The vector kernels of one instruction set. Each source of vector/ compiles the same passes
// (vector/passes.hpp) with its own flags and exports one table; dispatch.cpp chooses at run time.
// Types: float16, bfloat16 and float32. Everything else is the reference's work.
namespace syncbn::cpu {

/// A tensor at channel 0 of the task; strides in elements.
struct Operand {
  const void* data = nullptr;
  std::int64_t sample_stride = 0;
  std::int64_t channel_stride = 0;  ///< planes
  std::int64_t element_stride = 0;  ///< rows
};

/// Bits of an activation mask, laid out as in activation_mask.hpp, from channel 0 of the task on.
struct ActivationMaskOperand {
  std::uint8_t* data = nullptr;
  std::int64_t sample_bytes = 0;
  std::int64_t run_bytes = 0;
};

/// Per-channel constants of the element-wise passes, with room for 32 from any multiple of
/// kChannelPadding on.
/// v = fma(scale, t, shift)      t = (x - mean_high) - mean_low
/// dx = fma(c1, u, fma(c2, t * power, c3))
struct ElementConstants {
  const float* mean_high = nullptr;
  const float* mean_low = nullptr;
  const float* scale = nullptr;
  const float* shift = nullptr;
  const float* c1 = nullptr;
  const float* c2 = nullptr;
  const float* c3 = nullptr;
  const float* power = nullptr;

  /// Those of channels from `channel` on.
  ElementConstants from(std::int64_t channel) const {
    return {mean_high + channel, mean_low + channel, scale + channel, shift + channel,
            c1 + channel,        c2 + channel,       c3 + channel,    power + channel};
  }
};

/// An activation that gives 0 below 0, or negative_slope times the value; 1: no activation.
struct ActivationConstants {
  bool zero = false;
  float negative_slope = 1.0f;
};

/// Memory that sums of u and v read next.
struct NextRead {
  const char* u = nullptr;
  const char* v = nullptr;
};

/// What a kernel of sums does a bit of after each segment that it has read, of so many elements.
/// next_u and next_v, as in NextRead, are apart: for a pair GCC uses vectors, which takes longer.
struct Meanwhile {
  void (*step)(void* state, std::int64_t elements, const char* next_u, const char* next_v);
  void* state;
};

/// Sums of u and u*v over units [unit_begin, unit_end), a unit being one segment of one sample, for
/// `channels` channels. v.data == nullptr: v = u. With `constants` (else null), u is dy of a fused
/// activation with input v: what is summed is u come back through it, which is written to `out` if
/// that has data, with +0 where an element does not count.
struct SumsTask {
  Operand u;
  Operand v;
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  std::int64_t unit_begin = 0;
  std::int64_t unit_end = 0;
  const ElementConstants* constants = nullptr;
  ActivationConstants activation;
  ActivationMaskOperand activation_mask;
  Operand out;
  const std::uint8_t* mask = nullptr;    ///< as in SampleView
  const Meanwhile* meanwhile = nullptr;  ///< planes
};

/// Planes: items are blocks of at most kElementBlock elements of a plane, in the order (n, c,
/// block). Rows: items are rows (n, e).
struct ElementsTask {
  Operand x;
  Operand other;  ///< dy, or the residual
  Operand out;
  ElementConstants constants;
  ActivationConstants activation;
  ActivationMaskOperand activation_mask;  ///< read in backward, written in forward, if it has data
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const std::uint8_t* mask = nullptr;  ///< as in SampleView
  /// Planes, from the first on in the order (n, c), that follow each other without gaps in all
  /// operands: 1, all of a sample, or all.
  std::int64_t run = 1;
  bool stream = false;         ///< use non-temporal stores
  bool beyond_caches = false;  ///< of rows: whether the whole tensor is
  /// Planes: items are elements of one run, counted from a plane that has the first of them.
  /// Stores are not fenced.
  bool piecemeal = false;
  std::int64_t sample = 0;
  std::int64_t channel = 0;
  NextRead next;  ///< piecemeal: asked for while stores go to memory, if not null
};
inline constexpr std::int64_t kElementBlock = 16384;
/// Runs of fewer bytes end in the middle of a cache line too often for non-temporal stores.
inline constexpr std::int64_t kStreamRun = 8192;

enum class ElementPass : std::uint8_t {
  kNormalize,
  kNormalizeActivated,  ///< and an activation, whose mask is written if it has data
  kNormalizeResidual,   ///< the same after adding `other`
  kGradient,
  kGradientActivated,       ///< through an activation whose sign is computed again
  kGradientActivationMask,  ///< through an activation with a mask
  kRecover,  ///< x from y = leaky_relu(v): constants are those of the inverse, activation mask
             ///< written
};

/// Sums of neighbouring channels from `channel` on: in the limbs of windows, or, without any, as
/// words.
struct SumsAt {
  const Format* format = nullptr;
  const std::int64_t* words = nullptr;
  const WindowArrays* windows = nullptr;
  std::int64_t channel = 0;
};

/// Per channel, rounded sums of u and u*x and what docs/numerics.md, section 6, makes of them.
struct CoefficientArrays {
  const double* first;
  const double* second;
  const double* mean;
  const double* rstd;
  const double* weight;
  double* c1;
  double* c2;
  double* c3;
  double* dweight;
};

struct Kernels {
  const char* name;
  /// Guesses from the first few elements of each channel where partials will lie.
  void (*place_windows)(DType, const SumsTask&, const WindowArrays&);
  void (*sum_planes)(DType, const SumsTask&, Windows&, const WindowArrays&);
  void (*sum_rows)(DType, const SumsTask&, Windows&, const WindowArrays&);
  void (*map_planes)(DType, ElementPass, const ElementsTask&);
  void (*map_rows)(DType, ElementPass, const ElementsTask&);
  /// Mean, variance and rstd of neighbouring channels (formats half and single). done[c]: whether
  /// channel c's were certain; if not, its outputs mean nothing.
  void (*round_moments)(const SumsAt&, std::int64_t channels, double count, double eps,
                        double* mean, double* var, double* rstd, bool* done);
  /// The same for both sums.
  void (*round_sums)(const SumsAt&, std::int64_t channels, double* first, double* second,
                     bool* done);
  /// count: elements per channel.
  void (*coefficients)(const CoefficientArrays&, std::int64_t channels, std::int64_t count);
  /// running[c] takes values[c] * correction.
  void (*update_running)(float* running, const double* values, std::int64_t channels, double factor,
                         double correction);
  /// ElementConstants in floats, to arrays in its order: mean_high, mean_low, scale and shift, or
  /// the others beside the same mean.
  void (*pack_affine)(const double* mean, const double* rstd, const double* weight,
                      const double* bias, std::int64_t channels, float* const* arrays);
  void (*pack_gradient)(const double* mean, const double* rstd, const double* c1, const double* c2,
                        const double* c3, std::int64_t channels, float* const* arrays);
};

extern const Kernels* const kAvx2Kernels;  ///< x86-64
extern const Kernels* const kAvx512Kernels;
extern const Kernels* const kAvx512Bf16Kernels;
extern const Kernels* const kNeonKernels;  ///< aarch64

/// The kernels in use: the best that this processor has, or what force_instruction_set chose; null
/// means the reference.
const Kernels* active_kernels();

/// "avx512_bf16", "avx512", "avx2", "neon" or "reference"; false if this build or processor does
/// not have it. For tests and diagnosis; not to be called while a pass runs.
bool force_instruction_set(const char* name);
const char* instruction_set();

}  // namespace syncbn::cpu
