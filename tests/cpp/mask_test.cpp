// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "placed_rank.hpp"
#include "properties.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Masked samples do not exist: whatever they hold, the rest has the bits of a batch without them.
// Masks inside of planes: properties_test.cpp, and the oracle's tests in test_mask.py.
namespace syncbn::testing {
namespace {

constexpr std::int64_t kSamples = 12;

/// Samples with a mask; those that do not count hold rubbish.
Step masked_step(Random& random, DType dtype, const std::vector<std::int64_t>& spatial) {
  std::vector<std::int64_t> sizes = {kSamples, 5};
  sizes.insert(sizes.end(), spatial.begin(), spatial.end());
  Step step(random, dtype, sizes);
  step.residual = rough_values(random, dtype, kSamples, step.per_sample());
  step.keep = true;
  step.options.activation = {static_cast<ActivationKind>(random.between(0, 2)), 0.3};
  const std::vector<double> rubbish = {std::numeric_limits<double>::quiet_NaN(),
                                       std::numeric_limits<double>::infinity(), 1.0};
  for (std::int64_t n = 0; n < kSamples; ++n) {
    // The first four, a rank of their own, do not count.
    const bool counts = n >= 4 && (n == 4 || random.one_in(2));
    step.mask.insert(step.mask.end(), static_cast<std::size_t>(step.plane()), counts);
    for (std::int64_t i = n * step.per_sample(); !counts && i < (n + 1) * step.per_sample(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      step.x[at] = step.dy[at] = step.residual[at] = random.pick(rubbish);
    }
  }
  return step;
}

bool counts(const Step& step, std::int64_t sample) {
  return step.mask[static_cast<std::size_t>(sample * step.plane())] != 0;
}

/// The step without the samples that do not count, and without a mask. Its split is that of
/// `split`, of samples in ascending order.
Step removed(const Step& step, Split& split) {
  Step out = step;
  std::vector<std::int64_t> left;
  for (auto& samples : split) {
    std::vector<std::int64_t> mine;
    for (const std::int64_t n : samples) {
      if (counts(step, n)) {
        mine.push_back(static_cast<std::int64_t>(left.size()));
        left.push_back(n);
      }
    }
    samples = mine;
  }
  for (auto* values : {&out.x, &out.dy, &out.residual}) {
    if (!values->empty()) {
      *values = parts_of(*values, left, step.per_sample());
    }
  }
  out.mask.clear();
  out.sizes[0] = static_cast<std::int64_t>(left.size());
  return out;
}

/// What counts has the bits of a batch without the rest, which is +0.
void expect_removed(const Step& step, Outcome with, const Outcome& without) {
  for (auto* values : {&with.y, &with.dx, &with.u}) {
    std::vector<double> counting;
    for (std::size_t i = 0; i < values->size(); ++i) {
      const double value = (*values)[i];
      if (counts(step, static_cast<std::int64_t>(i) / step.per_sample())) {
        counting.push_back(value);
      } else {
        EXPECT_TRUE(value == 0 && !std::signbit(value));
      }
    }
    *values = counting;
  }
  expect_same(with, without);
}

TEST(Mask, SamplesAreAsRemovedExact) {
  Random random(120);
  const Split split = {{0, 1, 2, 3}, {4}, {5, 6, 7, 8, 9, 10, 11}};
  for (const DType dtype : kDtypes) {
    for (const Memory memory : {Memory::kPlanes, Memory::kRows, Memory::kOdd}) {
      for (const auto& spatial : std::vector<std::vector<std::int64_t>>{{}, {7, 3}, {600}}) {
        for (const Statistics mode : {Statistics::kReproducible, Statistics::kWelford}) {
          Step step = masked_step(random, dtype, spatial);
          step.options.statistics = mode;
          Split rest = split;
          const Step without = removed(step, rest);
          Placement placement;
          placement.x = placement.dy = placement.residual = placement.out = memory;
          const std::vector<Placement> placements(3, placement);
          for (const std::string& level : available_levels()) {
            const LevelScope scope(level);
            SCOPED_TRACE(level + ", " + name(dtype));
            expect_removed(step, run_in_group(step, split, placements),
                           run_in_group(without, rest, placements));
            if (HasFailure()) {
              return;
            }
          }
        }
      }
    }
  }
}

TEST(Mask, EvaluationExact) {
  Random random(121);
  for (const DType dtype : kDtypes) {
    for (const Memory memory : {Memory::kPlanes, Memory::kRows}) {
      for (const bool residual : {false, true}) {
        Step step = masked_step(random, dtype, {7, 3});
        if (!residual) {
          step.residual.clear();
          step.keep = false;
        }
        Split all = whole(kSamples);
        Placement placement;
        placement.x = placement.dy = placement.out = memory;
        expect_removed(step, evaluate(step, placement), evaluate(removed(step, all), placement));
      }
    }
  }
}

}  // namespace
}  // namespace syncbn::testing
