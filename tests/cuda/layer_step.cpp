// SPDX-License-Identifier: Apache-2.0
#include "layer_step.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>

#include "device.hpp"
#include "groups.hpp"

namespace syncbn::testing {
namespace {

using Doubles = std::vector<double>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// A rank's tensors: (N, C, spatial...), from kWeight on (C).
enum Which : std::uint8_t {
  kX,
  kDy,
  kResidual,
  kY,
  kDx,
  kDresidual,
  kEvaluated,
  kEvaluatedDx,
  kEvaluatedDresidual,
  kWeight,
  kBias,
  kRunningMean,
  kRunningVar,
  kDweight,
  kDbias,
  kEvaluatedDweight,
  kEvaluatedDbias,
  kTensors
};

/// What a rank has before and after a step.
struct Rank {
  std::array<Tensor, kTensors> tensors;
  std::vector<std::uint8_t> mask;
  std::array<Doubles, 3> statistics;  ///< mean, var and rstd
  std::int64_t tracked = 3, count = 0;
};

Rank make(const LayerCase& c, std::int64_t samples, Random& random) {
  Rank rank;
  std::vector<std::int64_t> sizes = {samples, c.channels};
  std::int64_t plane = 1;
  for (const std::int64_t s : c.spatial) {
    sizes.push_back(s);
    plane *= s;
  }
  const Memory common = random.pick(kMemories);
  for (std::size_t i = 0; i < kWeight; ++i) {
    const bool differs = i != kX && random.one_in(3);
    rank.tensors[i] = Tensor(c.dtype, sizes, differs ? random.pick(kMemories) : common);
    if (i <= kResidual) {
      rank.tensors[i].fill(rough_values(random, c.dtype, samples, c.channels * plane));
    }
  }
  rank.mask.resize(size(samples * plane));
  for (std::uint8_t& counts : rank.mask) {
    counts = random.one_in(4) ? 0 : 1;
  }
  return rank;
}

/// Parameters and buffers, the same on every rank.
void add_parameters(Rank& rank, const LayerCase& c, Random random) {
  for (std::size_t i = kWeight; i < kTensors; ++i) {
    if (i >= kDweight) {
      rank.tensors[i] = Tensor(DType::kFloat64, {c.channels});
      continue;
    }
    rank.tensors[i] = Tensor(kDtypes[random.between(0, 3)], {c.channels});
    Doubles values(size(c.channels));
    for (double& value : values) {
      value = (i == kRunningVar ? 0 : -1) + 2 * std::abs(random.signed_unit());
    }
    rank.tensors[i].fill(values);
  }
}

/// The step of a layer of `communicator`, of tensors that view(which) gives. mask: of all bytes.
template <class Communicator, class View>
void run_step(const LayerCase& c, Communicator& communicator, Saved& saved, MaskView mask,
              std::int64_t* tracked, const View& view) {
  const auto given = [&](bool there, Which which) {
    return there ? view(which) : MutableTensorView();
  };
  const TensorView x = view(kX), weight = view(kWeight), bias = view(kBias);
  const TensorView residual = given(c.residual, kResidual);
  const MutableTensorView running_mean = given(c.running, kRunningMean);
  const MutableTensorView running_var = given(c.running, kRunningVar);
  mask.sizes = {x.sizes[0]};
  for (std::size_t axis = 2; axis < x.sizes.size(); ++axis) {
    mask.sizes.push_back(x.sizes[axis]);
  }
  mask = c.mask ? mask : MaskView();
  BatchNorm::Options options = c.options;
  options.channels = c.channels;
  BatchNorm layer(options, communicator);
  for (int step = 0; step < c.steps; ++step) {
    layer.forward({.x = x,
                   .mask = mask,
                   .weight = weight,
                   .bias = bias,
                   .residual = residual,
                   .y = view(kY),
                   .running_mean = running_mean,
                   .running_var = running_var,
                   .num_batches_tracked = c.running ? tracked : nullptr},
                  saved);
    layer.backward({.dy = view(kDy),
                    .x = x,
                    .mask = mask,
                    .weight = weight,
                    .bias = bias,
                    .dx = view(kDx),
                    .dweight = view(kDweight),
                    .dbias = view(kDbias),
                    .dresidual = given(c.residual, kDresidual),
                    .affine = c.which},
                   saved);
  }
  layer.evaluate({.x = x,
                  .mask = mask,
                  .weight = weight,
                  .bias = bias,
                  .residual = residual,
                  .running_mean = running_mean,
                  .running_var = running_var,
                  .y = view(kEvaluated)});
  if (c.running) {
    layer.evaluate_backward({.dy = view(kDy),
                             .x = x,
                             .mask = mask,
                             .weight = weight,
                             .bias = bias,
                             .residual = residual,
                             .running_mean = running_mean,
                             .running_var = running_var,
                             .dx = view(kEvaluatedDx),
                             .dweight = view(kEvaluatedDweight),
                             .dbias = view(kEvaluatedDbias),
                             .dresidual = given(c.residual, kEvaluatedDresidual)});
  }
  layer.check();
}

void step_on_cpu(const LayerCase& c, Rank& rank, Communicator& communicator) {
  Saved saved;
  run_step(c, communicator, saved, {rank.mask.data(), {}, Device::kCpu}, &rank.tracked,
           [&](Which which) { return rank.tensors[which].view(); });
  const auto copied = [](std::span<const double> values) {
    return Doubles(values.begin(), values.end());
  };
  rank.statistics = {copied(saved.mean()), copied(saved.var()), copied(saved.rstd())};
  rank.count = saved.count();
}

void step_on_cuda(const LayerCase& c, Rank& rank, cuda::Communicator& communicator) {
  std::vector<DeviceTensor> there(rank.tensors.begin(), rank.tensors.end());
  const DeviceArray<std::uint8_t> mask(rank.mask);
  const DeviceArray<std::int64_t> tracked(1, rank.tracked);
  Saved saved;
  run_step(c, communicator, saved, {mask.data(), {}, Device::kCuda}, tracked.data(),
           [&](Which which) { return there[which].view(); });
  for (std::size_t i = 0; i < kTensors; ++i) {
    rank.tensors[i] = there[i].fetch();
  }
  const auto fetched = [](std::span<const double> on_device) {
    Doubles values(on_device.size());
    copy_from_device(values.data(), on_device.data(), on_device.size_bytes());
    return values;
  };
  rank.statistics = {fetched(saved.mean()), fetched(saved.var()), fetched(saved.rstd())};
  rank.tracked = tracked.values()[0];
  rank.count = saved.count();
}

void expect_same(const Rank& cuda, const Rank& cpu) {
  for (std::size_t i = 0; i < kTensors; ++i) {
    if (cpu.tensors[i].numel() > 0) {
      EXPECT_TRUE(same_bits(cuda.tensors[i].values(), cpu.tensors[i].values())) << "Which " << i;
      EXPECT_TRUE(cuda.tensors[i].gaps_untouched()) << "Which " << i;
    }
  }
  for (std::size_t i = 0; i < cpu.statistics.size(); ++i) {
    EXPECT_TRUE(same_bits(cuda.statistics[i], cpu.statistics[i])) << "statistics " << i;
  }
  EXPECT_EQ(cuda.tracked, cpu.tracked);
  EXPECT_EQ(cuda.count, cpu.count);
}

}  // namespace

void compare_layers(const LayerCase& c, const std::vector<std::int64_t>& samples, Random& random) {
  std::vector<Rank> cuda;
  for (const std::int64_t n : samples) {
    cuda.push_back(make(c, n, random));
    add_parameters(cuda.back(), c, Random(7));
  }
  std::vector<Rank> cpu = cuda;
  const int ranks = static_cast<int>(samples.size());
  ThreadGroup of_cpu(ranks), of_cuda(ranks);
  expect_no_errors(run_ranks(
      ranks, [&](int r) { step_on_cpu(c, cpu[static_cast<std::size_t>(r)], of_cpu.rank(r)); }));
  expect_no_errors(run_ranks(ranks, [&](int r) {
    const DeviceTurn turn;
    step_on_cuda(c, cuda[static_cast<std::size_t>(r)], *device_communicator(of_cuda.rank(r)));
  }));
  for (int r = 0; r < ranks; ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    expect_same(cuda[static_cast<std::size_t>(r)], cpu[static_cast<std::size_t>(r)]);
  }
}

}  // namespace syncbn::testing
