// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"

// Every vector code, thread count and memory layout gives the reference's bits.
namespace syncbn {
namespace {

using testing::available_levels;
using testing::kDtypes;
using testing::kMemories;
using testing::LevelScope;
using testing::Memory;
using testing::Random;
using testing::rough_values;
using testing::round_to;
using testing::same_bits;
using testing::Tensor;

struct Case {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> sizes;
  std::vector<double> x;
  std::vector<double> dy;
  std::vector<double> mean;
  std::vector<double> rstd;
  std::vector<double> coefficients;
  std::vector<double> weight;
  std::vector<double> bias;
  Activation activation;
  std::vector<double> residual;    ///< or none
  bool keep = false;               ///< the residual's gradient is wanted
  std::vector<std::uint8_t> mask;  ///< or none
};

MaskView mask_of(const Case& c) {
  if (c.mask.empty()) {
    return {};
  }
  std::vector<std::int64_t> sizes = c.sizes;
  sizes.erase(sizes.begin() + 1);
  return {c.mask.data(), sizes};
}

struct Bits {
  std::vector<std::int64_t> moments;
  std::vector<std::int64_t> gradients;
  std::vector<double> y;
  std::vector<double> dx;
  std::vector<double> u;
};

/// How x, dy and an output lie in memory.
struct Layouts {
  Memory x = Memory::kPlanes;
  Memory dy = Memory::kPlanes;
  Memory out = Memory::kPlanes;
  std::int64_t offset = 0;  ///< of the first element, so that vectors are not aligned
  bool in_place = false;
};

/// Single elements, the ends of planes, or whole samples do not count.
void set_mask(Random& random, Case& c) {
  const std::int64_t samples = c.sizes[0];
  const auto plane = static_cast<std::int64_t>(c.x.size()) / (samples * c.sizes[1]);
  const std::int64_t kind = random.between(0, 2);
  for (std::int64_t n = 0; n < samples; ++n) {
    const std::int64_t length = kind == 1 ? random.between(0, plane) : plane * random.between(0, 1);
    for (std::int64_t e = 0; e < plane; ++e) {
      const bool counts = kind == 0 ? random.one_in(2) : e < length;
      c.mask.push_back(counts ? static_cast<std::uint8_t>(random.between(1, 255)) : 0);
    }
  }
}

Case random_case(Random& random, DType dtype, std::vector<std::int64_t> sizes) {
  Case c;
  c.dtype = dtype;
  c.sizes = std::move(sizes);
  const std::int64_t per_sample = TensorView(nullptr, dtype, c.sizes).numel() / c.sizes[0];
  c.x = rough_values(random, dtype, c.sizes[0], per_sample);
  c.dy = rough_values(random, dtype, c.sizes[0], per_sample);
  if (random.one_in(4)) {  // benign data: windows fit
    for (double& v : c.x) {
      v = round_to(dtype, 3 + random.signed_unit());
    }
  }
  if (random.one_in(6)) {  // a few elements that are not finite, or at the type's ends
    const double ends[] = {std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN(),
                           -0.0,
                           0x1p-149,
                           3e38};
    for (int i = 0; i < 3; ++i) {
      const auto at =
          static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(c.x.size()) - 1));
      (random.one_in(2) ? c.x : c.dy)[at] = round_to(dtype, ends[random.between(0, 5)]);
    }
  }
  for (std::int64_t i = 0; i < 3 * c.sizes[1]; ++i) {
    c.coefficients.push_back(random.signed_unit());
    if (i < c.sizes[1]) {
      c.mean.push_back(100 * random.signed_unit());
      c.rstd.push_back(std::exp2(40 * random.signed_unit()));
      c.weight.push_back(random.signed_unit());
      c.bias.push_back(random.signed_unit());
    }
  }
  if (random.one_in(2)) {
    c.activation = {static_cast<ActivationKind>(random.between(0, 2)), random.signed_unit()};
    if (random.one_in(2)) {
      c.residual = rough_values(random, dtype, c.sizes[0], per_sample);
    }
    c.keep = random.one_in(2);
  }
  if (random.one_in(3)) {
    set_mask(random, c);
  }
  return c;
}

