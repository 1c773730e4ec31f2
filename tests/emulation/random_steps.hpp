// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "properties.hpp"
#include "random_case.hpp"
#include "statistics/dtype.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/executor.hpp"

// Random steps, bit for bit, against the plain loops on CPU, which the oracle has decided. Each
// result is computed by two launch configurations whose threads run in different orders.
// torch.nn.SyncBatchNorm has no such promise: its sums depend on the grid and on the ranks.
namespace syncbn {

using testing::LevelScope;

/// A grid, an order of threads, and a kind of device.
struct Configuration {
  std::uint64_t seed;
  int multiprocessors;
  unsigned resident;
  bool few_binary64_units = false;
};

class ConfigurationScope {
 public:
  explicit ConfigurationScope(const Configuration& c) {
    emulation::settings() = {.seed = c.seed,
                             .multiprocessors = c.multiprocessors,
                             .few_binary64_units = c.few_binary64_units,
                             .resident = c.resident};
    EXPECT_EQ(c.multiprocessors, emulation::settings().multiprocessors);
  }
  ~ConfigurationScope() { emulation::settings() = {}; }
};

inline std::vector<Configuration> two_configurations(Random& random) {
  return {{random.bits(), 1, 1}, {random.bits(), static_cast<int>(random.between(2, 5)), 3, true}};
}

/// What the passes give.
struct Results {
  Words message, gradient_message;
  Doubles mean, var, rstd, coefficients;
  std::vector<std::uint8_t> mask;
  Tensor y, u, dx, dweight, dbias, share_weight, share_bias, evaluated;
  std::int64_t count = 0;

