// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"

// All elements that float16 and bfloat16 have, as inputs, on every level; outputs of every kind
// that is hard to round: ties, subnormal numbers, those next to infinity, zeros of both signs. What
// is expected is written here from the contract.
namespace syncbn::testing {
namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16};
constexpr std::uint64_t kPatterns = 1U << 16;

/// 2^16 elements and a few, so that nothing is whole: (1, 33, 1987) and planes of 49.
const std::vector<std::vector<std::int64_t>> kSizes = {{1, 33, 1987}, {41, 33, 49}};

struct Elements {
  DType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<std::uint16_t> bits;
  std::vector<float> values;
};

/// All bit patterns, again and again, `step` (odd) apart. finite: +0 for those that are not.
Elements every_pattern(DType dtype, const std::vector<std::int64_t>& sizes, std::uint64_t step,
                       bool finite = false) {
  Elements all{dtype, sizes, {}, {}};
  const auto count = static_cast<std::uint64_t>(TensorView(nullptr, dtype, sizes).numel());
  for (std::uint64_t i = 0; i < count; ++i) {
    auto bits = static_cast<std::uint16_t>(i * step % kPatterns);
    std::byte element[sizeof(double)];  // as read_element may read
    std::memcpy(element, &bits, 2);
    auto value = static_cast<float>(read_element(dtype, element));
    if (finite && !std::isfinite(value)) {
      bits = 0;
      value = 0;
    }
    all.bits.push_back(bits);
    all.values.push_back(value);
  }
  return all;
}

/// Bits as they are, NaNs included.
Tensor tensor_of(const Elements& elements, Memory memory, std::int64_t offset) {
  Tensor tensor(elements.dtype, elements.sizes, memory, offset);
  const MutableTensorView view = tensor.view();
  const std::int64_t plane = elements.sizes[2];
  for (std::size_t i = 0; i < elements.bits.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t position = at / plane / elements.sizes[1] * view.strides[0] +
                                  at / plane % elements.sizes[1] * view.strides[1] +
                                  at % plane * view.strides[2];
    std::memcpy(static_cast<std::byte*>(view.data) + 2 * position, &elements.bits[i], 2);
  }
  return tensor;
}

/// v = fma(scale, x, shift), with statistics that change nothing.
struct Line {
  float scale;
  float shift;
};

/// Of all patterns. Products with 1.5 are ties for every other significand.
std::vector<Line> lines_of(DType dtype, Random& random) {
  const bool half = dtype == DType::kFloat16;
  const float smallest_normal = half ? 0x1p-14f : 0x1p-126f;
  const float half_a_step_at_the_end = half ? 16.0f : 0x1p119f;  // of the largest number
  std::vector<Line> lines = {{1.0f, -0.0f},
                             {-1.0f, 0.0f},
                             {1.5f, 0.0f},
                             {-0x1.008p0f, -0.0f},
                             {1.5f * smallest_normal, 0.0f},
                             {-1.25f * smallest_normal / 8, -0.0f},
                             {smallest_normal, smallest_normal},
                             {0x1p-11f * smallest_normal, -0.0f},
                             {1.0f, half_a_step_at_the_end},
                             {1.0f, -0x1.fffffep-1f * half_a_step_at_the_end},
                             {-0x1.01p12f, 0.0f},
                             // NaNs that rounding by integers would make zeros.
                             {bit_copy<float>(0x7fffffffU), 0.0f},
                             {bit_copy<float>(0xffffffffU), 0.0f}};
  for (int i = 0; i < 4; ++i) {
    const double size = std::exp2(random.between(half ? -30 : -140, half ? 10 : 100));
    lines.push_back({static_cast<float>(size * random.signed_unit()),
                     static_cast<float>(size * random.signed_unit())});
  }
  return lines;
}

/// Parameters of a layer whose channels are all alike.
struct Alike {
  Alike(std::int64_t channels, const Line& line)
      : zeros(static_cast<std::size_t>(channels), 0.0),
        ones(zeros.size(), 1.0),
        scales(zeros.size(), line.scale),
        shifts(zeros.size(), line.shift),
        weight(scales.data(), DType::kFloat32, {channels}),
        bias(shifts.data(), DType::kFloat32, {channels}) {}
  std::vector<double> zeros;
  std::vector<double> ones;
  std::vector<float> scales;
  std::vector<float> shifts;
  TensorView weight;
  TensorView bias;
};

float leaky(float v, float slope) { return v > 0 ? v : v * slope; }

/// `actual` is written to at an odd place.
void expect_output(const Tensor& actual, const std::vector<double>& expected, const Line& line) {
  ASSERT_TRUE(same_bits(actual.values(), expected))
      << "scale " << line.scale << ", shift " << line.shift;
  ASSERT_TRUE(actual.gaps_untouched());
}

