// SPDX-License-Identifier: Apache-2.0
#include "cpu/blocks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/finalize.hpp"
#include "one_rank.hpp"
#include "statistics/header.hpp"
#include "tensors/channel_values.hpp"

// Directions in blocks of channels: the bits of one pass after the other.
namespace syncbn::testing {
namespace {

using cpu::SumsSink;
using cpu::VectorMap;
using cpu::VectorSums;
using cpu::Windows;

/// Statistics straight from windows, as one rank has them.
struct Sink final : SumsSink {
  explicit Sink(std::function<void(Windows&, std::int64_t)> how) : finalize(std::move(how)) {}
  void publish(Windows& windows, std::int64_t begin) override { finalize(windows, begin); }
  std::function<void(Windows&, std::int64_t)> finalize;
};

/// A group whose other ranks bring zeros; from the wait `late` on they have not come.
struct Words final : cpu::GroupSums {
  Words(const SampleView& x, int number)
      : words(static_cast<std::size_t>(x.channels * words_per_channel(x.dtype))), late(number) {}
  bool streams() const override { return true; }
  void publish(std::int64_t end) override {
    EXPECT_GT(end, published);
    published = end;
  }
  bool wait(std::int64_t end) override {
    EXPECT_LE(end, published);
    EXPECT_GT(late, 0) << "a wait after one that was in vain";
    come = --late > 0 ? end : come;
    return late > 0;
  }
  void finalize(std::int64_t, std::int64_t end) override { EXPECT_LE(end, come); }

