// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/error.hpp"
#include "syncbn/executor.hpp"

// What the passes on CUDA make of disagreement, of counters, and of wrong arguments.
namespace syncbn {
namespace {

constexpr double kEps = 1e-3;

Words cuda_moments(const Tensor& x, std::uint64_t layer, std::int64_t channels,
                   const MaskView& mask = {}) {
  const DType dtype = x.view().dtype;
  Words workspace(size(cuda::workspace_words(dtype, channels)), 0);
  Words message(size(message_words(dtype, channels)), -1);
  cuda::local_moments(on_cuda(x.view()), mask, {layer, nullptr, kEps}, message.data(),
                      workspace.data(), {});
  return message;
}

struct Moments {
  Doubles mean, var, rstd;
  Words info = Words(kInfoWords, -9);

  Moments(const Words& merged, DType dtype, int ranks, std::int64_t channels,
          const Running& running = {})
      : mean(size(channels)), var(mean), rstd(mean) {
    cuda::finalize_moments(merged.data(), dtype, ranks, mean.data(), var.data(), rstd.data(),
                           info.data(), channels, kEps, running, {});
  }
};

/// By the finalizing kernel, which then takes one launch, and by the kernel for itself.
TEST(CudaPasses, RunningStatisticsExact) {
  Random random(27);
  const std::int64_t channels = 70;
  const std::int64_t last = std::numeric_limits<std::int64_t>::max();
  struct Buffers {
    Tensor mean, var;
    std::int64_t tracked, call = 8, count = 9;
    Running view(std::optional<double> momentum) {
      return {on_cuda(mean.view()), on_cuda(var.view()), &tracked, &call, &count, momentum};
    }
  };
  for (int round = 0; round < 24; ++round) {
    const DType dtype = kDtypes[round % 4];
    const std::int64_t samples = random.between(0, 2);
    const bool agree = !random.one_in(4);
    const std::optional<double> momentum =
        random.one_in(2) ? std::optional<double>(0.3) : std::nullopt;
    Tensor x(dtype, {samples, channels});
    x.fill(rough_values(random, dtype, samples, channels));
    Words merged = cuda_moments(x, 1, channels);
    merged[1] += agree ? 0 : 1;
    const std::int64_t before = random.pick<std::int64_t>({0, 5, last});
    Buffers expected{{kDtypes[random.between(0, 3)], {channels}},
                     {kDtypes[random.between(0, 3)], {channels}},
                     before};
    for (Tensor* start : {&expected.mean, &expected.var}) {
      start->fill(rough_values(random, DType::kFloat32, 1, channels));
    }
    Buffers at_once = expected;
    Buffers apart = expected;
    const std::uint64_t launches = emulation::counts().launches;
    const Moments of_batch(merged, dtype, agree ? 1 : 2, channels, at_once.view(momentum));
    EXPECT_EQ(emulation::counts().launches - launches, momentum.has_value() ? 1u : 2u);
    cuda::update_running_statistics(apart.view(momentum), of_batch.mean.data(), of_batch.var.data(),
                                    of_batch.info.data(), channels, {});
    if (agree) {
      EXPECT_EQ(of_batch.info[1], fingerprint(1, 0, Direction::kForward, channels, kEps));
    }
    const bool counts = agree && samples > 0;
    expected.tracked += counts && before != last ? 1 : 0;
    if (counts) {
      update_running_statistics(expected.mean.view(), expected.var.view(), of_batch.mean.data(),
                                of_batch.var.data(), channels, samples,
                                momentum.value_or(1.0 / static_cast<double>(expected.tracked)));
    }
    for (const Buffers* got : {&at_once, &apart}) {
      EXPECT_TRUE(same_bits(got->mean.values(), expected.mean.values()));
      EXPECT_TRUE(same_bits(got->var.values(), expected.var.values()));
      EXPECT_EQ(got->tracked, expected.tracked);
      EXPECT_EQ(got->call, 9) << "all ranks count calls, whatever came of them";
      EXPECT_EQ(got->count, agree ? samples : -1);
    }
    Doubles mean(size(channels)), rstd(mean);
    cuda::evaluation_statistics(on_cuda(apart.mean.view()), on_cuda(apart.var.view()), mean.data(),
                                rstd.data(), kEps, {});
    EXPECT_TRUE(same_bits(mean, expected.mean.values()));
    for (std::size_t c = 0; c < rstd.size(); ++c) {
      EXPECT_TRUE(same_bits(rstd[c], 1.0 / std::sqrt(expected.var.values()[c] + kEps)));
    }
  }
}

/// 2^31 additions to a slot would overflow it: partials are gathered before, and here are many.
TEST(CudaPasses, ManyPartialsExact) {
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const double sign : {1.0, -1.0}) {
      const double value = testing::round_to(dtype, sign * 127.99999);
      const Tensor x(dtype, {5000, 2}, Doubles(10000, value));
      Words expected(size(message_words(dtype, 2)));
      local_moments(x.view(), {}, expected.data(), fingerprint(1, 0, Direction::kForward, 2, kEps),
                    serial_executor());
      EXPECT_EQ(cuda_moments(x, 1, 2), expected);
    }
  }
}

