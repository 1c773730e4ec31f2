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
namespace syncbn::testing {
namespace {

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
    local_gradients({rank.dy_view(), x, rank.mask_view(), s.mean.data(), s.rstd.data(), through(r),
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
        {step.keep ? TensorView(rank.u_view()) : rank.dy_view(), std::as_const(inputs[r]).view(),
         rank.mask_view(), s.mean.data(), s.rstd.data(), coefficients.data(),
         step.keep ? ActivationGradient() : through(r), rank.dx_out().view()},
        executor);
    out.take(rank, r, split[r], s);
  }
  return out;
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
        const Outcome expected = [&] {
          const LevelScope scope("reference");
          return evaluate(step);
        }();
        const LevelScope scope(random.pick(levels_));
        Placement placement(random);
        placement.in_place = placement.residual_in_place = false;
        expect_same(evaluate(step, placement, executor(random)), expected);
      },
      2);
}

TEST(Levels, NamesAndChoice) {
  const std::string before = cpu_instruction_set();
  EXPECT_FALSE(force_cpu_instruction_set("sse9"));
  EXPECT_EQ(cpu_instruction_set(), before);
  EXPECT_EQ(available_levels().front(), "reference");
  EXPECT_EQ(available_levels().back(), before) << "the best one is the default";
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    EXPECT_EQ(cpu_instruction_set(), level);
  }
  EXPECT_EQ(cpu_instruction_set(), before);
}

}  // namespace
}  // namespace syncbn::testing