void check_normalize(const Elements& elements, Memory memory, const Line& line, float slope,
                     std::int64_t offset) {
  const Tensor x = tensor_of(elements, memory, offset);
  Tensor y(elements.dtype, elements.sizes, memory, offset + 1);
  const Alike alike(elements.sizes[1], line);
  const Activation activation =
      slope == 1.0f ? Activation{} : Activation{ActivationKind::kLeakyRelu, slope};
  normalize({x.view(),
             {},
             alike.zeros.data(),
             alike.ones.data(),
             alike.weight,
             alike.bias,
             {},
             y.view(),
             nullptr,
             activation},
            serial_executor());
  std::vector<double> expected;
  for (const float value : elements.values) {
    expected.push_back(
        round_to(elements.dtype, leaky(std::fma(line.scale, value, line.shift), slope)));
  }
  ASSERT_NO_FATAL_FAILURE(expect_output(y, expected, line));
}

/// dy takes all patterns, x others at the same time.
void check_gradient(const Elements& dy_elements, const Elements& x_elements, Memory memory,
                    const Line& line, float slope, std::int64_t offset) {
  const Tensor dy = tensor_of(dy_elements, memory, offset);
  const Tensor x = tensor_of(x_elements, memory, offset);
  const DType dtype = dy_elements.dtype;
  Tensor dx(dtype, dy_elements.sizes, memory, offset + 1);
  const std::int64_t channels = dy_elements.sizes[1];
  const Line identity{1.0f, 0.0f};
  const Alike alike(channels, identity);
  std::vector<double> coefficients;
  for (const float c : {line.scale, 0.25f * line.scale, line.shift}) {
    coefficients.insert(coefficients.end(), static_cast<std::size_t>(channels), c);
  }
  const Activation activation =
      slope == 1.0f ? Activation{} : Activation{ActivationKind::kLeakyRelu, slope};
  input_gradient({dy.view(),
                  x.view(),
                  {},
                  alike.zeros.data(),
                  alike.ones.data(),
                  coefficients.data(),
                  {activation, alike.weight, alike.bias, nullptr},
                  dx.view()},
                 serial_executor());
  std::vector<double> expected;
  for (std::size_t i = 0; i < dy_elements.values.size(); ++i) {
    const float t = x_elements.values[i];
    const float given = dy_elements.values[i];
    const float u = t > 0 || slope == 1.0f
                        ? given
                        : static_cast<float>(round_to(dtype, static_cast<double>(given * slope)));
    expected.push_back(
        round_to(dtype, std::fma(line.scale, u, std::fma(0.25f * line.scale, t, line.shift))));
  }
  ASSERT_NO_FATAL_FAILURE(expect_output(dx, expected, line));
}

template <class Body>
void for_each_level(DType dtype, Memory memory, const Body& body) {
  for (const std::string& level : available_levels()) {
    SCOPED_TRACE(level + ", " + name(dtype) + (memory == Memory::kRows ? ", rows" : ", planes"));
    const LevelScope scope(level);
    ASSERT_NO_FATAL_FAILURE(body());
  }
}

TEST(EveryElement, NormalizedExact) {
  Random random(140);
  for (const DType dtype : kTypes) {
    const float slopes[] = {1.0f, 0.3f, dtype == DType::kFloat16 ? 0x1.8p-12f : 0x1.8p-124f};
    for (const auto& sizes : kSizes) {
      const Elements elements = every_pattern(dtype, sizes, 1);
      const std::vector<Line> lines = lines_of(dtype, random);
      for (std::size_t i = 0; i < lines.size(); ++i) {
        const Memory memory = i % 2 == 0 ? Memory::kPlanes : Memory::kRows;
        ASSERT_NO_FATAL_FAILURE(for_each_level(dtype, memory, [&] {
          check_normalize(elements, memory, lines[i], i < 9 ? 1.0f : slopes[i % 3],
                          random.between(0, 31));
        }));
      }
    }
  }
}

TEST(EveryElement, GradientExact) {
  Random random(141);
  for (const DType dtype : kTypes) {
    const float slopes[] = {0.3f, dtype == DType::kFloat16 ? 0x1.8p-12f : 0x1.8p-124f};
    for (const auto& sizes : kSizes) {
      const Elements dy = every_pattern(dtype, sizes, 1);
      const Elements x = every_pattern(dtype, sizes, 40503, true);
      const std::vector<Line> lines = lines_of(dtype, random);
      for (std::size_t i = 0; i < lines.size(); ++i) {
        const Memory memory = i % 2 == 0 ? Memory::kRows : Memory::kPlanes;
        ASSERT_NO_FATAL_FAILURE(for_each_level(dtype, memory, [&] {
          check_gradient(dy, x, memory, lines[i], i % 3 == 0 ? slopes[i % 2] : 1.0f,
                         random.between(0, 31));
        }));
      }
    }
  }
}

}  // namespace
}  // namespace syncbn::testing