/// At the doors, which check for both devices; how many axes a kernel takes its launcher says.
TEST(CudaPasses, WrongArgumentsChangeNothing) {
  Tensor x(DType::kFloat32, {2, 3}, Doubles(6, 1.0)), wrong(DType::kFloat32, {2});
  Words message(size(message_words(DType::kFloat32, 3)), 0), info(kInfoWords, -9);
  const Words untouched = message;
  Words workspace(size(cuda::workspace_words(DType::kFloat32, 3)), 0);
  Doubles values(9, 5.0);
  const ForwardStep good{.pass = {.x = on_cuda(x.view()),
                                  .y = on_cuda(x.view()),
                                  .mean = values.data(),
                                  .var = values.data(),
                                  .rstd = values.data()},
                         .info = info.data(),
                         .workspace = workspace.data()};
  const Merged merged{message.data(), message.data() + kHeaderWords};
  const auto begin = [&](const TensorView& view) {
    ForwardStep step = good;
    step.pass.x = view;
    return thrown_text<InvalidArgument>([&] { forward_begin(step, message.data(), {}); });
  };
  TensorView flat = on_cuda(x.view());
  flat.sizes = {6};
  flat.strides = {1};
  EXPECT_TRUE(contains(begin(flat), "2 to 12 axes"));
  TensorView scattered = on_cuda(x.view());  // ten axes of which no two can be merged
  scattered.sizes = std::vector<std::int64_t>(12, 2);
  scattered.strides = {};
  for (std::int64_t stride = 1; scattered.strides.size() < 12; stride = 3 * stride + 1) {
    scattered.strides.push_back(stride);
  }
  EXPECT_TRUE(contains(begin(scattered), "expected at most 8 on CUDA"));
  const auto finish = [&](const auto& change) {
    ForwardStep step = good;
    change(step);
    return thrown_text<InvalidArgument>([&] { forward_finish(step, merged, {}); });
  };
  EXPECT_TRUE(contains(finish([&](auto& s) { s.running.mean = on_cuda(wrong.view()); }),
                       "running_mean: got shape (2)"));
  EXPECT_TRUE(contains(finish([&](auto& s) { s.pass.y.dtype = DType::kFloat64; }),
                       "y: got float64, expected the dtype of x, float32"));
  EXPECT_TRUE(contains(finish([&](auto& s) { s.pass.var = nullptr; }), "var: got a null pointer"));
  const BackwardStep backward{.pass = {.dy = x.view(),
                                       .x = good.pass.x,
                                       .mean = values.data(),
                                       .rstd = values.data(),
                                       .dx = good.pass.y},
                              .coefficients = values.data()};
  EXPECT_TRUE(contains(
      thrown_text<InvalidArgument>([&] { backward_finish(backward, nullptr, merged, {}); }),
      "dy: got a tensor on CPU, expected the device of x, CUDA"));
  EXPECT_EQ(message, untouched);
  EXPECT_EQ(info, Words(kInfoWords, -9));
  EXPECT_EQ(values, Doubles(9, 5.0));
  EXPECT_EQ(x.values(), Doubles(6, 1.0));
}

}  // namespace
}  // namespace syncbn
