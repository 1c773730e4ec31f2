// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "device.hpp"
#include "layer_step.hpp"
#include "support.hpp"

// A layer on CUDA against the same layer on CPU, rank for rank and bit for bit: every pass, type,
// memory layout and option. torch.nn.SyncBatchNorm has no CPU form to compare with.
namespace syncbn::testing {
namespace {

std::string text(const LayerCase& c, std::size_t ranks) {
  return std::string(name(c.dtype)) + ", " + std::to_string(c.channels) + " channels, " +
         std::to_string(c.spatial.size()) + " axes, " + std::to_string(ranks) + " ranks";
}

LayerCase random_case(Random& random, int number) {
  LayerCase c;
  c.dtype = kDtypes[number % 4];
  c.channels = random.pick<std::int64_t>({1, 2, 5, 8, 16, 33, 64});
  c.spatial = random.pick<std::vector<std::int64_t>>(
      {{}, {1}, {7}, {16}, {7, 7}, {8, 8}, {3, 5, 2}, {23, 27}});
  c.options.eps = random.pick<double>({1e-5, 1e-3, 0});
  c.options.momentum =
      random.one_in(3) ? std::nullopt : std::optional<double>(random.one_in(2) ? 0.1 : 1.0);
  c.options.activation.kind = static_cast<ActivationKind>(random.between(0, 2));
  c.residual = random.one_in(2);
  c.mask = random.one_in(3);
  c.running = !random.one_in(4);
  c.which = random.one_in(2) ? AffineGradients::kGlobal : AffineGradients::kShare;
  c.steps = static_cast<int>(random.between(1, 3));
  return c;
}

void random_steps(int first, int last) {
  for (int i = first; i < last && !::testing::Test::HasFailure(); ++i) {
    Random random(static_cast<std::uint64_t>(1000 + i));
    const LayerCase c = random_case(random, i);
    std::vector<std::int64_t> samples;
    for (std::int64_t ranks = random.pick<std::int64_t>({1, 1, 2, 3}); ranks > 0; --ranks) {
      samples.push_back(random.pick<std::int64_t>({0, 1, 2, 5, 9}));
    }
    SCOPED_TRACE("case " + std::to_string(i) + ", " + text(c, samples.size()));
    compare_layers(c, samples, random);
  }
}

TEST(CudaBatchNorm, RandomStepsExact) {
  SYNCBN_NEEDS_DEVICE();
  random_steps(0, device_cases());
}

/// What compute-sanitizer runs, at a hundredth of the speed.
TEST(CudaBatchNorm, FewRandomStepsExact) {
  SYNCBN_NEEDS_DEVICE();
  random_steps(500, 516);
}

/// Enough of everything that many blocks share a channel and many channels a block.
TEST(CudaBatchNorm, LargeShapesExact) {
  SYNCBN_NEEDS_DEVICE();
  const bool gpu = device_cases() > 100;
  Random random(31);
  for (const DType dtype : kDtypes) {
    for (const auto& spatial : std::vector<std::vector<std::int64_t>>{{}, {14, 14}, {57, 57}}) {
      LayerCase c;
      c.dtype = dtype;
      c.spatial = spatial;
      c.channels = gpu ? 70 : 6;
      SCOPED_TRACE(std::string(name(dtype)) + ", " + std::to_string(spatial.size()) + " axes");
      compare_layers(c, {spatial.empty() && gpu ? 3000 : 12, 4}, random);
    }
  }
}

/// Welford records on CUDA are merged in another order than on CPU; where a rank has one element of
/// a channel, there is nothing to merge, and the whole layer has the CPU's bits.
TEST(CudaBatchNorm, WelfordOfSingleElementsExact) {
  SYNCBN_NEEDS_DEVICE();
  for (int i = 0; i < 16 && !::testing::Test::HasFailure(); ++i) {
    Random random(static_cast<std::uint64_t>(5000 + i));
    LayerCase c = random_case(random, i);
    c.options.statistics = Statistics::kWelford;
    c.spatial.clear();
    const std::vector<std::int64_t> samples =
        i % 3 == 0 ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{1, i % 2, 1};
    SCOPED_TRACE(text(c, samples.size()));
    compare_layers(c, samples, random);
  }
}

}  // namespace
}  // namespace syncbn::testing
