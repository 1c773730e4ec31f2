// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <barrier>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "groups.hpp"
#include "placed_rank.hpp"
#include "properties.hpp"
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
  std::function<void(Step&)> change = [](Step&) {};
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
      {.name = "activation",
       .sizes = kLarge,
       .change = [](Step& s) { s.options.activation.kind = ActivationKind::kRelu; }},
      {.name = "residual",
       .sizes = flat,
       .change =
           [](Step& s) {
             s.options.activation = {ActivationKind::kLeakyRelu, 0.25};
             s.residual = s.x;
             s.keep = true;
           }},
      {.name = "mask",
       .sizes = small,
       .change =
           [](Step& s) {
             s.mask.assign(24, 1);
             s.mask[1] = 0;
             s.affine = AffineGradients::kGlobal;
           }},
      {.name = "welford",
       .sizes = small,
       .change = [](Step& s) { s.options.statistics = Statistics::kWelford; }},
      {.name = "no samples", .sizes = {0, 24, 6}},
  };
}

/// Allocations of all ranks' second step. threads: 0 is the serial executor.
std::int64_t allocations_of_second_step(const Case& c, Group& group, int threads) {
  const int ranks = group.size();
  Random random(7);
  Step given(random, c.dtype, c.sizes);
  given.affine = AffineGradients::kShare;
  c.change(given);
  Placement placement;
  placement.x = placement.dy = placement.residual = placement.out = c.memory;
  std::int64_t before = 0;
  std::int64_t after = 0;
  std::barrier together(ranks);
  const auto errors = run_ranks(ranks, [&](int r) {
    std::unique_ptr<ThreadPool> pool =
        threads == 0 ? nullptr : std::make_unique<ThreadPool>(threads);
    Executor& executor = pool == nullptr ? serial_executor() : *pool;
    BatchNorm layer(given.options, group.rank(r));
    Saved saved;
    Rank rank(given, whole(c.sizes[0])[0], placement);
    const auto step = [&] {
      rank.forward(layer, saved, executor);
      rank.backward(layer, saved, rank.x_view(), executor);
    };
    step();
    together.arrive_and_wait();
    if (r == 0) {
      before = allocations;
    }
    together.arrive_and_wait();
    step();
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
    for (const std::string& level : {std::string("reference"), available_levels().back()}) {
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
