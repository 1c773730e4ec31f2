// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

// Only x86 lets a program flush subnormals through a register that its headers name.
#if defined(__SSE__)

#include <xmmintrin.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpu/float_environment.hpp"
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

/// All that the passes take, with subnormals everywhere.
struct Data {
  DType dtype;
  std::vector<std::int64_t> sizes;
  Memory memory;
  Tensor x, dy, weight, bias, running_mean, running_var;

  Data(DType type, std::vector<std::int64_t> shape, Memory where)
      : dtype(type), sizes(std::move(shape)), memory(where) {
    Random random(90);
    x = dy = Tensor(dtype, sizes, memory);
    const std::int64_t channels = sizes[1];
    const std::int64_t plane = x.numel() / sizes[0] / channels;
    // Channel 0 is all subnormal, channel 1 constant, others mixed.
    const double tiny = dtype == DType::kFloat16   ? 0x1p-15
                        : dtype == DType::kFloat64 ? 0x1p-1030
                                                   : 0x1p-130;
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const std::int64_t c = i / plane % channels;
      const bool small = c == 0 || random.one_in(3);
      x.set(i, c == 1 ? 3.0 : small ? tiny * random.signed_unit() : random.signed_unit());
      dy.set(i, small ? tiny * random.signed_unit() : random.signed_unit());
    }
    weight = bias = running_mean = Tensor(DType::kFloat32, {channels});
    running_var = Tensor(DType::kFloat64, {channels});
    for (std::int64_t c = 0; c < channels; ++c) {
      weight.set(c, c % 2 == 0 ? 0x1p-130 * random.signed_unit() : random.signed_unit());
      bias.set(c, c < 2 || c % 3 == 0 ? 0x1p-130 * random.signed_unit() : random.signed_unit());
      running_mean.set(c, c % 2 == 0 ? 0x1p-130 * random.signed_unit() : 1.0);
      running_var.set(c, c % 2 == 0 ? 0x1p-130 : 0x1p-100);
    }
  }
};

/// Every result of every function, as binary64.
std::vector<std::vector<double>> run(const Data& data, Executor& executor, double eps) {
  const std::int64_t channels = data.sizes[1];
  Tensor y(data.dtype, data.sizes, data.memory);
  Tensor dx = y;
  Tensor y_evaluated = y;
  Tensor dx_evaluated = y;
  Tensor running_mean = data.running_mean;
  Tensor running_var = data.running_var;
  std::vector<Tensor> parameters(4, Tensor(DType::kFloat64, {channels}));
  std::int64_t tracked = 4;  // the factor 1 / 5 is not what rounding down makes of it
  BatchNorm layer({.channels = channels, .eps = eps, .momentum = std::nullopt});
  Saved saved;
  const TensorView x = data.x.view(), dy = data.dy.view(), weight = data.weight.view(),
                   bias = data.bias.view();
  layer.forward({.x = x,
                 .weight = weight,
                 .bias = bias,
                 .y = y.view(),
                 .running_mean = running_mean.view(),
                 .running_var = running_var.view(),
                 .num_batches_tracked = &tracked},
                saved, executor);
  layer.backward({.dy = dy,
                  .x = x,
                  .weight = weight,
                  .bias = bias,
                  .dx = dx.view(),
                  .dweight = parameters[0].view(),
                  .dbias = parameters[1].view(),
                  .affine = AffineGradients::kGlobal},
                 saved, executor);
  layer.evaluate({.x = x,
                  .weight = weight,
                  .bias = bias,
                  .running_mean = data.running_mean.view(),
                  .running_var = data.running_var.view(),
                  .y = y_evaluated.view()},
                 executor);
  layer.evaluate_backward({.dy = dy,
                           .x = x,
                           .weight = weight,
                           .running_mean = data.running_mean.view(),
                           .running_var = data.running_var.view(),
                           .dx = dx_evaluated.view(),
                           .dweight = parameters[2].view(),
                           .dbias = parameters[3].view()},
                          executor);
  // Reading back must not flush either.
  const cpu::FloatEnvironment environment;
  return {values(saved.mean()),
          values(saved.var()),
          values(saved.rstd()),
          y.values(),
          dx.values(),
          running_mean.values(),
          running_var.values(),
          parameters[0].values(),
          parameters[1].values(),
          y_evaluated.values(),
          dx_evaluated.values(),
          parameters[2].values(),
          parameters[3].values()};
}

constexpr const char* kResults[] = {
    "mean",           "var",     "rstd",  "y",           "dx",           "running mean",
    "running var",    "dweight", "dbias", "y evaluated", "dx evaluated", "dweight evaluated",
    "dbias evaluated"};

TEST(FloatEnvironment, FlushingAndRoundingModesChangeNothingExact) {
  for (const DType dtype : kDtypes) {
    for (const auto& sizes :
         {std::vector<std::int64_t>{5, 19, 7}, std::vector<std::int64_t>{40, 20, 60}}) {
      for (const Memory memory : {Memory::kPlanes, Memory::kRows, Memory::kOdd}) {
        const Data data(dtype, sizes, memory);
        for (const std::string& level : available_levels()) {
          const LevelScope level_scope(level);
          ThreadPool pool(2);
          // eps = 2^-200 keeps float64's tiny variances from being lost in it.
          const auto expected = run(data, pool, 0x1p-200);
          for (const unsigned int mode : kModes) {
            SCOPED_TRACE(level + ", " + name(dtype) + ", mode " + std::to_string(mode));
            const ModeScope scope(mode);
            on_each_thread(pool, [&] { _mm_setcsr(mode); });
            const auto actual = run(data, pool, 0x1p-200);
            EXPECT_EQ(_mm_getcsr() & kControl, mode & kControl);
            on_each_thread(pool, [&] { EXPECT_EQ(_mm_getcsr() & kControl, mode & kControl); });
            on_each_thread(pool, [] { _mm_setcsr(kDefault); });
            const cpu::FloatEnvironment environment;  // to compare and print
            for (std::size_t i = 0; i < expected.size(); ++i) {
              EXPECT_TRUE(same_bits(actual[i], expected[i])) << kResults[i];
            }
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
  const Data data(DType::kFloat32, {5, 19, 7}, Memory::kPlanes);
  const auto results = run(data, serial_executor(), 0x1p-200);
  EXPECT_NE(results[0][0], 0.0);
  EXPECT_LT(std::fabs(results[0][0]), 0x1p-126);
  EXPECT_EQ(results[1][1], 0.0);  // constant: y is the bias, a subnormal one
  EXPECT_EQ(results[3][7], data.bias.get(1));
  EXPECT_NE(data.bias.get(1), 0.0);
}

TEST(FloatEnvironment, IsRestoredAfterAnException) {
  const ModeScope scope(kDefault | kFlush);
  const Tensor x(DType::kFloat32, {2, 2}, std::vector<double>(4, 1.0));
  Tensor y = x;
  Saved saved;
  BatchNorm layer({.channels = 3});
  EXPECT_THROW(layer.forward({.x = x.view(), .y = y.view()}, saved), InvalidArgument);
  EXPECT_EQ(_mm_getcsr() & kControl, (kDefault | kFlush) & kControl);
}

}  // namespace
}  // namespace syncbn::testing

#endif