Bits run(const Case& c, const Layouts& layouts, Executor& executor) {
  Tensor x(c.dtype, c.sizes, layouts.x, layouts.offset);
  Tensor dy(c.dtype, c.sizes, layouts.dy, layouts.offset);
  x.fill(c.x);
  dy.fill(c.dy);
  const std::int64_t channels = c.sizes[1];
  const Tensor weight(DType::kFloat64, {channels}, c.weight);
  const Tensor bias(DType::kFloat64, {channels}, c.bias);
  Tensor z;
  TensorView residual;
  std::vector<std::uint8_t> activation_mask;
  const MaskView mask = mask_of(c);
  if (!c.residual.empty()) {
    z = Tensor(c.dtype, c.sizes, layouts.dy, layouts.offset);
    z.fill(c.residual);
    residual = std::as_const(z).view();
    if (c.activation.kind != ActivationKind::kNone) {
      activation_mask.resize(static_cast<std::size_t>(activation_mask_bytes(x.view())));
    }
  }
  Bits bits;
  bits.moments.assign(static_cast<std::size_t>(message_words(c.dtype, channels)), -1);
  bits.gradients = bits.moments;
  local_moments(std::as_const(x).view(), mask, bits.moments.data(), 1, executor);
  Tensor y(c.dtype, c.sizes, layouts.out, layouts.offset + 1);
  Tensor dx(c.dtype, c.sizes, layouts.out, layouts.offset + 1);
  Tensor u(c.dtype, c.sizes, layouts.out, layouts.offset + 1);
  Tensor x_copy = x;
  Tensor& y_out = layouts.in_place ? x_copy : y;
  Tensor& dx_out = layouts.in_place ? dy : dx;
  Tensor& u_out = layouts.in_place ? dy : u;
  const TensorView x_view = std::as_const(x).view();
  normalize({layouts.in_place ? std::as_const(x_copy).view() : x_view, mask, c.mean.data(),
             c.rstd.data(), weight.view(), bias.view(), residual, y_out.view(),
             activation_mask.empty() ? nullptr : activation_mask.data(), c.activation},
            executor);
  ActivationGradient through{c.activation, weight.view(), bias.view(),
                             activation_mask.empty() ? nullptr : activation_mask.data()};
  local_gradients({std::as_const(dy).view(), x_view, mask, c.mean.data(), c.rstd.data(), through,
                   c.keep ? u_out.view() : MutableTensorView()},
                  bits.gradients.data(), 1, executor);
  if (c.keep) {
    bits.u = u_out.values();
    through = {};
  }
  input_gradient({c.keep ? std::as_const(u_out).view() : std::as_const(dy).view(), x_view, mask,
                  c.mean.data(), c.rstd.data(), c.coefficients.data(), through, dx_out.view()},
                 executor);
  EXPECT_TRUE(y_out.gaps_untouched());
  EXPECT_TRUE(dx_out.gaps_untouched());
  EXPECT_TRUE(u_out.gaps_untouched());
  bits.y = y_out.values();
  bits.dx = dx_out.values();
  return bits;
}

void expect_same(const Bits& actual, const Bits& expected) {
  EXPECT_EQ(actual.moments, expected.moments);
  EXPECT_EQ(actual.gradients, expected.gradients);
  EXPECT_TRUE(same_bits(actual.y, expected.y)) << "y";
  EXPECT_TRUE(same_bits(actual.dx, expected.dx)) << "dx";
  EXPECT_TRUE(same_bits(actual.u, expected.u)) << "u";
}

Bits reference_of(const Case& c) {
  const LevelScope scope("reference");
  return run(c, {}, serial_executor());
}

std::string describe(const Case& c, const Layouts& layouts, const std::string& level) {
  std::string text = level + ", " + name(c.dtype) + " (";
  for (const std::int64_t size : c.sizes) {
    text += std::to_string(size) + " ";
  }
  return text + "), layouts " + std::to_string(static_cast<int>(layouts.x)) + " " +
         std::to_string(static_cast<int>(layouts.dy)) + " " +
         std::to_string(static_cast<int>(layouts.out)) + (layouts.in_place ? ", in place" : "") +
         ", activation " + std::to_string(static_cast<int>(c.activation.kind)) +
         (c.residual.empty() ? "" : ", residual") + (c.keep ? ", u" : "") +
         (c.mask.empty() ? "" : ", mask");
}

/// Planes of 1 to 3000 elements in 0 to 3 spatial axes, 1 to 70 channels, at most 12,000 elements.
std::vector<std::int64_t> random_sizes(Random& random) {
  const std::vector<std::int64_t> planes = {1, 2, 15, 16, 17, 49, 196, 511, 512, 513, 1100, 3000};
  const std::vector<std::int64_t> few = {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 65, 70};
  const std::int64_t plane = random.one_in(3) ? random.between(1, 40) : random.pick(planes);
  std::int64_t channels = random.pick(few);
  while (channels > 1 && channels * plane > 12000) {
    channels /= 2;
  }
  const std::int64_t most = std::max<std::int64_t>(1, 12000 / (plane * channels));
  std::vector<std::int64_t> sizes = {random.between(1, std::min<std::int64_t>(most, 80)), channels};
  if (plane > 1 || random.one_in(2)) {
    std::int64_t left = plane;
    for (std::int64_t factor : {7, 3, 2}) {
      if (left % factor == 0 && random.one_in(2)) {
        sizes.push_back(factor);
        left /= factor;
      }
    }
    sizes.push_back(left);
  }
  return sizes;
}

