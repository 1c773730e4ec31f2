// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank's share of a random step, in layouts of its own, and a step of a whole group.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "properties.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn::testing {

/// How a rank's tensors lie in memory.
struct Placement {
  Memory x = Memory::kPlanes;
  Memory dy = Memory::kPlanes;
  Memory residual = Memory::kPlanes;
  Memory out = Memory::kPlanes;
  std::int64_t offset = 0;
  bool in_place = false;           ///< y over x, dx over dy
  bool residual_in_place = false;  ///< the residual's gradient over dy
  Executor* executor = nullptr;    ///< or that of all ranks

  Placement() = default;
  explicit Placement(Random& random)
      : x(random.pick(kMemories)), offset(random.between(0, 3)), in_place(random.one_in(4)) {
    const auto like_x = [&] { return random.one_in(2) ? random.pick(kMemories) : x; };
    dy = like_x();
    residual = like_x();
    out = like_x();
    residual_in_place = !in_place && random.one_in(4);
  }
};

/// What a rank has, in its own layouts.
struct Rank {
  Tensor x, dy, residual, y, dx, u;
  Extents dy_strides;
  std::vector<std::uint8_t> mask;
  std::vector<std::int64_t> mask_sizes;
  Tensor weight, bias, running_mean, running_var, dweight, dbias;
  std::int64_t tracked;
  Placement placement;
  const Step& step;
  /// What the layer gets: these tensors, or copies of them elsewhere.
  std::function<MutableTensorView(Tensor&)> at = [](Tensor& tensor) { return tensor.view(); };
  std::optional<MaskView> mask_there;
  std::int64_t* tracked_there = nullptr;

  Rank(const Step& s, const std::vector<std::int64_t>& samples, const Placement& how)
      : weight(s.weight.tensor(s.channels())),
        bias(s.bias.tensor(s.channels())),
        running_mean(s.running_mean.tensor(s.channels())),
        running_var(s.running_var.tensor(s.channels())),
        dweight(s.weight.dtype, {s.channels()}),
        dbias(s.bias.dtype, {s.channels()}),
        tracked(s.tracked),
        placement(how),
        step(s) {
    std::vector<std::int64_t> sizes = step.sizes;
    sizes[0] = static_cast<std::int64_t>(samples.size());
    const auto part = [&](const std::vector<double>& values, Memory memory) {
      Tensor out(step.dtype, sizes, memory, how.offset);
      out.fill(parts_of(values, samples, step.per_sample()));
      return out;
    };
    x = part(step.x, how.x);
    dy = part(step.dy, how.dy);
    y = Tensor(step.dtype, sizes, how.out, how.offset);
    dx = y;
    u = y;
    if (!step.residual.empty()) {
      residual = part(step.residual, how.residual);
    }
    dy_strides = dy.view().strides;
    if (step.expanded && dy.numel() > 0) {  // one element stands for all
      std::fill(dy_strides.begin(), dy_strides.end(), 0);
      placement.in_place = placement.residual_in_place = false;
    }
    if (!step.mask.empty()) {
      mask = parts_of(step.mask, samples, step.plane());
      sizes.erase(sizes.begin() + 1);
      mask_sizes = std::move(sizes);
    }
  }
  MaskView mask_view() const { return mask_there.value_or(MaskView{mask.data(), mask_sizes}); }
  TensorView dy_view() {
    TensorView view = at(dy);
    view.strides = dy_strides;
    return view;
  }
  TensorView x_view() { return at(x); }
  TensorView residual_view() { return view(!step.residual.empty(), residual); }
  TensorView weight_view() { return view(step.weight.present, weight); }
  TensorView bias_view() { return view(step.bias.present, bias); }
  MutableTensorView mean_view() { return view(step.running_mean.present, running_mean); }
  MutableTensorView var_view() { return view(step.running_var.present, running_var); }
  Tensor& y_out() { return placement.in_place ? x : y; }
  Tensor& dx_out() { return placement.in_place ? dy : dx; }
  Tensor& u_out() { return placement.residual_in_place ? dy : u; }
  MutableTensorView u_view() { return view(step.keep, u_out()); }

  void forward(BatchNorm& layer, Saved& saved, Executor& executor) {
    layer.forward({.x = x_view(),
                   .mask = mask_view(),
                   .weight = weight_view(),
                   .bias = bias_view(),
                   .residual = residual_view(),
                   .y = at(y_out()),
                   .running_mean = mean_view(),
                   .running_var = var_view(),
                   .num_batches_tracked = tracked_there != nullptr ? tracked_there : &tracked},
                  saved, executor);
  }
  /// given: the x of the forward, where y may have taken its memory.
  void backward(BatchNorm& layer, const Saved& saved, const TensorView& given, Executor& executor) {
    layer.backward({.dy = dy_view(),
                    .x = given,
                    .mask = mask_view(),
                    .weight = weight_view(),
                    .bias = bias_view(),
                    .dx = at(dx_out()),
                    .dweight = at(dweight),
                    .dbias = at(dbias),
                    .dresidual = u_view(),
                    .affine = step.affine},
                   saved, executor);
  }

  /// Backward too, if there are running statistics.
  void evaluate(BatchNorm& layer, Executor& executor) {
    layer.evaluate({.x = x_view(),
                    .mask = mask_view(),
                    .weight = weight_view(),
                    .bias = bias_view(),
                    .residual = residual_view(),
                    .running_mean = mean_view(),
                    .running_var = var_view(),
                    .y = at(y)},
                   executor);
    if (step.running_mean.present) {
      layer.evaluate_backward({.dy = dy_view(),
                               .x = x_view(),
                               .mask = mask_view(),
                               .weight = weight_view(),
                               .bias = bias_view(),
                               .residual = residual_view(),
                               .running_mean = mean_view(),
                               .running_var = var_view(),
                               .dx = at(dx),
                               .dweight = at(dweight),
                               .dbias = at(dbias),
                               .dresidual = u_view()},
                              executor);
    }
  }