  std::vector<std::int64_t> words;
  std::int64_t published = 0;
  std::int64_t come = 0;
  int late;
};
constexpr int kNeverLate = 1 << 30;

/// How a direction goes through blocks: on one rank, or in a group.
struct Way {
  std::int64_t block;  ///< channels
  bool waves = false;
  int late = kNeverLate;
};

/// Runs the blocks; false if the kernels cannot do it.
template <class Statistics, class SetConstants>
bool run_way(const Way& way, const OneRank& layer, const SampleView& x, const VectorSums& sums,
             VectorMap& map, const Statistics& to, const SetConstants& set_constants,
             Executor& executor) {
  if (!sums.possible() || !map.possible() || sums.in_rows() || map.in_rows() || x.count() == 0) {
    return false;
  }
  if (!way.waves) {
    Sink sink([&](Windows& windows, std::int64_t begin) {
      cpu::finalize(layer.dtype, windows, begin, to);
    });
    cpu::run_in_blocks(x, sums, map, sink, way.block, set_constants, executor);
    return true;
  }
  Words group(x, way.late);
  cpu::WordsSink sink(layer.dtype, group.words.data());
  const bool complete = cpu::run_in_waves(
      x, sums, map, sink, way.block, group,
      [&](std::int64_t begin, std::int64_t end) {
        group.finalize(begin, end);
        cpu::finalize(layer.dtype, group.words.data(), begin, end, to);
        set_constants(begin, end);
      },
      executor);
  EXPECT_EQ(complete, group.late > 0);
  EXPECT_EQ(group.published, x.channels);
  if (!complete) {  // all words are there, and so is what can be made of them
    cpu::finalize(layer.dtype, group.words.data(), 0, x.channels, to);
    set_constants(0, x.channels);
    map.run(executor);
  }
  return true;
}

bool forward_in_blocks(OneRank& layer, const Way& way, Executor& executor) {
  const SampleView x(layer.x_view(), layer.mask_view());
  const std::optional<SampleView> residual =
      layer.with_residual ? std::optional<SampleView>(layer.residual_view()) : std::nullopt;
  const SampleView y{TensorView(layer.y.view())};
  const VectorSums sums(x);
  VectorMap map(x, residual ? &*residual : nullptr, y, layer.bits_data(), layer.activation);
  const cpu::Moments to{x.count(), OneRank::kEps, layer.mean.data(), layer.var.data(),
                        layer.rstd.data()};
  const std::vector<double> weight =
      channel_values(std::as_const(layer.weight).view(), x.channels, 1.0);
  const std::vector<double> bias =
      channel_values(std::as_const(layer.bias).view(), x.channels, 0.0);
  const auto set_constants = [&](std::int64_t begin, std::int64_t end) {
    map.constants().set_affine({to.mean, to.rstd, weight.data(), bias.data()}, begin, end);
  };
  layer.forward_info = {x.count(), true, false, true, layer.dtype};
  return run_way(way, layer, x, sums, map, to, set_constants, executor);
}

void backward_in_blocks(OneRank& layer, const Way& way, Executor& executor) {
  const SampleView x(layer.x_view(), layer.mask_view());
  const SampleView dy(std::as_const(layer.dy).view());
  const SampleView u{TensorView(layer.u.view())};
  const SampleView dx{TensorView(layer.dx.view())};
  const std::vector<double> weight =
      channel_values(std::as_const(layer.weight).view(), x.channels, 1.0);
  const std::vector<double> bias =
      channel_values(std::as_const(layer.bias).view(), x.channels, 0.0);
  const double* mean = layer.mean.data();
  const double* rstd = layer.rstd.data();
  const cpu::Pullback pullback{
      layer.activation, {mean, rstd, weight.data(), bias.data()}, layer.bits_data()};
  const cpu::Pullback rest = layer.keep ? cpu::Pullback{{}, {}, nullptr} : pullback;
  const VectorSums sums(dy, x, layer.keep ? &u : nullptr, pullback);
  VectorMap map(layer.keep ? u : dy, x, dx, rest);
  const double* c = layer.coefficients.data();
  const cpu::Gradients to{x.count(),
                          mean,
                          rstd,
                          std::as_const(layer.weight).view(),
                          layer.coefficients.data(),
                          layer.dweight.view(),
                          layer.dbias.view(),
                          x.channels};
  const auto set_constants = [&](std::int64_t begin, std::int64_t end) {
    map.constants().set_gradient({mean, rstd, c, c + x.channels, c + 2 * x.channels}, begin, end);
  };
  EXPECT_TRUE(run_way(way, layer, x, sums, map, to, set_constants, executor));
  layer.backward_info = layer.forward_info;
}

TEST(OneRankLayer, InBlocksHasTheBitsOfPassesExact) {
  Random random(11);
  const std::vector<std::string> levels = available_levels();
  ThreadPool two(2), three(3);
  const std::vector<Executor*> executors = {&serial_executor(), &two, &three};
  const std::vector<std::int64_t> planes = {1, 7, 15, 16, 17, 49, 196, 511, 512, 513, 1000, 3136};
  int compared = 0;
  for (int round = 0; round < 100; ++round) {
    const std::int64_t plane = random.one_in(3) ? random.between(1, 1000) : random.pick(planes);
    const std::int64_t channels = random.between(1, random.one_in(4) ? 600 : 40);
    const std::int64_t most = std::max<std::int64_t>(1, 20000 / (plane * channels));
    const OneRank given =
        any_layer(random, kDtypes[random.between(0, 2)],
                  {random.between(1, std::min<std::int64_t>(most, 5)), channels, plane},
                  random.one_in(3) ? Memory::kPlanesSlice : Memory::kPlanes);
    const OneRank expected = expected_of(given);
    const std::int64_t step = plane % 8 == 0 ? 1 : 8;
    const Way way{step * random.between(1, 32 / step), random.one_in(2),
                  random.one_in(3) ? static_cast<int>(random.between(1, 5)) : kNeverLate};
    for (const std::string& level : levels) {
      const LevelScope scope(level);
      SCOPED_TRACE(level + ", round " + std::to_string(round) + " plane " + std::to_string(plane) +
                   " channels " + std::to_string(channels));
      OneRank actual = given;
      Executor& threads = *random.pick(executors);
      if (forward_in_blocks(actual, way, threads)) {
        backward_in_blocks(actual, way, threads);
        expect_same_layer(actual, expected);
        ++compared;
      }
    }
    if (HasFailure()) {
      return;
    }
  }
  EXPECT_TRUE(compared > 60 || levels.size() == 1);
}

}  // namespace
}  // namespace syncbn::testing
