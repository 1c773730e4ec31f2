// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "one_rank.hpp"
#include "properties.hpp"
#include "statistics/dtype.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/executor.hpp"
#include "tensors/activation_mask.hpp"
#include "tensors/sample_view.hpp"

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

constexpr std::uint64_t kLayer = 77;
constexpr std::int64_t kCall = 3;

/// Random tensors and options, and what only single passes give.
struct Case : testing::OneRank {
  Tensor share_weight, share_bias, evaluated;

  /// channels: up to `most_channels` times `channels_by`. dense: how all tensors lie, without gaps.
  /// plain: a step with no more than this activation.
  Case(Random& random, int round, const Words& planes, std::int64_t most_channels,
       std::int64_t channels_by = 1, std::optional<Memory> dense = {},
       std::optional<ActivationKind> plain = {})
      : OneRank(random, kDtypes[round % 4],
                random_sizes(random, planes, most_channels, channels_by), Memory::kPlanes, 0,
                dense || !random.one_in(3) ? 0 : 1000),
        share_weight(DType::kFloat64, {channels()}),
        share_bias(DType::kFloat16, {channels()}) {
    activation.kind = plain.value_or(static_cast<ActivationKind>(random.between(0, 2)));
    with_residual = keep = !plain && random.one_in(2);
    if (!plain && random.one_in(3)) {  // and often NaN where the mask hides the values
      choose_mask(random);
      const std::int64_t plane = x.numel() / sizes[0] / channels();
      const bool hide = random.one_in(2);
      for (std::int64_t i = 0; hide && i < x.numel(); ++i) {
        if (mask[size(i / channels() / plane * plane + i % plane)] == 0) {
          x.set(i, std::numeric_limits<double>::quiet_NaN());
        }
      }
      std::replace(mask.begin(), mask.end(), std::uint8_t{1}, std::uint8_t{255});
    }
    // Most often all tensors lie alike, as in a network.
    const Memory memory = dense.value_or(random.pick(kMemories));
    const auto lay = [&](Tensor& tensor, bool input) {
      const Memory own = !dense && random.one_in(4) ? random.pick(kMemories) : memory;
      Tensor out(dtype, sizes, own, !dense && input && random.one_in(4) ? random.between(1, 3) : 0);
      if (input) {
        out.fill(tensor.values());
      }
      tensor = out;
    };
    lay(x, true);
    bits.assign(size(activation_mask_bytes(x_view())), 0);
    lay(dy, true);
    lay(residual, true);
    lay(y, false);
    lay(dx, false);
    evaluated = u = dx;
    const bool affine = !random.one_in(5);
    for (Tensor* parameter : {&weight, &bias}) {
      const DType type = random.one_in(2) ? dtype : DType::kFloat32;
      *parameter = affine ? Tensor(type, {channels()}, parameter->values()) : Tensor();
    }
    dbias = Tensor(DType::kBFloat16, {channels()});
    forward_tag = fingerprint(kLayer, kCall, Direction::kForward, channels(), kEps);
    backward_tag = backward_fingerprint(forward_tag);
  }
  static Words random_sizes(Random& random, const Words& planes, std::int64_t most_channels,
                            std::int64_t channels_by) {
    Words out = {random.between(1, 5), channels_by * random.between(1, most_channels)};
    const std::int64_t plane = random.pick(planes);
    if (plane > 1 || random.one_in(2)) {
      out.push_back(plane % 4 == 0 && random.one_in(2) ? plane / 4 : plane);
      if (out.back() != plane) {
        out.push_back(4);
      }
    }
    return out;
  }
  /// Bits of elements that do not count mean nothing: makes them 0.
  std::vector<std::uint8_t> meaningful_bits() const {
    std::vector<std::uint8_t> out = bits;
    const SampleView view(x.view(), mask_view());
    const ActivationMaskLayout layout(view);
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const std::int64_t e = i % view.plane;
      const std::int64_t n = i / view.plane / view.channels;
      if (!view.counts(n, e)) {
        const std::int64_t bit = layout.bit(n, i / view.plane % view.channels, e);
        out[size(bit / 8)] &= static_cast<std::uint8_t>(~(1u << bit % 8));
      }
    }
    return out;
  }
  std::string text() const {
    std::string out = std::string(name(dtype)) + " (";
    for (const std::int64_t s : sizes) {
      out += std::to_string(s) + " ";
    }
    return out + ") activation " + std::to_string(static_cast<int>(activation.kind)) +
           (with_residual ? " residual" : "") + (mask.empty() ? "" : " mask");
  }

  void run_on_cpu() {
    Executor& executor = serial_executor();
    forward(executor);
    backward(executor);
    affine_gradient_shares(gradients.data() + kHeaderWords, dtype,
                           {.mean = mean.data(),
                            .rstd = rstd.data(),
                            .dweight = share_weight.view(),
                            .dbias = share_bias.view(),
                            .channels = channels()},
                           executor);
    evaluation_input_gradient_on_cpu(std::as_const(dy).view(), mask_view(), rstd.data(),
                                     std::as_const(weight).view(), evaluated.view(), executor);
  }
  void run_on_cuda() {
    const cuda::Stream stream;
    Words workspace(size(cuda::workspace_words(dtype, channels())), 0);
    const Words clean = workspace;
    Words info(kInfoWords, -7);
    const auto there = [](const Tensor& tensor) { return on_cuda(tensor.view()); };
    const MaskView counts = on_cuda(mask_view());
    const std::int64_t call = kCall;
    const std::uint64_t before = emulation::counts().launches;
    moments.assign(size(message_words(dtype, channels())), -1);
    cuda::local_moments(there(x), counts, {kLayer, &call, kEps}, moments.data(), workspace.data(),
                        stream);
    EXPECT_EQ(workspace, clean) << "left behind by the moments";
    cuda::finalize_moments(moments.data(), dtype, 1, mean.data(), var.data(), rstd.data(),
                           info.data(), channels(), kEps, {}, stream);
    forward_info = read_header(moments.data(), 1);
    EXPECT_EQ(info[0], forward_info.count);
    cuda::normalize({there(x), counts, mean.data(), rstd.data(), there(weight), there(bias),
                     on_cuda(residual_view()), on_cuda(y.view()), bits_data(), activation},
                    stream);
    EXPECT_EQ(emulation::counts().launches - before, 3u) << "kernels in forward";
    const ActivationGradient back = {activation, there(weight), there(bias), bits_data()};
    gradients.assign(moments.size(), -1);
    Words copy(gradients);
    cuda::local_gradients(
        {there(dy), there(x), counts, mean.data(), rstd.data(), back, on_cuda(u_view())},
        info.data(), gradients.data(), workspace.data(), stream, copy.data());
    EXPECT_EQ(workspace, clean) << "left behind by the gradients' sums";
    EXPECT_EQ(copy, gradients);
    backward_info = read_header(gradients.data(), 1);
    cuda::finalize_gradients(gradients.data(), dtype, 1, nullptr, info.data(),
                             {mean.data(), rstd.data(), there(weight), coefficients.data(),
                              on_cuda(dweight.view()), on_cuda(dbias.view()), channels()},
                             stream);
    cuda::input_gradient({there(dy), there(x), counts, mean.data(), rstd.data(),
                          coefficients.data(), back, on_cuda(dx.view())},
                         stream);
    EXPECT_EQ(emulation::counts().launches - before, 6u) << "and three in backward";
    cuda::finalize_gradients(gradients.data(), dtype, 1, gradients.data(), info.data(),
                             {mean.data(), rstd.data(), there(weight), coefficients.data(),
                              on_cuda(share_weight.view()), on_cuda(share_bias.view()), channels()},
                             stream);
    cuda::evaluation_input_gradient(there(dy), counts, rstd.data(), there(weight),
                                    on_cuda(evaluated.view()), stream);
  }
};

