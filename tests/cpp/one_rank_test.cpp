// SPDX-License-Identifier: Apache-2.0
#include "one_rank.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "cpu/finalize.hpp"

// A group of one rank needs no message: its functions have the bits of those with one.
namespace syncbn::testing {
namespace {

TEST_F(OneRankDirections, HaveTheBitsOfMessagesExact) {
  Random random(1);
  const std::vector<std::vector<std::int64_t>> shapes = {
      {1, 1},        {3, 5},       {70, 130},      {4, 600},    {300, 3},
      {2, 16, 49},   {3, 7, 513},  {2, 600, 1},    {9, 4, 196}, {2, 33, 1000},
      {5, 33, 2, 8}, {2, 1, 1000}, {1, 3, 10, 100}};
  for (const DType dtype : kDtypes) {
    for (const auto& sizes : shapes) {
      for (const Memory memory : kMemories) {
        SCOPED_TRACE(std::string(name(dtype)) + " N " + std::to_string(sizes[0]) + " C " +
                     std::to_string(sizes[1]) + " axes " + std::to_string(sizes.size()) +
                     " memory " + std::to_string(static_cast<int>(memory)));
        compare(any_layer(random, dtype, sizes, memory));
      }
    }
  }
}

// Outputs of 4 MB and more take other stores; sums of this size are dealt to all threads, and
// directions go through blocks.
TEST_F(OneRankDirections, OfLargeTensorsHaveTheBitsOfMessagesExact) {
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
               {DType::kBFloat16, {3, 1019, 700}, Memory::kRows, 31},
               {DType::kFloat32, {2200, 481}, Memory::kRows, 2},
               {DType::kFloat32, {2200, 484}, Memory::kRows, 15},
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
               {DType::kFloat16, {40, 64, 30, 30}, Memory::kRows, 31, true, true},
               {DType::kFloat32, {2, 100, 3137}, Memory::kPlanes, 3},
               {DType::kFloat32, {1, 132, 16391}, Memory::kPlanes, 8, true},
               {DType::kFloat32, {3, 260, 2800}, Memory::kPlanes, 0, false, true},
               {DType::kBFloat16, {2, 130, 16390}, Memory::kPlanesSlice, 7}};
  for (const auto& one : cases) {
    OneRank layer(random, one.dtype, one.sizes, one.memory, one.offset);
    if (one.fused) {
      layer.activation = {ActivationKind::kLeakyRelu, 0.01};
      layer.with_residual = layer.keep = true;
    }
    if (one.masked) {
      layer.choose_mask(random);
    }
    SCOPED_TRACE(std::string(name(one.dtype)) + " channels " + std::to_string(one.sizes[1]));
    compare(layer, false);
  }
}

/// Limbs of all lengths; sums near ties of the rounding are likely.
std::int64_t any_limb(Random& random) {
  const auto power = std::int64_t{1} << random.between(0, 60);
  const std::int64_t near = power + random.between(-1, 1);
  const std::int64_t limb =
      random.one_in(3) ? near : random.between(-power, power) & -(power >> random.between(0, 20));
  return random.one_in(4) ? 0 : random.one_in(2) ? limb : -limb;
}

TEST_F(OneRankDirections, OfAnyLimbsHaveTheBitsOfWordsExact) {
  Random random(6);
  const std::int64_t channels = 64;
  const auto c = static_cast<std::size_t>(channels);
  for (int round = 0; round < 400; ++round) {
    const DType dtype = random.one_in(4) ? DType::kFloat16 : DType::kFloat32;
    const Format& format = format_of(dtype);
    const std::int32_t reach = dtype == DType::kFloat16 ? 10 : 60;
    cpu::Windows windows(format, channels);
    for (std::int64_t i = 0; i < channels; ++i) {
      const auto lowest = static_cast<std::int32_t>(cpu::kHighBits + cpu::kLowBits);
      windows.place(i, 0, lowest - format.first.unit + static_cast<int>(random.between(0, reach)));
      windows.place(i, 1, lowest - format.second.unit + static_cast<int>(random.between(0, reach)));
      // A sum of squares is not negative.
      windows.arrays().high[0][i] = any_limb(random) >> 30;
      windows.arrays().low[0][i] = any_limb(random);
      windows.arrays().high[1][i] = std::abs(any_limb(random));
      windows.arrays().low[1][i] = std::abs(any_limb(random)) >> 20;
    }
    std::vector<std::int64_t> words(c * static_cast<std::size_t>(format.words()));
    for (std::int64_t i = 0; i < channels; ++i) {
      windows.write_words(i, words.data() + i * format.words());
    }
    const std::int64_t count = random.between(1, 5000);
    std::vector<double> moments[2];
    std::vector<double> gradients[2];
    Tensor dweight(DType::kFloat64, {channels});
    Tensor dbias = dweight;
    const auto finalize = [&](int which, auto&... sums) {
      moments[which].assign(3 * c, 0);
      gradients[which].assign(3 * c, 0);
      double* mean = moments[which].data();
      const cpu::Moments to{count, 1e-5, mean, mean + c, mean + 2 * c};
      cpu::finalize(dtype, sums..., to);
      const cpu::Gradients all{
          count,          mean,         mean + 2 * c, {}, gradients[which].data(),
          dweight.view(), dbias.view(), channels};
      cpu::finalize(dtype, sums..., all);
      for (const Tensor* tensor : {&dweight, &dbias}) {
        const std::vector<double> values = tensor->values();
        gradients[which].insert(gradients[which].end(), values.begin(), values.end());
      }
    };
    const std::int64_t begin = 0;
    {
      const LevelScope scope("reference");
      const std::int64_t* const from = words.data();
      finalize(0, from, begin, channels);
    }
    for (const std::string& level : levels_) {
      const LevelScope scope(level);
      finalize(1, windows, begin);
      ASSERT_TRUE(same_bits(moments[1], moments[0])) << level << " moments, round " << round;
      ASSERT_TRUE(same_bits(gradients[1], gradients[0])) << level << " gradients, round " << round;
    }
  }
}

TEST_F(OneRankDirections, OfNothingAreZerosExact) {
  Random random(3);
  for (const auto& sizes : {std::vector<std::int64_t>{0, 5}, {4, 5, 0}, {3, 0, 7}}) {
    OneRank layer(random, DType::kFloat32, sizes, Memory::kPlanes, 0);
    compare(layer);
  }
  OneRank masked(random, DType::kFloat32, {4, 5, 6}, Memory::kPlanes, 0);
  masked.choose_mask(random);
  std::fill(masked.mask.begin(), masked.mask.end(), 0);
  masked.keep = true;
  compare(masked);
}

}  // namespace
}  // namespace syncbn::testing
