// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

// Only x86 lets a program flush subnormals through a register that its headers name.
#if defined(__SSE__)

#include <xmmintrin.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "placed_rank.hpp"
#include "properties.hpp"
#include "statistics/float_environment.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// A process that flushes subnormals to zero or rounds in another direction gets the same bits, and
// its mode back.
namespace syncbn::testing {
namespace {

constexpr unsigned int kDefault = 0x1f80;
constexpr unsigned int kFlush = 0x8040;  ///< FTZ and DAZ
constexpr unsigned int kControl = 0xffc0;
const unsigned int kModes[] = {kDefault | kFlush, kDefault | _MM_ROUND_DOWN,
                               kDefault | _MM_ROUND_TOWARD_ZERO | kFlush};

/// Sets the mode of this thread while in scope.
class ModeScope {
 public:
  explicit ModeScope(unsigned int mode) : before_(_mm_getcsr()) { _mm_setcsr(mode); }
  ~ModeScope() { _mm_setcsr(before_); }
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

 private:
  unsigned int before_;
};

/// Runs body once on each thread of the pool, the caller's included.
template <class Body>
void on_each_thread(ThreadPool& pool, const Body& body) {
  pool.parallel_for(0, pool.concurrency(), 1, [&](std::int64_t, std::int64_t) { body(); });
}

/// Subnormals everywhere.
Step subnormal_step(DType dtype, const std::vector<std::int64_t>& sizes) {
  Random random(90);
  Step step(random, dtype, sizes);
  // Channel 0 is all subnormal, channel 1 constant, others mixed.
  const double tiny = dtype == DType::kFloat16   ? 0x1p-15
                      : dtype == DType::kFloat64 ? 0x1p-1030
                                                 : 0x1p-130;
  for (std::size_t i = 0; i < step.x.size(); ++i) {
    const std::int64_t c = static_cast<std::int64_t>(i) / step.plane() % step.channels();
    const bool small = c == 0 || random.one_in(3);
    const double x = small ? tiny * random.signed_unit() : random.signed_unit();
    step.x[i] = c == 1 ? 3.0 : round_to(dtype, x);
    step.dy[i] = round_to(dtype, small ? tiny * random.signed_unit() : random.signed_unit());
  }
  for (Parameter* one : {&step.weight, &step.bias, &step.running_mean}) {
    one->dtype = DType::kFloat32;
  }
  for (std::size_t c = 0; c < step.weight.values.size(); ++c) {
    const auto small = [&] { return round_to(DType::kFloat32, 0x1p-130 * random.signed_unit()); };
    const auto usual = [&] { return round_to(DType::kFloat32, random.signed_unit()); };
    step.weight.values[c] = c % 2 == 0 ? small() : usual();
    step.bias.values[c] = c < 2 || c % 3 == 0 ? small() : usual();
    step.running_mean.values[c] = c % 2 == 0 ? small() : 1.0;
    step.running_var.values[c] = c % 2 == 0 ? 0x1p-130 : 0x1p-100;
  }
  step.tracked = 4;  // the factor 1 / 5 is not what rounding down makes of it
  step.options.momentum.reset();
  step.options.name = {};
  // Keeps float64's tiny variances from being lost in it.
  step.options.eps = 0x1p-200;
  return step;
}

/// Training and evaluation in the mode of this thread; reading and writing numbers is not.
std::array<Outcome, 2> run(const Step& step, Memory memory, Executor& executor) {
  std::array<Outcome, 2> out{Outcome(step, 1), Outcome(step, 1)};
  Placement placement;
  placement.x = placement.dy = placement.out = memory;
  const std::vector<std::int64_t> samples = whole(step.sizes[0])[0];
  std::vector<Rank> ranks;
  ranks.reserve(2);
  {
    const cpu::FloatEnvironment environment;
    ranks.emplace_back(step, samples, placement);
    ranks.emplace_back(step, samples, placement);
  }
  Rank &trained = ranks[0], &evaluated = ranks[1];
  BatchNorm layer(step.options);
  Saved saved;
  trained.forward(layer, saved, executor);
  trained.backward(layer, saved, trained.x_view(), executor);
  evaluated.evaluate(layer, executor);
  const cpu::FloatEnvironment environment;
  out[0].y = trained.y.values();
  out[1].y = evaluated.y.values();
  out[0].take(trained, 0, samples,
              {values(saved.mean()), values(saved.var()), values(saved.rstd()), saved.count()});
  out[1].take(evaluated, 0, samples, {});
  return out;
}

TEST(FloatEnvironment, FlushingAndRoundingModesChangeNothingExact) {
  for (const DType dtype : kDtypes) {
    for (const auto& sizes :
         {std::vector<std::int64_t>{5, 19, 7}, std::vector<std::int64_t>{40, 20, 60}}) {
      for (const Memory memory : {Memory::kPlanes, Memory::kRows, Memory::kOdd}) {
        const Step step = subnormal_step(dtype, sizes);
        for (const std::string& level : available_levels()) {
          const LevelScope level_scope(level);
          ThreadPool pool(2);
          const auto expected = run(step, memory, pool);
          for (const unsigned int mode : kModes) {
            SCOPED_TRACE(level + ", " + name(dtype) + ", mode " + std::to_string(mode));
            const ModeScope scope(mode);
            on_each_thread(pool, [&] { _mm_setcsr(mode); });
            const auto actual = run(step, memory, pool);
            EXPECT_EQ(_mm_getcsr() & kControl, mode & kControl);
            on_each_thread(pool, [&] { EXPECT_EQ(_mm_getcsr() & kControl, mode & kControl); });
            on_each_thread(pool, [] { _mm_setcsr(kDefault); });
            const cpu::FloatEnvironment environment;  // to compare and print
            expect_same(actual[0], expected[0]);
            expect_same(actual[1], expected[1]);
            if (HasFailure()) {
              return;
            }
          }
        }
      }
    }
  }
}

TEST(FloatEnvironment, TheDataHasTeeth) {
  // Flushed inputs would change the sums of channel 0, which is all subnormal.
  const Step step = subnormal_step(DType::kFloat32, {5, 19, 7});
  const Outcome trained = run(step, Memory::kPlanes, serial_executor())[0];
  const Outcome::Known& known = trained.ranks[0];
  EXPECT_NE(known.mean[0], 0.0);
  EXPECT_LT(std::fabs(known.mean[0]), 0x1p-126);
  EXPECT_EQ(known.var[1], 0.0);  // constant: y is the bias, a subnormal one
  EXPECT_EQ(trained.y[7], step.bias.values[1]);
  EXPECT_NE(step.bias.values[1], 0.0);
}

}  // namespace
}  // namespace syncbn::testing

#endif
