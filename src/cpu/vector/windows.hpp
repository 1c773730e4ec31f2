// SPDX-License-Identifier: Apache-2.0
// Where the windows of channels begin. Included inside a level file's unnamed namespace, after
// elements.hpp, whose rules hold here too.

/// As Kernels::place_windows.
template <class T>
void place_windows(const SumsTask& task, const WindowArrays& w) {
  // Magnitudes as integers, which are ordered alike.
  using Magnitude = std::conditional_t<sizeof(T) == 2, std::int16_t, std::int32_t>;
  constexpr Magnitude kMagnitude = sizeof(T) == 2 ? 0x7fff : 0x7fffffff;
  constexpr int kFraction = ElementTraits<T>::kFraction;
  constexpr std::int32_t kNotFinite = kMagnitude >> kFraction;
  constexpr std::int64_t kProbes = 6;
  constexpr std::int64_t kBlock = 64;

  std::int32_t log_length = 0;
  while ((std::int64_t{1} << log_length) < minimum(task.plane, kSegment)) {
    ++log_length;
  }
  const std::int64_t segments = (task.plane + kSegment - 1) / kSegment;
  const std::int64_t sample = task.unit_begin / segments;
  const bool along_plane = task.plane > 1;
  const std::int64_t probes =
      minimum(kProbes, along_plane ? task.plane : task.unit_end - task.unit_begin);
  for (std::int64_t begin = 0; begin < task.channels; begin += kBlock) {
    const std::int64_t some = minimum(kBlock, task.channels - begin);
    const auto probe = [&](const Operand& of, Magnitude(&largest)[kBlock]) {
      const T* data = plane_of<T>(of, sample, begin);
      const std::int64_t step = along_plane ? of.element_stride : of.sample_stride;
      const auto take = [&](const T* from, std::int64_t channel_step) {
        for (std::int64_t i = 0; i < some; ++i) {
          const auto bits = bit_copy<Magnitude>(from[i * channel_step]);
          const auto magnitude = static_cast<Magnitude>(bits & kMagnitude);
          largest[i] = magnitude > largest[i] ? magnitude : largest[i];
        }
      };
      for (std::int64_t p = 0; p < probes; ++p) {
        of.channel_stride == 1 ? take(data + p * step, 1)  // what a compiler turns into vectors
                               : take(data + p * step, of.channel_stride);
      }
    };
    // The exponent e with magnitude < 2^e; 1 if there is nothing to go by.
    const auto exponent_above = [](Magnitude magnitude) {
      const std::int32_t exponent = magnitude >> kFraction;
      return magnitude == 0 || exponent == kNotFinite ? 1 : exponent - kNotFinite / 2 + 1;
    };
    Magnitude largest[2][kBlock] = {};
    probe(task.u, largest[0]);
    const bool product = task.v.data != nullptr;
    if (product) {
      probe(task.v, largest[1]);
    }
    const Magnitude* of_v = largest[product ? 1 : 0];
    std::int32_t tops[2][kBlock];
    for (std::int64_t i = 0; i < kBlock; ++i) {
      const std::int32_t above = exponent_above(largest[0][i]) + log_length;
      tops[0][i] = above + 4;
      tops[1][i] = above + exponent_above(of_v[i]) + 6;
    }
    for (int sum = 0; sum < 2; ++sum) {
      double* __restrict high = w.magic_high[sum] + begin;
      double* __restrict low = w.magic_low[sum] + begin;
      double* __restrict bound = w.bound[sum] + begin;
      for (std::int64_t i = 0; i < some; ++i) {
        const WindowPlace place(tops[sum][i]);
        high[i] = place.magic_high;
        low[i] = place.magic_low;
        bound[i] = place.bound;
      }
    }
  }
}
