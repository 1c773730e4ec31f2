// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "activation_mask.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "properties.hpp"
#include "sample_view.hpp"
#include "statistics/dtype.hpp"
#include "statistics/header.hpp"
#include "support.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/passes.hpp"

// Random steps, bit for bit, against the plain loops on CPU, which the oracle has decided. Each
// result is computed by two launch configurations whose threads run in different orders.
// torch.nn.SyncBatchNorm has no such promise: its sums depend on the grid and on the ranks.
namespace syncbn {

using testing::kDtypes;
using testing::kMemories;
using testing::LevelScope;
using testing::Memory;
using testing::Random;
using testing::rough_values;
using testing::same_bits;
using testing::Tensor;
using Words = std::vector<std::int64_t>;
using Doubles = std::vector<double>;

/// A grid and an order of threads.
struct Configuration {
  std::uint64_t seed;
  int multiprocessors;
  unsigned resident;
};

class ConfigurationScope {
 public:
  explicit ConfigurationScope(const Configuration& c) {
    emulation::settings() = {
        .seed = c.seed, .multiprocessors = c.multiprocessors, .resident = c.resident};
    EXPECT_EQ(c.multiprocessors, emulation::settings().multiprocessors);
  }
  ~ConfigurationScope() { emulation::settings() = {}; }
};

inline std::vector<Configuration> two_configurations(Random& random) {
  return {{random.bits(), 1, 1}, {random.bits(), static_cast<int>(random.between(2, 5)), 3}};
}

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// What one forward and backward take, and the random choice of it.
struct Case {
  DType dtype;
  std::vector<std::int64_t> sizes;
  Activation activation;
  Tensor x, dy, residual;
  Memory y_memory, dx_memory;
  bool with_residual;
  bool kept;  ///< the residual's gradient is asked for
  Tensor weight, bias;
  std::vector<std::uint8_t> counts;  ///< an element mask, or nothing

  /// channels: up to `most_channels` times `channels_by`.
  Case(Random& random, int round, const std::vector<std::int64_t>& planes,
       std::int64_t most_channels, std::int64_t channels_by = 1)
      : dtype(kDtypes[round % 4]) {
    sizes = {random.between(1, 5), channels_by * random.between(1, most_channels)};
    std::int64_t per_sample = sizes[1];
    const std::int64_t plane = random.pick(planes);
    if (plane > 1 || random.one_in(2)) {
      sizes.push_back(plane % 4 == 0 && random.one_in(2) ? plane / 4 : plane);
      if (sizes.back() != plane) {
        sizes.push_back(4);
      }
    }
    per_sample *= plane;
    // Most often all tensors lie alike, as in a network.
    const Memory memory = random.pick(kMemories);
    const auto like = [&] { return random.one_in(4) ? random.pick(kMemories) : memory; };
    const auto offset = [&] { return random.one_in(4) ? random.between(1, 3) : 0; };
    x = Tensor(dtype, sizes, memory, offset());
    dy = Tensor(dtype, sizes, like(), offset());
    residual = Tensor(dtype, sizes, like(), offset());
    y_memory = like();
    dx_memory = like();
    std::vector<double> values = rough_values(random, dtype, sizes[0], per_sample);
    if (random.one_in(4)) {
      const double inf = std::numeric_limits<double>::infinity();
      for (const double special : {inf, -inf, std::numeric_limits<double>::quiet_NaN()}) {
        values[size(random.between(0, static_cast<std::int64_t>(values.size()) - 1))] = special;
      }
    }
    if (random.one_in(3)) {  // an element mask, and often NaN where it hides the values
      counts.resize(size(sizes[0] * plane));
      std::generate(counts.begin(), counts.end(),
                    [&] { return static_cast<std::uint8_t>(random.one_in(3) ? 0 : 255); });
      const bool hide = random.one_in(2);
      for (std::int64_t i = 0; hide && i < sizes[0] * per_sample; ++i) {
        if (counts[size(i / per_sample * plane + i % plane)] == 0) {
          values[size(i)] = std::numeric_limits<double>::quiet_NaN();
        }
      }
    }
    x.fill(values);
    dy.fill(rough_values(random, dtype, sizes[0], per_sample));
    residual.fill(rough_values(random, dtype, sizes[0], per_sample));
    activation.kind = static_cast<ActivationKind>(random.between(0, 2));
    with_residual = random.one_in(2);
    kept = with_residual;
    const auto parameter = [&] {
      Tensor out(random.pick(std::vector<DType>{dtype, DType::kFloat32}), {sizes[1]});
      Doubles entries(size(sizes[1]));
      std::generate(entries.begin(), entries.end(), [&] { return 2 * random.signed_unit(); });
      out.fill(entries);
      return out;
    };
    if (!random.one_in(5)) {
      weight = parameter();
      bias = parameter();
    }
  }
  /// Lays all tensors that are used out alike, without gaps.
  void make_dense(Random& random, Memory memory) {
    const std::int64_t per_sample = x.numel() / sizes[0];
    const auto lay = [&](Tensor& tensor) {
      tensor = Tensor(dtype, sizes, memory);
      tensor.fill(rough_values(random, dtype, sizes[0], per_sample));
    };
    lay(x);
    lay(dy);
    if (with_residual) {
      lay(residual);
    }
    y_memory = dx_memory = memory;
  }
  /// A plain step on such memory.
  void make_plain(Random& random, Memory memory, ActivationKind kind) {
    counts.clear();
    with_residual = kept = false;
    activation.kind = kind;
    make_dense(random, memory);
  }
  std::int64_t channels() const { return sizes[1]; }
  MaskView mask(Device device) const {
    if (counts.empty()) {
      return {};
    }
    std::vector<std::int64_t> without_channels = sizes;
    without_channels.erase(without_channels.begin() + 1);
    return {counts.data(), without_channels, device};
  }
  /// Bits of elements that do not count mean nothing: makes them 0.
  std::vector<std::uint8_t> meaningful(std::vector<std::uint8_t> bits) const {
    const SampleView view(x.view(), mask(Device::kCpu));
    const ActivationMaskLayout layout(view);
    for (std::int64_t i = 0; !bits.empty() && i < x.numel(); ++i) {
      const std::int64_t e = i % view.plane;
      const std::int64_t c = i / view.plane % view.channels;
      const std::int64_t n = i / view.plane / view.channels;
      const std::int64_t bit = layout.bit(n, c, e);
      if (!view.counts(n, e)) {
        bits[size(bit / 8)] &= static_cast<std::uint8_t>(~(1u << bit % 8));
      }
    }
    return bits;
  }
  bool masked() const { return with_residual && activation.kind != ActivationKind::kNone; }
  TensorView weight_view() const {
    return weight.numel() > 1 || !weight.storage().empty() ? weight.view() : TensorView();
  }
  TensorView bias_view() const { return bias.storage().empty() ? TensorView() : bias.view(); }
  std::string text() const {
    std::string out = std::string(name(dtype)) + " (";
    for (const std::int64_t s : sizes) {
      out += std::to_string(s) + " ";
    }
    return out + ") activation " + std::to_string(static_cast<int>(activation.kind)) +
           (with_residual ? " residual" : "") + (counts.empty() ? "" : " mask");
  }
};

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
  evaluation_input_gradient(c.dy.view(), counts, r.rstd.data(), c.weight_view(), r.evaluated.view(),
                            executor);
}

