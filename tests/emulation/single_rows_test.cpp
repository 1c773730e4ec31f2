// SPDX-License-Identifier: Apache-2.0
#include "on_cuda.hpp"
#include "single_rows_cases.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/executor.hpp"

// Sums of 2-D input by kernels, at the edges of where a thread adds its rows in floating point: the
// words of the CPU's reference, for which torch.nn.SyncBatchNorm has no counterpart.
namespace syncbn {
namespace {

void expect_same_words(DType dtype, std::int64_t samples, std::int64_t channels,
                       const Doubles& x_values, const Doubles& dy_values,
                       const std::vector<std::uint8_t>& counts) {
  const Tensor x(dtype, {samples, channels}, x_values);
  const Tensor dy(dtype, {samples, channels}, dy_values);
  const MaskView mask = counts.empty() ? MaskView{} : MaskView{counts.data(), {samples}};
  const Doubles zeros(size(channels));
  Words moments(size(message_words(dtype, channels)), -1);
  Words gradients(moments);
  {
    const testing::LevelScope scope("reference");
    local_moments(x.view(), mask, moments.data(),
                  fingerprint(1, 0, Direction::kForward, channels, 0.0), serial_executor());
    local_gradients({dy.view(), x.view(), mask, zeros.data(), zeros.data()}, gradients.data(), 0,
                    serial_executor());
  }
  Words workspace(size(cuda::workspace_words(dtype, channels)), 0);
  Words of_cuda(moments.size(), -1);
  cuda::local_moments(on_cuda(x.view()), on_cuda(mask), {.layer = 1}, of_cuda.data(),
                      workspace.data(), {});
  EXPECT_EQ(of_cuda, moments) << name(dtype) << " (" << samples << ", " << channels << ")";
  cuda::local_gradients(
      {on_cuda(dy.view()), on_cuda(x.view()), on_cuda(mask), zeros.data(), zeros.data()}, nullptr,
      of_cuda.data(), workspace.data(), {});
  EXPECT_EQ(of_cuda, gradients) << name(dtype) << " (" << samples << ", " << channels << ")";
}

class CudaSingleRows : public ::testing::Test {
 public:
  CudaSingleRows() { emulation::settings() = {.multiprocessors = 1}; }
  ~CudaSingleRows() override { emulation::settings() = {}; }
};

TEST_F(CudaSingleRows, ExponentsAroundTheWindowExact) {
  testing::rows_of_many_exponents(&expect_same_words);
}

TEST_F(CudaSingleRows, ZerosAndSpecialValuesExact) {
  testing::rows_of_special_values(&expect_same_words);
}

TEST_F(CudaSingleRows, FullAccumulatorsExact) {
  testing::rows_that_fill_accumulators(4500, 4, &expect_same_words);
}

/// 144 rows of each of 8 threads in 8 jobs, 4 at a time. The first four set the bound. The others
/// are just below it, and of their squares half a unit of the upper accumulator is left each time,
/// so that both accumulators are full when the rows with the last bits come that they hold.
TEST_F(CudaSingleRows, LastBitsInFullAccumulatorsExact) {
  constexpr std::int64_t kRowsOfJob = 1152;
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double sign : {1.0, -1.0}) {
    for (const auto& [least_x, least_dy] : {std::pair{-19, -19}, {-20, -19}, {-21, -19}}) {
      Doubles x;
      Doubles dy;
      for (std::int64_t n = 0; n < 8 * kRowsOfJob; ++n) {
        const std::int64_t turn = n % kRowsOfJob / 32;
        const bool least = turn == 15 || turn == 30;
        const double large = sign * 0x1.fffffcp2;
        x.push_back(turn == 0 ? 1.0 : least ? std::ldexp(sign * 0x1.000002p0, least_x) : large);
        dy.push_back(turn == 0 ? 1.0 : least ? std::ldexp(sign * 0x1.000002p0, least_dy) : large);
        for (auto* v : {&x, &dy}) {
          v->push_back(n / 8 % 2 == 0 ? infinity : -infinity);
        }
      }
      expect_same_words(DType::kFloat32, 8 * kRowsOfJob, 2, x, dy, {});
    }
  }
}

}  // namespace
}  // namespace syncbn
