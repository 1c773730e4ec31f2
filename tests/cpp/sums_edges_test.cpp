// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"

// The sums at the edges of what kernels take at a time (rows of a block, channels, segments, planes
// whose partials are folded together), on data that shows every rounding: all levels give the
// reference's words.
namespace syncbn {
namespace {

using testing::available_levels;
using testing::LevelScope;
using testing::Memory;
using testing::Random;
using testing::round_to;
using testing::Tensor;

using Words = std::vector<std::int64_t>;

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

/// Exponents over 120 binades (30 for float16), neighbours that cancel, subnormal numbers, zeros of
/// both signs, and, if `special`, a few values that are not finite.
std::vector<double> nasty_values(Random& random, DType dtype, std::int64_t count, bool special) {
  const int range = dtype == DType::kFloat16 ? 15 : 60;
  const double specials[] = {std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()};
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto kind = random.between(0, 31);
    if (kind < 8 && i > 0) {
      values[i] = -values[i - 1];
    } else if (kind == 8) {
      values[i] = round_to(dtype, dtype == DType::kFloat16 ? 0x1.8p-23 : -0x1.8p-132);
    } else if (kind == 9) {
      values[i] = random.one_in(2) ? 0.0 : -0.0;
    } else {
      const auto exponent = static_cast<int>(random.between(-range, range));
      values[i] = round_to(dtype, std::ldexp(random.signed_unit(), exponent));
    }
  }
  for (int i = 0; special && i < 3; ++i) {
    values[static_cast<std::size_t>(random.between(0, count - 1))] = specials[random.between(0, 2)];
  }
  return values;
}

/// Around 1, so that every window fits, with all bits of the significand.
std::vector<double> plain_values(Random& random, DType dtype, std::int64_t count) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& v : values) {
    v = round_to(dtype, 1 + random.signed_unit());
  }
  return values;
}

struct Case {
  DType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<double> x;
  std::vector<double> dy;
  std::vector<std::uint8_t> mask;  ///< or none
  Activation activation;
  bool keep = false;  ///< what comes back through the activation is written
};

struct Sums {
  Words moments;
  Words gradients;
  std::vector<double> u;
};

Sums sums_of(const Case& c, Memory memory, std::int64_t offset, Executor& executor) {
  Tensor x(c.dtype, c.sizes, memory, offset);
  Tensor dy(c.dtype, c.sizes, memory, offset);
  Tensor u(c.dtype, c.sizes, memory, offset + 1);
  x.fill(c.x);
  dy.fill(c.dy);
  std::vector<std::int64_t> mask_sizes = c.sizes;
  mask_sizes.erase(mask_sizes.begin() + 1);
  const MaskView mask = c.mask.empty() ? MaskView{} : MaskView{c.mask.data(), mask_sizes};
  const std::int64_t channels = c.sizes[1];
  std::vector<double> mean(static_cast<std::size_t>(channels));
  for (std::size_t i = 0; i < mean.size(); ++i) {
    mean[i] = 0.5 + static_cast<double>(i % 7) * 0.125;
  }
  const std::vector<double> rstd(mean.size(), 1.25);
  Sums out;
  out.moments.assign(static_cast<std::size_t>(message_words(c.dtype, channels)), -1);
  out.gradients = out.moments;
  local_moments(std::as_const(x).view(), mask, out.moments.data(), 1, executor);
  const bool through = c.activation.kind != ActivationKind::kNone;
  local_gradients({std::as_const(dy).view(),
                   std::as_const(x).view(),
                   mask,
                   mean.data(),
                   rstd.data(),
                   {c.activation, {}, {}},
                   through && c.keep ? u.view() : MutableTensorView()},
                  out.gradients.data(), 1, executor);
  if (through && c.keep) {
    EXPECT_TRUE(u.gaps_untouched());
    out.u = u.values();
  }
  return out;
}

void expect_reference_words(const Case& c, const std::vector<Memory>& memories, Random& random) {
  Sums expected;
  {
    const LevelScope scope("reference");
    expected = sums_of(c, Memory::kPlanes, 0, serial_executor());
  }
  ThreadPool two(2);
  for (const std::string& level : available_levels()) {
    if (level == "reference") {
      continue;
    }
    const LevelScope scope(level);
    const Memory memory = random.pick(memories);
    const std::int64_t offset = random.between(0, 16);
    const Sums actual = sums_of(c, memory, offset,
                                random.one_in(3) ? static_cast<Executor&>(two) : serial_executor());
    std::ostringstream text;
    text << level << ", " << name(c.dtype) << ", sizes";
    for (const std::int64_t size : c.sizes) {
      text << " " << size;
    }
    text << ", memory " << static_cast<int>(memory) << (c.mask.empty() ? "" : ", mask")
         << ", activation " << static_cast<int>(c.activation.kind);
    SCOPED_TRACE(text.str());
    ASSERT_EQ(actual.moments, expected.moments);
    ASSERT_EQ(actual.gradients, expected.gradients);
    ASSERT_TRUE(testing::same_bits(actual.u, expected.u));
  }
}