  explicit Results(const Case& c)
      : message(size(message_words(c.dtype, c.channels())), -1),
        gradient_message(message),
        mean(size(c.channels())),
        var(mean),
        rstd(mean),
        coefficients(size(3 * c.channels())),
        mask(c.masked() ? size(activation_mask_bytes(c.x.view())) : 0),
        y(c.dtype, c.sizes, c.y_memory),
        u(c.dtype, c.sizes, c.dx_memory),
        dx(c.dtype, c.sizes, c.dx_memory),
        dweight(DType::kFloat32, {c.channels()}),
        dbias(DType::kBFloat16, {c.channels()}),
        share_weight(DType::kFloat64, {c.channels()}),
        share_bias(DType::kFloat16, {c.channels()}),
        evaluated(c.dtype, c.sizes, c.dx_memory) {}
};

constexpr double kEps = 1e-5;
constexpr std::uint64_t kLayer = 77;
constexpr std::int64_t kCall = 3;

inline ActivationGradient through(const Case& c, const Results& r) {
  return {c.activation, c.weight_view(), c.bias_view(), c.masked() ? r.mask.data() : nullptr};
}

inline TensorView residual_of(const Case& c) {
  return c.with_residual ? c.residual.view() : TensorView();
}

inline void run_on_cpu(const Case& c, Results& r) {
  Executor& executor = serial_executor();
  const MaskView counts = c.mask(Device::kCpu);
  const std::uint32_t tag = fingerprint(kLayer, kCall, Direction::kForward, c.channels(), kEps);
  local_moments(c.x.view(), counts, r.message.data(), tag, executor);
  const MessageInfo info = read_header(r.message.data(), 1);
  r.count = info.count;
  finalize_moments(info, r.message.data() + kHeaderWords, r.mean.data(), r.var.data(),
                   r.rstd.data(), c.channels(), kEps, executor);
  std::uint8_t* mask = r.mask.empty() ? nullptr : r.mask.data();
  normalize({c.x.view(), counts, r.mean.data(), r.rstd.data(), c.weight_view(), c.bias_view(),
             residual_of(c), r.y.view(), mask, c.activation},
            executor);
  local_gradients({c.dy.view(), c.x.view(), counts, r.mean.data(), r.rstd.data(), through(c, r),
                   c.kept ? r.u.view() : MutableTensorView()},
                  r.gradient_message.data(), backward_fingerprint(tag), executor);
  finalize_gradients(read_header(r.gradient_message.data(), 1),
                     r.gradient_message.data() + kHeaderWords,
                     {r.mean.data(), r.rstd.data(), c.weight_view(), r.coefficients.data(),
                      r.dweight.view(), r.dbias.view(), c.channels()},
                     r.count, executor);
  affine_gradient_shares(r.gradient_message.data() + kHeaderWords, c.dtype,
                         {.mean = r.mean.data(),
                          .rstd = r.rstd.data(),
                          .dweight = r.share_weight.view(),
                          .dbias = r.share_bias.view(),
                          .channels = c.channels()},
                         executor);
  input_gradient({c.dy.view(), c.x.view(), counts, r.mean.data(), r.rstd.data(),
                  r.coefficients.data(), through(c, r), r.dx.view()},
                 executor);
  evaluation_input_gradient_on_cpu(c.dy.view(), counts, r.rstd.data(), c.weight_view(),
                                   r.evaluated.view(), executor);
}

inline void run_on_cuda(const Case& c, Results& r) {
  const cuda::Stream stream;
  Words workspace(size(cuda::workspace_words(c.dtype, c.channels())), 0);
  const Words clean = workspace;
  Words info(kInfoWords, -7);
  const TensorView x = on_cuda(c.x.view());
  const TensorView dy = on_cuda(c.dy.view());
  const TensorView weight = on_cuda(c.weight_view());
  const TensorView bias = on_cuda(c.bias_view());
  const std::int64_t call = kCall;
  const MaskView counts = c.mask(Device::kCuda);
  const std::uint64_t before = emulation::counts().launches;
  cuda::local_moments(x, counts, {kLayer, &call, kEps}, r.message.data(), workspace.data(), stream);
  EXPECT_EQ(workspace, clean) << "left behind by the moments";
  cuda::finalize_moments(r.message.data(), c.dtype, 1, r.mean.data(), r.var.data(), r.rstd.data(),
                         info.data(), c.channels(), kEps, {}, stream);
  r.count = info[0];
  std::uint8_t* mask = r.mask.empty() ? nullptr : r.mask.data();
  cuda::normalize({x, counts, r.mean.data(), r.rstd.data(), weight, bias, on_cuda(residual_of(c)),
                   on_cuda(r.y.view()), mask, c.activation},
                  stream);
  EXPECT_EQ(emulation::counts().launches - before, 3u) << "kernels in forward";
  ActivationGradient back = through(c, r);
  back.weight = weight;
  back.bias = bias;
  Words copy(r.gradient_message);
  cuda::local_gradients({dy, x, counts, r.mean.data(), r.rstd.data(), back,
                         c.kept ? on_cuda(r.u.view()) : MutableTensorView()},
                        info.data(), r.gradient_message.data(), workspace.data(), stream,
                        copy.data());
  EXPECT_EQ(workspace, clean) << "left behind by the gradients' sums";
  EXPECT_EQ(copy, r.gradient_message);
  cuda::finalize_gradients(r.gradient_message.data(), c.dtype, 1, nullptr, info.data(),
                           {r.mean.data(), r.rstd.data(), weight, r.coefficients.data(),
                            on_cuda(r.dweight.view()), on_cuda(r.dbias.view()), c.channels()},
                           stream);
  cuda::input_gradient({dy, x, counts, r.mean.data(), r.rstd.data(), r.coefficients.data(), back,
                        on_cuda(r.dx.view())},
                       stream);
  EXPECT_EQ(emulation::counts().launches - before, 6u) << "and three in backward";
  cuda::finalize_gradients(
      r.gradient_message.data(), c.dtype, 1, r.gradient_message.data(), info.data(),
      {r.mean.data(), r.rstd.data(), weight, r.coefficients.data(), on_cuda(r.share_weight.view()),
       on_cuda(r.share_bias.view()), c.channels()},
      stream);
  cuda::evaluation_input_gradient(dy, counts, r.rstd.data(), weight, on_cuda(r.evaluated.view()),
                                  stream);
}

inline void expect_equal(const Results& actual, const Results& expected, const Case& c) {
  EXPECT_EQ(actual.message, expected.message);
  EXPECT_EQ(actual.count, expected.count);
  EXPECT_TRUE(same_bits(actual.mean, expected.mean)) << "mean";
  EXPECT_TRUE(same_bits(actual.var, expected.var)) << "var";
  EXPECT_TRUE(same_bits(actual.rstd, expected.rstd)) << "rstd";
  EXPECT_TRUE(same_bits(actual.y.values(), expected.y.values())) << "y";
  EXPECT_TRUE(actual.y.gaps_untouched());
  EXPECT_EQ(c.meaningful(actual.mask), c.meaningful(expected.mask));
  EXPECT_EQ(actual.gradient_message, expected.gradient_message);
  if (c.kept) {
    EXPECT_TRUE(same_bits(actual.u.values(), expected.u.values())) << "u";
    EXPECT_TRUE(actual.u.gaps_untouched());
  }
  EXPECT_TRUE(same_bits(actual.coefficients, expected.coefficients)) << "coefficients";
  EXPECT_TRUE(same_bits(actual.dweight.values(), expected.dweight.values())) << "dweight";
  EXPECT_TRUE(same_bits(actual.dbias.values(), expected.dbias.values())) << "dbias";
  EXPECT_TRUE(same_bits(actual.share_weight.values(), expected.share_weight.values()));
  EXPECT_TRUE(same_bits(actual.share_bias.values(), expected.share_bias.values()));
  EXPECT_TRUE(same_bits(actual.dx.values(), expected.dx.values())) << "dx";
  EXPECT_TRUE(actual.dx.gaps_untouched());
  EXPECT_TRUE(same_bits(actual.evaluated.values(), expected.evaluated.values())) << "evaluated";
}

inline void expect_same(const Case& c, const std::vector<Configuration>& configurations) {
  SCOPED_TRACE(c.text());
  const LevelScope level("reference");
  Results expected(c);
  run_on_cpu(c, expected);
  for (const Configuration& configuration : configurations) {
    SCOPED_TRACE("threads in the order of seed " + std::to_string(configuration.seed));
    const ConfigurationScope scope(configuration);
    Results actual(c);
    EXPECT_NO_THROW(run_on_cuda(c, actual));
    expect_equal(actual, expected, c);
  }
}

inline void expect_same(Random& random, const Case& c) {
  expect_same(c, two_configurations(random));
}

}  // namespace syncbn
