// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "random_steps.hpp"

// Every kernel, bit for bit, in random steps.
namespace syncbn {
namespace {

// Each seed is a case and an order of threads of its own. Also the one to repeat: SYNCBN_SEED.
TEST(CudaBits, TwoHundredSeedsExact) {
  const std::uint64_t first = testing::environment_number("SYNCBN_SEED", 1);
  const std::uint64_t seeds = testing::environment_number("SYNCBN_CASES", 200);
  for (std::uint64_t seed = first; seed < first + seeds && !HasFailure(); ++seed) {
    Random random(seed);
    const Case c(random, static_cast<int>(seed % 64), {1, 4, 17, 130, 520}, 4);
    const bool few_binary64_units = seed / 4 % 2 == 0;  // dtypes take turns
    expect_same(c, {{seed, static_cast<int>(random.between(1, 5)),
                     static_cast<unsigned>(random.between(1, 4)), few_binary64_units}});
  }
}

TEST(CudaBits, PassesExact) {
  Random random(1);
  for (int round = 0; round < 60 && !HasFailure(); ++round) {
    expect_same(random, Case(random, round, {1, 4, 5, 16, 49, 64, 130}, 20));
  }
}

TEST(CudaBits, PlanesOfSeveralSegmentsExact) {
  Random random(2);
  for (int round = 0; round < 16 && !HasFailure(); ++round) {
    expect_same(random, Case(random, round, {511, 512, 528, 1537}, 3));
  }
}

TEST(CudaBits, ManyChannelsExact) {
  Random random(3);
  for (int round = 0; round < 12 && !HasFailure(); ++round) {
    expect_same(random, Case(random, round, {1, 4}, 300));
  }
}

/// 2-D input and planes of one element, with 16-byte accesses where channels come by the 8.
TEST(CudaBits, PlanesOfOneElementExact) {
  Random random(5);
  for (int round = 0; round < 32 && !HasFailure(); ++round) {
    expect_same(random, Case(random, round, {1}, round % 8 < 4 ? 3 : 24, round % 8 < 4 ? 8 : 1));
  }
}

/// These have kernels of their own. The last rounds have blocks that take several times their
/// threads.
TEST(CudaBits, PlainStepsOnDenseMemoryExact) {
  Random random(6);
  for (int round = 0; round < 52 && !HasFailure(); ++round) {
    const bool rows = round % 12 < 4;  // dtypes take turns
    const Words planes = round % 24 < 12 ? Words{15, 17, 31, 49, 530} : Words{16, 64, 196};
    const bool large = round >= 48;
    expect_same(random, Case(random, round, large ? Words{50001} : planes,
                             large  ? 2
                             : rows ? 9
                                    : 70,
                             rows ? 8 : 1, rows ? Memory::kRows : Memory::kPlanes,
                             round / 4 % 2 == 0 ? ActivationKind::kNone : ActivationKind::kRelu));
  }
}

/// Masks, residuals and any activation, with the same accesses but other kernels.
TEST(CudaBits, OptionsOnDenseMemoryExact) {
  Random random(7);
  for (int round = 0; round < 64 && !HasFailure(); ++round) {
    const Memory memory = round % 8 < 4 ? Memory::kRows : Memory::kPlanes;  // dtypes take turns
    expect_same(random, Case(random, round, {16, 64, 528}, 3, 8, memory));
  }
}

TEST(CudaBits, RecoveredInputExact) {
  Random random(4);
  for (int round = 0; round < 40; ++round) {
    std::optional<Memory> dense;  // each width of accesses has a kernel of its own
    if (round >= 32) {
      dense = round < 36 ? Memory::kRows : Memory::kPlanes;
    }
    const Case c = round < 24 ? Case(random, round, {1, 5, 16, 64, 130}, 20)
                              : Case(random, round, {1, 7}, 3, 8, dense);
    SCOPED_TRACE(c.text());
    Doubles mean(size(c.channels()));
    Doubles rstd(mean);
    for (std::size_t i = 0; i < mean.size(); ++i) {
      mean[i] = random.signed_unit();
      rstd[i] = 0.5 + std::abs(random.signed_unit());
    }
    std::vector<std::uint8_t> expected_mask(size(activation_mask_bytes(c.x.view())), 0);
    std::vector<std::uint8_t> mask(expected_mask);
    Tensor expected = c.x;
    recover_input({c.x.view(), mean.data(), rstd.data(), c.weight.view(), c.bias.view(),
                   expected.view(), expected_mask.data(), 0.125},
                  serial_executor());
    for (const Configuration& configuration : two_configurations(random)) {
      const ConfigurationScope scope(configuration);
      Tensor x = c.x;  // in place
      cuda::recover_input(
          {on_cuda(TensorView(x.view())), mean.data(), rstd.data(), on_cuda(c.weight.view()),
           on_cuda(c.bias.view()), on_cuda(x.view()), mask.data(), 0.125},
          {});
      EXPECT_TRUE(same_bits(x.values(), expected.values()));
      EXPECT_EQ(mask, expected_mask);
    }
  }
}

}  // namespace
}  // namespace syncbn
