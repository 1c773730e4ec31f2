#pragma once

#include <cstdint>

#include "cpu/windows.hpp"
#include "syncbn/tensor.hpp"

// The vector kernels of one instruction set. Each level_*.cpp compiles the same passes
// (level_passes.hpp) with its own flags and exports one table; dispatch.cpp chooses at run time.
// Types: float16, bfloat16 and float32. Everything else is the reference's work.
namespace syncbn::cpu {

/// A tensor at channel 0 of the task; strides in elements.
struct Operand {
  const void* data = nullptr;
  std::int64_t sample_stride = 0;
  std::int64_t channel_stride = 0;  ///< planes
  std::int64_t element_stride = 0;  ///< rows
};

/// Sums of u and u*v over units [unit_begin, unit_end), a unit being one segment of one sample, for
/// `channels` channels. v.data == nullptr: v = u.
struct SumsTask {
  Operand u;
  Operand v;
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  std::int64_t unit_begin = 0;
  std::int64_t unit_end = 0;
};

/// Per-channel constants of the element-wise passes, arrays padded to kChannelPadding.
/// normalize:      y  = fma(c1, t, c3)
/// input gradient: dx = fma(c1, u, fma(c2, t * power, c3))      t = (x - mean_high) - mean_low
struct ElementConstants {
  const float* mean_high = nullptr;
  const float* mean_low = nullptr;
  const float* c1 = nullptr;
  const float* c2 = nullptr;
  const float* c3 = nullptr;
  const float* power = nullptr;
};

/// Planes: items are blocks of at most kElementBlock elements of a plane, in the order (n, c,
/// block). Rows: items are rows (n, e).
struct ElementsTask {
  Operand x;
  Operand dy;  ///< input gradient only
  Operand out;
  ElementConstants constants;
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool stream = false;  ///< use non-temporal stores
};
inline constexpr std::int64_t kElementBlock = 16384;

struct Kernels {
  const char* name;
  void (*sum_planes)(DType, const SumsTask&, Windows&, const WindowArrays&);
  void (*sum_rows)(DType, const SumsTask&, Windows&, const WindowArrays&);
  void (*normalize_planes)(DType, const ElementsTask&);
  void (*normalize_rows)(DType, const ElementsTask&);
  void (*gradient_planes)(DType, const ElementsTask&);
  void (*gradient_rows)(DType, const ElementsTask&);
};

extern const Kernels* const kAvx2Kernels;  ///< null where this build has none
extern const Kernels* const kAvx512Kernels;

/// The kernels in use: the best that this processor has, or what force_instruction_set chose; null
/// means the reference.
const Kernels* active_kernels();

/// "avx512", "avx2" or "reference"; false if this build or processor does not have it. For tests
/// and diagnosis; not to be called while a pass runs.
bool force_instruction_set(const char* name);
const char* instruction_set();

}  // namespace syncbn::cpu
