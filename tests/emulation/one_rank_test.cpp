// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "random_steps.hpp"
#include "syncbn/error.hpp"

// Directions of one rank: which steps take one kernel, what becomes of the others, and what they
// update. (That bits are those of the passes, random_steps.hpp looks at in plain steps.)
namespace syncbn {
namespace {

/// Kernels that a forward and a backward launched together.
std::uint64_t launches_of(const Case& c) {
  const LevelScope level("reference");
  Results expected(c);
  run_on_cpu(c, expected);
  Results actual(c);
  actual.share_weight = expected.share_weight;
  actual.share_bias = expected.share_bias;
  actual.evaluated = expected.evaluated;
  const std::uint64_t before = emulation::counts().launches;
  run_as_one_rank(c, actual);
  const std::uint64_t launches = emulation::counts().launches - before;
  expect_equal(actual, expected, c);
  return launches;
}

Case case_of(Random& random, DType dtype, std::vector<std::int64_t> sizes, Memory memory,
             ActivationKind kind = ActivationKind::kRelu) {
  Case c(random, 0, {4}, 2);
  c.dtype = dtype;
  c.sizes = std::move(sizes);
  c.x = Tensor(dtype, c.sizes);
  c.weight = Tensor(DType::kFloat32, {c.channels()}, Doubles(size(c.channels()), 0.75));
  c.bias = Tensor(DType::kFloat32, {c.channels()}, Doubles(size(c.channels()), -0.25));
  c.make_plain(random, memory, kind);
  return c;
}

constexpr DType kFusedDtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

TEST(CudaOneRank, PlainStepsTakeOneKernelForEachDirection) {
  Random random(31);
  for (const DType dtype : kFusedDtypes) {
    for (const ActivationKind kind : {ActivationKind::kNone, ActivationKind::kRelu}) {
      for (const Memory memory : {Memory::kPlanes, Memory::kRows}) {
        for (const std::vector<std::int64_t>& sizes :
             {std::vector<std::int64_t>{2, 8, 4, 4}, {3, 72, 2, 8}, {1, 8, 520}, {5, 200, 16}}) {
          const Case c = case_of(random, dtype, sizes, memory, kind);
          SCOPED_TRACE(c.text());
          for (const int multiprocessors : {2, 5}) {
            const ConfigurationScope scope({random.bits(), multiprocessors, 3});
            EXPECT_EQ(launches_of(c), 2u);
          }
        }
      }
    }
  }
}

TEST(CudaOneRank, OtherStepsTakeThree) {
  Random random(32);
  const auto plain = [&](DType dtype, std::vector<std::int64_t> sizes, Memory memory) {
    return case_of(random, dtype, std::move(sizes), memory);
  };
  std::vector<Case> others = {
      plain(DType::kFloat64, {2, 8, 4, 4}, Memory::kPlanes),
      plain(DType::kFloat32, {2, 8, 7, 7}, Memory::kPlanes),  // planes of no whole vectors
      plain(DType::kFloat32, {2, 7, 4, 4}, Memory::kRows),
      plain(DType::kFloat32, {2, 8, 4, 4}, Memory::kOdd),
      plain(DType::kFloat32, {6, 8}, Memory::kPlanes),
      case_of(random, DType::kFloat32, {2, 8, 4, 4}, Memory::kRows, ActivationKind::kLeakyRelu)};
  Case masked = plain(DType::kFloat32, {2, 8, 4, 4}, Memory::kPlanes);
  masked.counts.assign(2 * 16, 1);
  others.push_back(masked);
  Case added = plain(DType::kFloat32, {2, 8, 4, 4}, Memory::kPlanes);
  added.with_residual = added.kept = true;
  added.residual = added.dy;
  others.push_back(added);
  for (const Case& c : others) {
    SCOPED_TRACE(c.text());
    EXPECT_EQ(launches_of(c), 6u);
  }
}

TEST(CudaOneRank, TensorsThatDoNotFitTheDeviceTakeThree) {
  Random random(33);
  for (const Memory memory : {Memory::kPlanes, Memory::kRows}) {
    // 2 multiprocessors have 456 KB. x and dy take 256 KB, then 768.
    const Case c = case_of(random, DType::kFloat32, {8, 32, 8, 16}, memory);
    EXPECT_EQ(launches_of(c), 2u);
    const Case large = case_of(random, DType::kFloat32, {24, 32, 8, 16}, memory);
    EXPECT_GT(launches_of(large), 2u);
  }
}

TEST(CudaOneRank, ADeviceThatTakesFewerBlocksGetsThree) {
  Random random(34);
  const Case c = case_of(random, DType::kFloat32, {2, 8, 4, 4}, Memory::kPlanes);
  emulation::settings().together = false;  // as where MPS has given multiprocessors away
  EXPECT_EQ(launches_of(c), 6u + 2u) << "two were tried";
  emulation::settings() = {};
}

struct Buffers {
  Tensor mean, var;
  std::int64_t tracked = 6;
  std::int64_t call = 5;
  std::int64_t count = -4;
  explicit Buffers(const Doubles& start)
      : mean(DType::kFloat32, {std::ssize(start)}, start),
        var(DType::kBFloat16, {std::ssize(start)}, start) {}
  cuda::RunningStatistics view() {
    return {on_cuda(mean.view()), on_cuda(var.view()), &tracked, &call, &count};
  }
};

TEST(CudaOneRank, RunningStatisticsAndCountersAreThoseOfThePasses) {
  Random random(35);
  for (const Memory memory : {Memory::kPlanes, Memory::kRows}) {
    const Case c = case_of(random, DType::kFloat16, {3, 24, 16}, memory);
    for (const std::optional<double> momentum : {std::optional<double>(0.3), {}}) {
      const Doubles start = rough_values(random, DType::kFloat32, 1, c.channels());
      Buffers apart(start);
      Buffers at_once(start);
      Results r(c);
      run_on_cuda(c, r);
      const Words info = {3 * 16, 0};
      cuda::update_running_statistics(apart.view(), r.mean.data(), r.var.data(), info.data(),
                                      c.channels(), momentum, {});
      Words workspace(size(cuda::workspace_words(c.dtype, c.channels())), 0);
      Words own_info(cuda::kInfoWords, -1);
      Results whole(c);
      const std::uint64_t before = emulation::counts().launches;
      cuda::forward_of_one_rank({.x = on_cuda(c.x.view()),
                                 .y = on_cuda(whole.y.view()),
                                 .mean = whole.mean.data(),
                                 .var = whole.var.data(),
                                 .rstd = whole.rstd.data()},
                                {kLayer, &at_once.call, kEps}, own_info.data(), at_once.view(),
                                momentum, whole.message.data(), workspace.data(), {});
      EXPECT_EQ(emulation::counts().launches - before, momentum.has_value() ? 1u : 4u);
      EXPECT_TRUE(same_bits(at_once.mean.values(), apart.mean.values()));
      EXPECT_TRUE(same_bits(at_once.var.values(), apart.var.values()));
      EXPECT_EQ(at_once.tracked, 7);
      EXPECT_EQ(at_once.call, 6);
      EXPECT_EQ(at_once.count, 3 * 16);
      EXPECT_EQ(own_info[1], fingerprint(kLayer, 5, Direction::kForward, c.channels(), kEps));
    }
  }
}

TEST(CudaOneRank, BackwardOfAForwardOverOtherRanksGivesNaN) {
  Random random(36);
  const Case c = case_of(random, DType::kFloat32, {2, 8, 4, 4}, Memory::kPlanes);
  Results r(c);
  run_on_cuda(c, r);
  const Words info = {2 * 16 + 1, 3};
  Words workspace(size(cuda::workspace_words(c.dtype, c.channels())), 0);
  cuda::backward_of_one_rank({.dy = on_cuda(c.dy.view()),
                              .x = on_cuda(c.x.view()),
                              .mean = r.mean.data(),
                              .rstd = r.rstd.data(),
                              .dx = on_cuda(r.dx.view()),
                              .dweight = on_cuda(r.dweight.view())},
                             info.data(), r.coefficients.data(), r.gradient_message.data(),
                             workspace.data(), {});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(same_bits(r.coefficients, Doubles(3 * 8, nan)));
  EXPECT_TRUE(same_bits(r.dweight.values(), Doubles(8, nan)));
  for (const double value : r.dx.values()) {
    EXPECT_TRUE(std::isnan(value));
  }
}

TEST(CudaOneRank, BadArgumentsAreRefusedBeforeAnythingHappens) {
  Random random(37);
  const Case c = case_of(random, DType::kFloat32, {2, 8, 4, 4}, Memory::kPlanes);
  Results r(c);
  Words info(cuda::kInfoWords, -7);
  Words workspace(size(cuda::workspace_words(c.dtype, c.channels())), 0);
  const Tensor wrong(DType::kFloat32, {9});
  const std::uint64_t before = emulation::counts().launches;
  const auto forward = [&](const TensorView& weight, double eps) {
    return testing::thrown_text<InvalidArgument>([&] {
      cuda::forward_of_one_rank({.x = on_cuda(c.x.view()),
                                 .weight = weight,
                                 .y = on_cuda(r.y.view()),
                                 .mean = r.mean.data(),
                                 .var = r.var.data(),
                                 .rstd = r.rstd.data()},
                                {kLayer, nullptr, eps}, info.data(), {}, {}, r.message.data(),
                                workspace.data(), {});
    });
  };
  EXPECT_TRUE(testing::contains(forward(on_cuda(wrong.view()), kEps), "weight"));
  EXPECT_TRUE(testing::contains(forward({}, -1.0), "eps"));
  EXPECT_TRUE(testing::contains(testing::thrown_text<InvalidArgument>([&] {
                                  cuda::backward_of_one_rank({.dy = on_cuda(c.dy.view()),
                                                              .x = on_cuda(c.x.view()),
                                                              .mean = r.mean.data(),
                                                              .rstd = r.rstd.data(),
                                                              .dx = on_cuda(r.dx.view())},
                                                             info.data(), nullptr,
                                                             r.gradient_message.data(),
                                                             workspace.data(), {});
                                }),
                                "coefficients"));
  EXPECT_EQ(emulation::counts().launches, before);
}

}  // namespace
}  // namespace syncbn
