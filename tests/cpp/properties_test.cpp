// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "groups.hpp"
#include "placed_rank.hpp"
#include "properties.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Random steps of a layer, thousands of them: any split over ranks, layout, thread count and vector
// code gives the bits of one rank with plain loops. CONTRIBUTING.md says how to repeat a case.
namespace syncbn {
namespace {

using namespace testing;  // most of it

/// The samples of each rank, in the order in which it holds them.
using Split = std::vector<std::vector<std::int64_t>>;

Split whole(std::int64_t samples) {
  Split split(1, std::vector<std::int64_t>(static_cast<std::size_t>(samples)));
  std::iota(split[0].begin(), split[0].end(), 0);
  return split;
}

/// Shuffled samples in random parts; ranks without samples are likely.
Split random_split(Random& random, std::int64_t samples) {
  Split split(static_cast<std::size_t>(random.between(1, 5)));
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
Outcome run_in_group(const Step& step, const Split& split, const std::vector<Placement>& placements,
                     GroupKind kind, Executor& executor) {
  const auto ranks = static_cast<int>(split.size());
  const auto group = make_group(kind, ranks);
  Outcome out(step, split.size());
  expect_no_errors(run_ranks(ranks, [&](int number) {
    const auto r = static_cast<std::size_t>(number);
    Rank rank(step, split[r], placements[r]);
    const Tensor x = rank.x;
    BatchNorm layer(step.options, group->rank(number));
    Saved saved;
    layer.forward({.x = rank.x_view(),
                   .mask = rank.mask_view(),
                   .weight = rank.weight_view(),
                   .bias = rank.bias_view(),
                   .residual = rank.residual_view(),
                   .y = rank.y_out().view(),
                   .running_mean = rank.mean_view(),
                   .running_var = rank.var_view(),
                   .num_batches_tracked = &rank.tracked},
                  saved, executor);
    put_back(rank.y_out().values(), split[r], out.y);
    Tensor again = rank.y;  // y may be x's memory, which a backward needs
    layer.forward({.x = x.view(),
                   .mask = rank.mask_view(),
                   .weight = rank.weight_view(),
                   .bias = rank.bias_view(),
                   .residual = rank.residual_view(),
                   .y = again.view()},
                  saved, executor);
    layer.backward({.dy = rank.dy_view,
                    .x = x.view(),
                    .mask = rank.mask_view(),
                    .weight = rank.weight_view(),
                    .bias = rank.bias_view(),
                    .dx = rank.dx_out().view(),
                    .dweight = rank.dweight.view(),
                    .dbias = rank.dbias.view(),
                    .dresidual = rank.u_view(),
                    .affine = AffineGradients::kGlobal},
                   saved, executor);
    out.take(rank, r, split[r],
             {values(saved.mean()), values(saved.var()), values(saved.rstd()), saved.count()});
  }));
  return out;
}

using Words = std::vector<std::int64_t>;

void add(Words& sum, const Words& message) {
  std::transform(sum.begin(), sum.end(), message.begin(), sum.begin(), std::plus<>());
}

/// The passes of one rank after the other, their messages added by hand.
Outcome run_by_hand(const Step& step, const Split& split, const std::vector<Placement>& placements,
                    Executor& executor) {
  const auto ranks = static_cast<int>(split.size());
  const std::int64_t channels = step.channels();
  Outcome out(step, split.size());
  std::vector<Rank> all;
  Words message(static_cast<std::size_t>(message_words(step.dtype, channels)));
  Words merged(message.size());
  for (std::size_t r = 0; r < split.size(); ++r) {
    all.emplace_back(step, split[r], placements[r]);
    local_moments(all[r].x_view(), all[r].mask_view(), message.data(), 5, executor);
    add(merged, message);
  }
  const MessageInfo info = read_header(merged.data(), ranks);
  check_header(info);
  Outcome::Known s;
  s.count = info.count;
  for (auto* values : {&s.mean, &s.var, &s.rstd}) {
    values->resize(static_cast<std::size_t>(channels));
  }
  finalize_moments(info, merged.data() + kHeaderWords, s.mean.data(), s.var.data(), s.rstd.data(),
                   channels, step.options.eps, executor);
  const double factor = step.options.momentum.value_or(1.0 / static_cast<double>(step.tracked + 1));
  const bool bits = !step.residual.empty() && step.options.activation.kind != ActivationKind::kNone;
  Words merged_gradients(message.size());
  std::vector<Tensor> inputs;
  std::vector<std::vector<std::uint8_t>> kept_bits(split.size());
  const auto through = [&](std::size_t r) {
    return ActivationGradient{step.options.activation, all[r].weight_view(), all[r].bias_view(),
                              bits ? kept_bits[r].data() : nullptr};
  };
  for (std::size_t r = 0; r < split.size(); ++r) {
    Rank& rank = all[r];
    inputs.push_back(rank.x);
    const TensorView x = std::as_const(inputs.back()).view();
    kept_bits[r].resize(static_cast<std::size_t>(activation_mask_bytes(x)) + 1);
    normalize({rank.x_view(), rank.mask_view(), s.mean.data(), s.rstd.data(), rank.weight_view(),
               rank.bias_view(), rank.residual_view(), rank.y_out().view(),
               bits ? kept_bits[r].data() : nullptr, step.options.activation},
              executor);
    put_back(rank.y_out().values(), split[r], out.y);
    update_running_statistics(rank.mean_view(), rank.var_view(), s.mean.data(), s.var.data(),
                              channels, s.count, factor);
    rank.tracked += s.count > 0 ? 1 : 0;
    local_gradients({rank.dy_view, x, rank.mask_view(), s.mean.data(), s.rstd.data(), through(r),
                     rank.u_view()},
                    message.data(), 6, executor);
    add(merged_gradients, message);
  }
  const MessageInfo back = read_header(merged_gradients.data(), ranks);
  check_header(back);
  std::vector<double> coefficients(static_cast<std::size_t>(3 * channels));
  for (std::size_t r = 0; r < split.size(); ++r) {
    Rank& rank = all[r];
    const ParameterGradients to{s.mean.data(),
                                s.rstd.data(),
                                rank.weight_view(),
                                coefficients.data(),
                                rank.dweight.view(),
                                rank.dbias.view(),
                                channels};
    finalize_gradients(back, merged_gradients.data() + kHeaderWords, to, s.count, executor);
    input_gradient(
        {step.keep ? TensorView(rank.u_view()) : rank.dy_view, std::as_const(inputs[r]).view(),
         rank.mask_view(), s.mean.data(), s.rstd.data(), coefficients.data(),
         step.keep ? ActivationGradient() : through(r), rank.dx_out().view()},
        executor);
    out.take(rank, r, split[r], s);
  }
  return out;
}

void expect_same(const Outcome& actual, const Outcome& expected) {
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

class Properties : public ::testing::Test {
 protected:
  Executor& executor(Random& random) {
    return random.one_in(2)   ? serial_executor()
           : random.one_in(2) ? static_cast<Executor&>(two_)
                              : three_;
  }
  static std::vector<Placement> placements(Random& random, const Split& split) {
    std::vector<Placement> out;
    for (std::size_t r = 0; r < split.size(); ++r) {
      out.emplace_back(random);
    }
    return out;
  }
  const std::vector<std::string> levels_ = available_levels();

 private:
  ThreadPool two_{2};
  ThreadPool three_{3};
};

TEST_F(Properties, AnyStepHasTheBitsOfOneRankWithPlainLoopsExact) {
  for_each_case([&](Random& random) {
    const Step step(random);
    SCOPED_TRACE(step.text());
    const Outcome expected = [&] {
      const LevelScope scope("reference");
      return run_in_group(step, whole(step.sizes[0]), {Placement()}, GroupKind::kThreads,
                          serial_executor());
    }();
    for (const bool by_hand : {false, true}) {
      const LevelScope scope(random.pick(levels_));
      const Split split = random_split(random, step.sizes[0]);
      const std::vector<Placement> where = placements(random, split);
      const GroupKind kind = random.one_in(8) ? GroupKind::kSharedMemory : GroupKind::kThreads;
      Executor& threads = executor(random);
      SCOPED_TRACE(std::string(cpu_instruction_set()) + ", ranks: " + std::to_string(split.size()) +
                   (by_hand ? ", messages added by hand" : ""));
      expect_same(by_hand ? run_by_hand(step, split, where, threads)
                          : run_in_group(step, split, where, kind, threads),
                  expected);
    }
  });
}

// What the welford mode does promise: one result on every rank, and the same from run to run, on
// any threads, for the same split and layouts.
TEST_F(Properties, WelfordStatisticsRepeatAndAreTheSameOnEveryRankExact) {
  for_each_case(
      [&](Random& random) {
        Step step(random);
        step.options.statistics = Statistics::kWelford;
        SCOPED_TRACE(step.text());
        const LevelScope scope(random.pick(levels_));
        const Split split = random_split(random, step.sizes[0]);
        const std::vector<Placement> where = placements(random, split);
        Outcome first = run_in_group(step, split, where, GroupKind::kThreads, serial_executor());
        expect_same(first, first);  // ranks with each other
        expect_same(run_in_group(step, split, where, GroupKind::kThreads, executor(random)), first);
      },
      4);
}

TEST_F(Properties, EvaluationHasTheBitsOfPlainLoopsExact) {
  for_each_case(
      [&](Random& random) {
        const Step step(random);
        SCOPED_TRACE(step.text());
        const bool running = step.running_mean.present && step.running_var.present;
        const auto run = [&](const Placement& placement, Executor& threads) {
          const std::vector<std::int64_t> samples = whole(step.sizes[0])[0];
          Rank rank(step, samples, placement);
          const TensorView mean = running ? rank.mean_view() : MutableTensorView();
          const TensorView var = running ? rank.var_view() : MutableTensorView();
          BatchNorm layer(step.options);
          layer.evaluate({.x = rank.x_view(),
                          .mask = rank.mask_view(),
                          .weight = rank.weight_view(),
                          .bias = rank.bias_view(),
                          .residual = rank.residual_view(),
                          .running_mean = mean,
                          .running_var = var,
                          .y = rank.y.view()},
                         threads);
          std::vector<double> all = rank.y.values();
          if (running) {
            layer.evaluate_backward({.dy = rank.dy_view,
                                     .x = rank.x_view(),
                                     .mask = rank.mask_view(),
                                     .weight = rank.weight_view(),
                                     .bias = rank.bias_view(),
                                     .residual = rank.residual_view(),
                                     .running_mean = mean,
                                     .running_var = var,
                                     .dx = rank.dx.view(),
                                     .dweight = rank.dweight.view(),
                                     .dbias = rank.dbias.view(),
                                     .dresidual = rank.u_view()},
                                    threads);
            for (const Tensor* tensor : {&rank.dx, &rank.u_out(), &rank.dweight, &rank.dbias}) {
              const std::vector<double> values = tensor->values();
              all.insert(all.end(), values.begin(), values.end());
            }
          }
          return all;
        };
        const std::vector<double> expected = [&] {
          const LevelScope scope("reference");
          return run({}, serial_executor());
        }();
        const LevelScope scope(random.pick(levels_));
        Placement placement(random);
        placement.in_place = placement.residual_in_place = false;
        EXPECT_TRUE(same_bits(run(placement, executor(random)), expected));
      },
      2);
}

}  // namespace
}  // namespace syncbn