inline void expect_same(const Case& c, const std::vector<Configuration>& configurations) {
  SCOPED_TRACE(c.text());
  const LevelScope level("reference");
  Case expected = c;
  expected.run_on_cpu();
  for (const Configuration& configuration : configurations) {
    SCOPED_TRACE("threads in the order of seed " + std::to_string(configuration.seed));
    const ConfigurationScope scope(configuration);
    Case actual = c;
    EXPECT_NO_THROW(actual.run_on_cuda());
    expect_same_layer(actual, expected);
    EXPECT_EQ(actual.moments, expected.moments);
    EXPECT_EQ(actual.gradients, expected.gradients);
    EXPECT_EQ(actual.meaningful_bits(), expected.meaningful_bits());
    EXPECT_TRUE(same_bits(actual.coefficients, expected.coefficients)) << "coefficients";
    EXPECT_TRUE(same_bits(actual.share_weight.values(), expected.share_weight.values()));
    EXPECT_TRUE(same_bits(actual.share_bias.values(), expected.share_bias.values()));
    EXPECT_TRUE(same_bits(actual.evaluated.values(), expected.evaluated.values())) << "evaluated";
  }
}

inline void expect_same(Random& random, const Case& c) {
  expect_same(c, two_configurations(random));
}

}  // namespace syncbn
