// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "replaced_new.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// The second step of a shape allocates nothing, on no thread: threads have kept what the first one
// took, and the caller what backward needs.
namespace syncbn::testing {
namespace {

struct Case {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> sizes;
  Memory memory = Memory::kPlanes;
  Activation activation = {};
  bool residual = false;
  bool mask = false;
  Statistics statistics = Statistics::kReproducible;
  AffineGradients affine = AffineGradients::kShare;
};

/// Goes through blocks of channels.
const std::vector<std::int64_t> kLarge = {2, 64, 4096};

std::vector<Case> cases() {
  const std::vector<std::int64_t> small = {4, 24, 6};
  const std::vector<std::int64_t> flat = {512, 96};  // dealt by rows
  return {
      {.name = "small", .sizes = small},
      {.name = "flat", .sizes = flat},
      {.name = "large", .sizes = kLarge},
      {.name = "large, of bfloat16", .dtype = DType::kBFloat16, .sizes = kLarge},
      {.name = "float16", .dtype = DType::kFloat16, .sizes = {4, 48, 600}},
      {.name = "float64", .dtype = DType::kFloat64, .sizes = small},
      {.name = "channels-last", .sizes = {8, 64, 12, 12}, .memory = Memory::kRows},
      {.name = "odd strides", .sizes = {3, 8, 5, 7}, .memory = Memory::kOdd},
      {.name = "activation", .sizes = kLarge, .activation = {ActivationKind::kRelu}},
      {.name = "residual",
       .sizes = flat,
       .activation = {ActivationKind::kLeakyRelu, 0.25},
       .residual = true},
      {.name = "mask", .sizes = small, .mask = true, .affine = AffineGradients::kGlobal},
      {.name = "welford", .sizes = small, .statistics = Statistics::kWelford},
      {.name = "no samples", .sizes = {0, 24, 6}},
  };
}

/// One rank's layer, with everything that its caller holds.
struct Layer {
  Layer(const Case& c, Communicator& group)
      : layer({.channels = c.sizes[1],
               .name = "layer",
               .activation = c.activation,
               .statistics = c.statistics},
              group),
        x(c.dtype, c.sizes, c.memory),
        weight(DType::kFloat32, {c.sizes[1]}),
        mask_bytes(static_cast<std::size_t>(x.numel() / c.sizes[1]), 1),
        affine(c.affine) {
    Random random(7);
    x.fill(rough_values(random, c.dtype, c.sizes[0],
                        x.numel() / std::max<std::int64_t>(1, c.sizes[0])));
    weight.fill(std::vector<double>(static_cast<std::size_t>(c.sizes[1]), 1.5));
    dy = y = dx = x;
    mean = var = dweight = dbias = weight;
    if (c.residual) {
      residual = dresidual = x;
      residual_view = residual.view();
      dresidual_view = dresidual.view();
    }
    if (c.mask) {
      mask_bytes[1] = 0;
      mask.data = mask_bytes.data();
      mask.sizes = {c.sizes[0]};
      for (std::size_t axis = 2; axis < c.sizes.size(); ++axis) {
        mask.sizes.push_back(c.sizes[axis]);
      }
    }
  }

  void step(Executor& executor) {
    layer.forward({.x = x.view(),
                   .mask = mask,
                   .weight = weight.view(),
                   .bias = weight.view(),
                   .residual = residual_view,
                   .y = y.view(),
                   .running_mean = mean.view(),
                   .running_var = var.view(),
                   .num_batches_tracked = &tracked},
                  saved, executor);
    layer.backward({.dy = dy.view(),
                    .x = x.view(),
                    .mask = mask,
                    .weight = weight.view(),
                    .bias = weight.view(),
                    .dx = dx.view(),
                    .dweight = dweight.view(),
                    .dbias = dbias.view(),
                    .dresidual = dresidual_view,
                    .affine = affine},
                   saved, executor);
  }

  BatchNorm layer;
  Saved saved;
  Tensor x, dy, y, dx, weight, mean, var, dweight, dbias, residual, dresidual;
  TensorView residual_view;
  MutableTensorView dresidual_view;
  std::vector<std::uint8_t> mask_bytes;
  MaskView mask;
  AffineGradients affine;
  std::int64_t tracked = 0;
};

/// Allocations of all ranks' second step. threads: 0 is the serial executor.
std::int64_t allocations_of_second_step(const Case& c, Group& group, int threads) {
  const int ranks = group.size();
  std::int64_t before = 0;
  std::int64_t after = 0;
  std::barrier together(ranks);
  const auto errors = run_ranks(ranks, [&](int r) {
    std::unique_ptr<ThreadPool> pool =
        threads == 0 ? nullptr : std::make_unique<ThreadPool>(threads);
    Executor& executor = pool == nullptr ? serial_executor() : *pool;
    Layer layer(c, group.rank(r));
    layer.step(executor);
    together.arrive_and_wait();
    if (r == 0) {
      before = allocations;
    }
    together.arrive_and_wait();
    layer.step(executor);
    together.arrive_and_wait();
    if (r == 0) {
      after = allocations;
    }
    together.arrive_and_wait();
  });
  expect_no_errors(errors);
  return after - before;
}

TEST(SecondStep, AllocatesNothing) {
  for (const Case& c : cases()) {
    for (const std::string& level : available_levels()) {
      if (c.sizes == kLarge && level == "reference") {
        continue;  // slow, and nothing that small tensors do not have
      }
      const LevelScope scope(level);
      for (const int threads : {0, 3}) {
        for (const int ranks : {1, 2}) {
          for (const auto kind : {GroupKind::kThreads, GroupKind::kSharedMemory}) {
            SCOPED_TRACE(c.name + ", " + level + ", " + std::to_string(threads) + " threads, " +
                         std::to_string(ranks) + " ranks, " + name(kind));
            const auto group = make_group(kind, ranks);
            EXPECT_EQ(allocations_of_second_step(c, *group, threads), 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace syncbn::testing