TEST(Levels, RandomShapesAndLayoutsExact) {
  const std::vector<std::string> levels = available_levels();
  ThreadPool two(2);
  ThreadPool three(3);
  Random random(60);
  for (int round = 0; round < 200; ++round) {
    const DType dtype = kDtypes[random.one_in(8) ? 3 : random.between(0, 2)];
    const Case c = random_case(random, dtype, random_sizes(random));
    const Bits expected = reference_of(c);
    for (const std::string& level : levels) {
      const LevelScope scope(level);
      for (int i = 0; i < 2; ++i) {
        Layouts layouts;
        layouts.x = random.pick(kMemories);
        layouts.dy = random.one_in(3) ? random.pick(kMemories) : layouts.x;
        layouts.out = random.one_in(3) ? random.pick(kMemories) : layouts.x;
        layouts.offset = random.between(0, 5);
        layouts.in_place = random.one_in(4);
        Executor& executor = random.one_in(3)   ? serial_executor()
                             : random.one_in(2) ? static_cast<Executor&>(two)
                                                : three;
        SCOPED_TRACE(describe(c, layouts, level));
        expect_same(run(c, layouts, executor), expected);
        if (HasFailure()) {
          return;
        }
      }
    }
  }
}

// Outputs of 4 MB and more take other stores; sums of this size are dealt to all threads.
TEST(Levels, LargeTensorsExact) {
  ThreadPool pool(2);
  Random random(61);
  const struct {
    DType dtype;
    std::vector<std::int64_t> sizes;
    Memory memory;
    std::int64_t offset;  ///< outputs lie one element further: 15 aligns them
    bool fused = false;
    bool masked = false;
  } cases[] = {{DType::kFloat32, {3, 16, 150, 150}, Memory::kPlanes, 15},
               {DType::kFloat32, {3, 16, 150, 150}, Memory::kRows, 15},
               {DType::kFloat32, {1, 600, 2000}, Memory::kRows, 0},
               {DType::kFloat32, {2200, 481}, Memory::kRows, 2},
               {DType::kFloat16, {4200, 32, 17}, Memory::kPlanes, 4},
               {DType::kFloat32, {9, 301, 14, 14}, Memory::kPlanes, 5},
               {DType::kBFloat16, {30, 703, 7, 7}, Memory::kPlanes, 31, true, true},
               {DType::kFloat32, {5, 130, 32, 32}, Memory::kPlanes, 15},
               {DType::kFloat32, {9, 300, 16, 16}, Memory::kPlanes, 15, true},
               {DType::kBFloat16, {11, 130, 32, 32}, Memory::kPlanes, 31, true, true},
               {DType::kFloat16, {40, 64, 30, 30}, Memory::kRows, 31},
               {DType::kBFloat16, {2, 70, 20000}, Memory::kPlanes, 31},
               {DType::kBFloat16, {5000, 500}, Memory::kRows, 3},
               {DType::kFloat32, {3, 16, 150, 150}, Memory::kPlanes, 15, true},
               {DType::kFloat32, {3, 16, 150, 150}, Memory::kPlanes, 3, true},
               {DType::kFloat16, {40, 64, 30, 30}, Memory::kRows, 31, true},
               {DType::kFloat32, {3, 16, 150, 150}, Memory::kPlanes, 15, false, true},
               {DType::kFloat16, {40, 64, 30, 30}, Memory::kRows, 31, true, true}};
  for (const auto& one : cases) {
    Case c;
    c.dtype = one.dtype;
    c.sizes = one.sizes;
    // A pattern with a prime period; fresh random numbers would take longer than the test.
    const auto count = static_cast<std::size_t>(TensorView(nullptr, c.dtype, c.sizes).numel());
    const std::vector<double> pattern = rough_values(random, c.dtype, 1, 10007);
    c.x.resize(count);
    c.dy.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      c.x[i] = pattern[i % 10007];
      c.dy[i] = pattern[(i + 5000) % 10007];
    }
    for (std::int64_t i = 0; i < 3 * c.sizes[1]; ++i) {
      c.coefficients.push_back(random.signed_unit());
      c.mean.push_back(random.signed_unit());
      c.rstd.push_back(1 + random.signed_unit());
    }
    c.weight = c.bias = std::vector<double>(c.mean.begin(), c.mean.begin() + c.sizes[1]);
    if (one.fused) {
      c.activation = {ActivationKind::kLeakyRelu, 0.01};
      c.residual = c.dy;
      c.keep = true;
    }
    if (one.masked) {
      set_mask(random, c);
    }
    const Bits expected = reference_of(c);
    for (const std::string& level : available_levels()) {
      if (level == "reference") {
        continue;
      }
      const LevelScope scope(level);
      Layouts layouts;
      layouts.x = layouts.dy = layouts.out = one.memory;
      layouts.offset = one.offset;
      SCOPED_TRACE(describe(c, layouts, level));
      expect_same(run(c, layouts, pool), expected);
    }
  }
}

TEST(Levels, NamesAndChoice) {
  const std::string before = cpu_instruction_set();
  EXPECT_FALSE(force_cpu_instruction_set("sse9"));
  EXPECT_EQ(cpu_instruction_set(), before);
  EXPECT_EQ(available_levels().front(), "reference");
  EXPECT_EQ(available_levels().back(), before) << "the best one is the default";
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    EXPECT_EQ(cpu_instruction_set(), level);
  }
  EXPECT_EQ(cpu_instruction_set(), before);
}

}  // namespace
}  // namespace syncbn