Case case_of(Random& random, DType dtype, const std::vector<std::int64_t>& sizes) {
  Case c;
  c.dtype = dtype;
  c.sizes = sizes;
  const std::int64_t count = TensorView(nullptr, dtype, sizes).numel();
  const bool plain = random.one_in(3);
  const bool special = random.one_in(4);
  for (std::vector<double>* values : {&c.x, &c.dy}) {
    *values =
        plain ? plain_values(random, dtype, count) : nasty_values(random, dtype, count, special);
  }
  if (random.one_in(3)) {
    c.activation = {random.one_in(2) ? ActivationKind::kRelu : ActivationKind::kLeakyRelu, 0.01};
    c.keep = random.one_in(2);
  }
  if (random.one_in(4)) {
    const std::int64_t places = count / sizes[1];
    for (std::int64_t i = 0; i < places; ++i) {
      c.mask.push_back(random.one_in(3) ? 0 : 1);
    }
  }
  return c;
}

// Blocks of rows, of channels, and what is left of either; lanes with and without a row.
TEST(SumsEdges, RowsAroundBlocksExact) {
  Random random(130);
  const std::vector<std::int64_t> rows = {2,   3,   15,  16,  17,  31,  33,  47,   48,
                                          49,  63,  64,  65,  79,  81,  127, 128,  129,
                                          145, 511, 512, 513, 575, 576, 577, 1024, 1040};
  const std::vector<std::int64_t> channels = {1,  2,  7,   8,   9,   15,  16,  17,  23,  24,
                                              31, 33, 129, 255, 511, 512, 513, 520, 529, 1030};
  for (int round = 0; round < 90; ++round) {
    const std::int64_t plane = random.pick(rows);
    std::int64_t width = random.pick(channels);
    if (plane * width > 150000) {
      width = random.between(1, 40);
    }
    const std::int64_t samples = plane * width > 50000 ? 1 : random.between(1, 4);
    const Case c = case_of(random, kTypes[round % 3], {samples, width, plane});
    ASSERT_NO_FATAL_FAILURE(
        expect_reference_words(c, {Memory::kRows, Memory::kRows, Memory::kRowsSlice}, random));
  }
}

// Planes of one segment, whose partials are folded together, and of many; counts of channels and
// of segments that leave some of a vector's lanes without one.
TEST(SumsEdges, PlanesAroundVectorsExact) {
  Random random(131);
  const std::vector<std::int64_t> planes = {2,   5,   8,    9,    15,   16,   17,   24,  31,
                                            32,  33,  48,   49,   63,   64,   65,   196, 511,
                                            512, 513, 1024, 1025, 1537, 3136, 4096, 4600};
  for (int round = 0; round < 120; ++round) {
    const std::int64_t plane = random.pick(planes);
    const std::int64_t channels = random.between(1, plane > 600 ? 12 : 40);
    const std::int64_t samples = random.between(1, plane > 600 ? 2 : 4);
    const Case c = case_of(random, kTypes[round % 3], {samples, channels, plane});
    ASSERT_NO_FATAL_FAILURE(expect_reference_words(
        c, {Memory::kPlanes, Memory::kPlanes, Memory::kPlanesSlice}, random));
  }
}

// Samples without an axis in space: windows are placed by the first of them.
TEST(SumsEdges, SingleRowsExact) {
  Random random(132);
  const std::vector<std::int64_t> channels = {1,  7,  8,  9,  15,  16,  17,  31,  32,
                                              33, 63, 64, 65, 255, 256, 257, 300, 530};
  for (int round = 0; round < 120; ++round) {
    const std::int64_t samples =
        random.one_in(3) ? random.between(1, 8) : 64 * random.between(0, 2) + random.between(1, 3);
    Case c = case_of(random, kTypes[round % 3], {samples, random.pick(channels)});
    const auto width = static_cast<std::size_t>(c.sizes[1]);
    if (random.one_in(2)) {  // some channels tell nothing in the first rows
      for (std::size_t i = 0; i < std::min(c.x.size(), 6 * width); ++i) {
        if (i % width % 3 == 0) {
          c.x[i] = random.one_in(2) ? 0.0 : -0.0;
        } else if (i % width % 3 == 1) {
          c.x[i] = c.dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-133;
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(
        expect_reference_words(c, {Memory::kRows, Memory::kRows, Memory::kRowsSlice}, random));
  }
}

}  // namespace
}  // namespace syncbn