 private:
  MutableTensorView view(bool given, Tensor& of) { return given ? at(of) : MutableTensorView(); }
};

/// The samples of each rank, in the order in which it holds them.
using Split = std::vector<std::vector<std::int64_t>>;

inline Split whole(std::int64_t samples) {
  Split split(1, std::vector<std::int64_t>(static_cast<std::size_t>(samples)));
  std::iota(split[0].begin(), split[0].end(), 0);
  return split;
}

/// Shuffled samples in random parts; ranks without samples are likely.
inline Split random_split(Random& random, std::int64_t samples, std::int64_t most = 5) {
  Split split(static_cast<std::size_t>(random.between(1, most)));
  std::vector<std::int64_t> order = whole(samples)[0];
  random.shuffle(order);
  const bool one_has_all = random.one_in(6);
  for (const std::int64_t n : order) {
    const auto last = static_cast<std::int64_t>(split.size()) - 1;
    split[static_cast<std::size_t>(one_has_all ? last : random.between(0, last))].push_back(n);
  }
  return split;
}

/// What a step gives: whole batches, and what every rank knows.
struct Outcome {
  std::vector<double> y, dx, u;
  struct Known {
    std::vector<double> mean, var, rstd;
    std::int64_t count = 0;
    std::vector<double> running_mean = {}, running_var = {}, dweight = {}, dbias = {};
    std::int64_t tracked = 0;
  };
  std::vector<Known> ranks;

  Outcome(const Step& step, std::size_t size)
      : y(step.x.size()), dx(y), u(step.keep ? y.size() : 0), ranks(size) {}

  void take(Rank& rank, std::size_t r, const std::vector<std::int64_t>& samples,
            const Known& statistics) {
    put_back(rank.dx_out().values(), samples, dx);
    if (rank.step.keep) {
      put_back(rank.u_out().values(), samples, u);
    }
    EXPECT_TRUE(rank.y_out().gaps_untouched() && rank.dx_out().gaps_untouched() &&
                rank.u_out().gaps_untouched());
    ranks[r] = {statistics.mean,
                statistics.var,
                statistics.rstd,
                statistics.count,
                rank.running_mean.values(),
                rank.running_var.values(),
                rank.dweight.values(),
                rank.dbias.values(),
                rank.tracked};
  }
};

/// Each rank a thread of a group, through the layer's class.
inline Outcome run_in_group(const Step& step, const Split& split,
                            const std::vector<Placement>& placements,
                            GroupKind kind = GroupKind::kThreads,
                            Executor& of_all = serial_executor()) {
  const auto ranks = static_cast<int>(split.size());
  const auto group = make_group(kind, ranks);
  Outcome out(step, split.size());
  expect_no_errors(run_ranks(ranks, [&](int number) {
    const auto r = static_cast<std::size_t>(number);
    Rank rank(step, split[r], placements[r]);
    Executor& executor = placements[r].executor != nullptr ? *placements[r].executor : of_all;
    const Tensor x = rank.x;
    BatchNorm layer(step.options, group->rank(number));
    Saved saved;
    rank.forward(layer, saved, executor);
    put_back(rank.y_out().values(), split[r], out.y);
    Tensor again = rank.y;  // y may be x's memory, which a backward needs
    layer.forward({.x = x.view(),
                   .mask = rank.mask_view(),
                   .weight = rank.weight_view(),
                   .bias = rank.bias_view(),
                   .residual = rank.residual_view(),
                   .y = again.view()},
                  saved, executor);
    rank.backward(layer, saved, x.view(), executor);
    out.take(rank, r, split[r],
             {values(saved.mean()), values(saved.var()), values(saved.rstd()), saved.count()});
  }));
  return out;
}

/// Evaluation by one rank.
inline Outcome evaluate(const Step& step, const Placement& placement = {},
                        Executor& executor = serial_executor()) {
  Outcome out(step, 1);
  const std::vector<std::int64_t> samples = whole(step.sizes[0])[0];
  Rank rank(step, samples, placement);
  BatchNorm layer(step.options);
  rank.evaluate(layer, executor);
  put_back(rank.y.values(), samples, out.y);
  out.take(rank, 0, samples, {});
  return out;
}

inline void expect_same(const Outcome& actual, const Outcome& expected) {
  const Outcome::Known& one = expected.ranks[0];
  for (const Outcome::Known& rank : actual.ranks) {
    EXPECT_TRUE(same_bits(rank.mean, one.mean)) << "mean";
    EXPECT_TRUE(same_bits(rank.var, one.var)) << "var";
    EXPECT_TRUE(same_bits(rank.rstd, one.rstd)) << "rstd";
    EXPECT_TRUE(same_bits(rank.running_mean, one.running_mean)) << "running mean";
    EXPECT_TRUE(same_bits(rank.running_var, one.running_var)) << "running var";
    EXPECT_TRUE(same_bits(rank.dweight, one.dweight)) << "dweight";
    EXPECT_TRUE(same_bits(rank.dbias, one.dbias)) << "dbias";
    EXPECT_EQ(rank.count, one.count);
    EXPECT_EQ(rank.tracked, one.tracked);
  }
  EXPECT_TRUE(same_bits(actual.y, expected.y)) << "y";
  EXPECT_TRUE(same_bits(actual.dx, expected.dx)) << "dx";
  EXPECT_TRUE(same_bits(actual.u, expected.u)) << "the residual's gradient";
}

}  // namespace syncbn::testing
