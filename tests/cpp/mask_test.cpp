// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Masked samples do not exist: whatever they hold, the rest has the bits of a batch without them.
// Masks inside of planes: levels_test.cpp, and the oracle's tests in test_mask.py.
namespace syncbn {
namespace {

using testing::available_levels;
using testing::kDtypes;
using testing::LevelScope;
using testing::Memory;
using testing::Random;
using testing::rough_values;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;

constexpr std::int64_t kSamples = 12;
constexpr std::int64_t kChannels = 5;

/// Samples with masks, and the same without those that do not count.
struct Batch {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> sizes;
  std::vector<double> x, dy, residual;
  std::vector<std::uint8_t> counts;  ///< of samples
  BatchNorm::Options options{.channels = kChannels, .name = "layer"};

  std::int64_t per_sample() const { return static_cast<std::int64_t>(x.size()) / sizes[0]; }

  /// Samples [begin, end), or those of them that count.
  Batch part(std::int64_t begin, std::int64_t end, bool counting) const {
    Batch out;
    out.dtype = dtype;
    out.options = options;
    for (std::int64_t n = begin; n < end; ++n) {
      if (counting && counts[static_cast<std::size_t>(n)] == 0) {
        continue;
      }
      out.counts.push_back(counts[static_cast<std::size_t>(n)]);
      const std::pair<std::vector<double>*, const std::vector<double>*> both[] = {
          {&out.x, &x}, {&out.dy, &dy}, {&out.residual, &residual}};
      for (const auto& [to, from] : both) {
        to->insert(to->end(), from->begin() + n * per_sample(),
                   from->begin() + (n + 1) * per_sample());
      }
    }
    out.sizes = sizes;
    out.sizes[0] = static_cast<std::int64_t>(out.counts.size());
    return out;
  }
};

Batch random_batch(Random& random, DType dtype, std::vector<std::int64_t> spatial) {
  Batch batch;
  batch.dtype = dtype;
  batch.sizes = {kSamples, kChannels};
  batch.sizes.insert(batch.sizes.end(), spatial.begin(), spatial.end());
  const std::int64_t per_sample = TensorView(nullptr, dtype, batch.sizes).numel() / kSamples;
  batch.x = rough_values(random, dtype, kSamples, per_sample);
  batch.dy = rough_values(random, dtype, kSamples, per_sample);
  batch.residual = rough_values(random, dtype, kSamples, per_sample);
  const double rubbish[] = {std::numeric_limits<double>::quiet_NaN(),
                            std::numeric_limits<double>::infinity(), 1.0};
  for (std::int64_t n = 0; n < kSamples; ++n) {
    // The first four, a rank of their own, do not count.
    batch.counts.push_back(n >= 4 && (n == 4 || random.one_in(2)));
    for (std::int64_t i = n * per_sample; batch.counts.back() == 0 && i < (n + 1) * per_sample;
         ++i) {
      const double value = rubbish[random.between(0, 2)];
      const auto at = static_cast<std::size_t>(i);
      batch.x[at] = batch.dy[at] = batch.residual[at] = value;
    }
  }
  return batch;
}

struct Result {
  std::vector<double> y, dx, dresidual, dweight, dbias;
  Saved saved = {};
};

/// What a function of the layer takes besides the batch.
struct Arguments {
  Arguments(const Batch& batch, Memory memory)
      : x(batch.dtype, batch.sizes, memory),
        dy(x),
        residual(x),
        y(x),
        dx(x),
        dresidual(x),
        mask_bytes(),
        weight(DType::kFloat64, {kChannels}, {1, -2, 0.5, 3, -1}),
        bias(DType::kFloat64, {kChannels}, {0.1, 0.2, 0, -1, 2}),
        dweight(weight),
        dbias(weight) {
    x.fill(batch.x);
    dy.fill(batch.dy);
    residual.fill(batch.residual);
    std::vector<std::int64_t> sizes = batch.sizes;
    sizes.erase(sizes.begin() + 1);
    mask.sizes = sizes;
    const std::int64_t plane = batch.x.empty() ? 0 : batch.per_sample() / kChannels;
    for (const std::uint8_t counts : batch.counts) {
      mask_bytes.insert(mask_bytes.end(), static_cast<std::size_t>(plane), counts);
    }
    mask.data = mask_bytes.data();
  }
  Tensor x, dy, residual, y, dx, dresidual;
  std::vector<std::uint8_t> mask_bytes;
  MaskView mask;
  Tensor weight, bias, dweight, dbias;
};

Result step(const Batch& batch, Memory memory, bool masked, Communicator& communicator) {
  Arguments a(batch, memory);
  const MaskView mask = masked ? a.mask : MaskView();
  Result out;
  BatchNorm layer(batch.options, communicator);
  layer.forward({.x = a.x.view(),
                 .mask = mask,
                 .weight = a.weight.view(),
                 .bias = a.bias.view(),
                 .residual = a.residual.view(),
                 .y = a.y.view()},
                out.saved);
  layer.backward({.dy = a.dy.view(),
                  .x = a.x.view(),
                  .mask = mask,
                  .weight = a.weight.view(),
                  .bias = a.bias.view(),
                  .dx = a.dx.view(),
                  .dweight = a.dweight.view(),
                  .dbias = a.dbias.view(),
                  .dresidual = a.dresidual.view(),
                  .affine = AffineGradients::kGlobal},
                 out.saved);
  out.y = a.y.values();
  out.dx = a.dx.values();
  out.dresidual = a.dresidual.values();
  out.dweight = a.dweight.values();
  out.dbias = a.dbias.values();
  return out;
}

/// values of `batch` that count, and whether the others are +0.
std::vector<double> counting(const Batch& batch, const std::vector<double>& values) {
  std::vector<double> out;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (batch.counts[i / static_cast<std::size_t>(batch.per_sample())] != 0) {
      out.push_back(values[i]);
    } else {
      EXPECT_TRUE(values[i] == 0 && !std::signbit(values[i]));
    }
  }
  return out;
}

TEST(Mask, SamplesAreAsRemovedExact) {
  Random random(120);
  const std::vector<std::int64_t> bounds = {0, 4, 5, kSamples};
  for (const DType dtype : kDtypes) {
    for (const Memory memory : {Memory::kPlanes, Memory::kRows, Memory::kOdd}) {
      for (const std::vector<std::int64_t>& spatial :
           std::vector<std::vector<std::int64_t>>{{}, {7, 3}, {600}}) {
        for (const Statistics mode : {Statistics::kReproducible, Statistics::kWelford}) {
          Batch batch = random_batch(random, dtype, spatial);
          batch.options.statistics = mode;
          batch.options.activation = {static_cast<ActivationKind>(random.between(0, 2)), 0.3};
          for (const std::string& level : available_levels()) {
            const LevelScope scope(level);
            Result results[2][3];
            for (const bool masked : {false, true}) {
              ThreadGroup group(3);
              const auto errors = run_ranks(3, [&](int rank) {
                const auto r = static_cast<std::size_t>(rank);
                results[masked][r] = step(batch.part(bounds[r], bounds[r + 1], !masked), memory,
                                          masked, group.rank(rank));
              });
              for (const auto& error : errors) {
                ASSERT_EQ(error, nullptr);
              }
            }
            SCOPED_TRACE(level + ", " + name(dtype));
            for (std::size_t r = 0; r < 3; ++r) {
              const Batch part = batch.part(bounds[r], bounds[r + 1], false);
              const Result& with = results[true][r];
              const Result& without = results[false][r];
              EXPECT_EQ(with.saved.count(), without.saved.count());
              EXPECT_TRUE(same_bits(with.saved.mean(), without.saved.mean()));
              EXPECT_TRUE(same_bits(with.saved.var(), without.saved.var()));
              EXPECT_TRUE(same_bits(counting(part, with.y), without.y)) << "y";
              EXPECT_TRUE(same_bits(counting(part, with.dx), without.dx)) << "dx";
              EXPECT_TRUE(same_bits(counting(part, with.dresidual), without.dresidual));
              EXPECT_TRUE(same_bits(with.dweight, without.dweight));
              EXPECT_TRUE(same_bits(with.dbias, without.dbias));
            }
            if (HasFailure()) {
              return;
            }
          }
        }
      }
    }
  }
}

Result evaluate(const Batch& batch, Memory memory, bool masked, bool residual) {
  Arguments a(batch, memory);
  const MaskView mask = masked ? a.mask : MaskView();
  const TensorView added = residual ? a.residual.view() : TensorView();
  const Tensor var(DType::kFloat64, {kChannels}, {1, 2, 3, 4, 5});
  BatchNorm layer(batch.options);
  layer.evaluate({.x = a.x.view(),
                  .mask = mask,
                  .weight = a.weight.view(),
                  .bias = a.bias.view(),
                  .residual = added,
                  .running_mean = a.bias.view(),
                  .running_var = var.view(),
                  .y = a.y.view()});
  layer.evaluate_backward({.dy = a.dy.view(),
                           .x = a.x.view(),
                           .mask = mask,
                           .weight = a.weight.view(),
                           .bias = a.bias.view(),
                           .residual = added,
                           .running_mean = a.bias.view(),
                           .running_var = var.view(),
                           .dx = a.dx.view(),
                           .dweight = a.dweight.view(),
                           .dbias = a.dbias.view(),
                           .dresidual = residual ? a.dresidual.view() : MutableTensorView()});
  return {a.y.values(), a.dx.values(), residual ? a.dresidual.values() : std::vector<double>(),
          a.dweight.values(), a.dbias.values()};
}

TEST(Mask, EvaluationExact) {
  Random random(121);
  for (const DType dtype : kDtypes) {
    for (const Memory memory : {Memory::kPlanes, Memory::kRows}) {
      for (const bool residual : {false, true}) {
        Batch batch = random_batch(random, dtype, {7, 3});
        batch.options.activation = {static_cast<ActivationKind>(random.between(0, 2)), 0.3};
        const Result with = evaluate(batch, memory, true, residual);
        const Result without = evaluate(batch.part(0, kSamples, true), memory, false, residual);
        EXPECT_TRUE(same_bits(counting(batch, with.y), without.y));
        EXPECT_TRUE(same_bits(counting(batch, with.dx), without.dx));
        EXPECT_TRUE(same_bits(counting(batch, with.dresidual), without.dresidual));
        EXPECT_TRUE(same_bits(with.dweight, without.dweight));
        EXPECT_TRUE(same_bits(with.dbias, without.dbias));
      }
    }
  }
}

}  // namespace
}  // namespace syncbn