inline void run_on_cuda(const Case& c, Results& r) {
  const cuda::Stream stream;
  Words workspace(size(cuda::workspace_words(c.dtype, c.channels())), 0);
  const Words clean = workspace;
  Words info(cuda::kInfoWords, -7);
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
                         info.data(), c.channels(), kEps, stream);
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

/// The same by whole directions, for what they give.
inline void run_as_one_rank(const Case& c, Results& r) {
  const cuda::Stream stream;
  Words workspace(size(cuda::workspace_words(c.dtype, c.channels())), 0);
  const Words clean = workspace;
  Words info(cuda::kInfoWords, -7);
  const TensorView x = on_cuda(c.x.view());
  const TensorView weight = on_cuda(c.weight_view());
  const TensorView bias = on_cuda(c.bias_view());
  const std::int64_t call = kCall;
  const MaskView counts = c.mask(Device::kCuda);
  cuda::forward_of_one_rank({.x = x,
                             .mask = counts,
                             .weight = weight,
                             .bias = bias,
                             .residual = on_cuda(residual_of(c)),
                             .y = on_cuda(r.y.view()),
                             .activation_mask = r.mask.empty() ? nullptr : r.mask.data(),
                             .mean = r.mean.data(),
                             .var = r.var.data(),
                             .rstd = r.rstd.data(),
                             .activation = c.activation},
                            {kLayer, &call, kEps}, info.data(), {}, {}, r.message.data(),
                            workspace.data(), stream);
  EXPECT_EQ(workspace, clean) << "left behind by forward";
  r.count = info[0];
  EXPECT_EQ(info[1], r.message[kHeaderFingerprint]);
  ActivationGradient back = through(c, r);
  back.weight = weight;
  back.bias = bias;
  cuda::backward_of_one_rank({.dy = on_cuda(c.dy.view()),
                              .x = x,
                              .mask = counts,
                              .mean = r.mean.data(),
                              .rstd = r.rstd.data(),
                              .through = back,
                              .weight = weight,
                              .u = c.kept ? on_cuda(r.u.view()) : MutableTensorView(),
                              .dx = on_cuda(r.dx.view()),
                              .dweight = on_cuda(r.dweight.view()),
                              .dbias = on_cuda(r.dbias.view())},
                             info.data(), r.coefficients.data(), r.gradient_message.data(),
                             workspace.data(), stream);
  EXPECT_EQ(workspace, clean) << "left behind by backward";
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
    if (c.counts.empty() && !c.with_residual) {
      SCOPED_TRACE("whole directions");
      Results whole(c);
      whole.share_weight = expected.share_weight;
      whole.share_bias = expected.share_bias;
      whole.evaluated = expected.evaluated;
      EXPECT_NO_THROW(run_as_one_rank(c, whole));
      expect_equal(whole, expected, c);
    }
  }
}

inline void expect_same(Random& random, const Case& c) {
  expect_same(c, two_configurations(random));
}

}  // namespace syncbn
