// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "single_rows_cases.hpp"
#include "step/passes.hpp"
#include "support.hpp"

// Sums of 2-D input, whose rows are added in floating point wherever that is exact: at the edges of
// where it is, every vector code gives the reference's words.
namespace syncbn {
namespace {

using testing::available_levels;
using testing::LevelScope;
using testing::Tensor;

using Words = std::vector<std::int64_t>;

struct Sums {
  Words moments;
  Words gradients;
  friend bool operator==(const Sums&, const Sums&) = default;
};

Sums sums_of(const Tensor& x, const Tensor& dy, const MaskView& mask, std::int64_t channels,
             DType dtype) {
  Sums out;
  out.moments.assign(static_cast<std::size_t>(message_words(dtype, channels)), -1);
  out.gradients = out.moments;
  const std::vector<double> zeros(static_cast<std::size_t>(channels));
  local_moments(x.view(), mask, out.moments.data(), 1, serial_executor());
  local_gradients({dy.view(), x.view(), mask, zeros.data(), zeros.data()}, out.gradients.data(), 1,
                  serial_executor());
  return out;
}

/// Compares all levels with the reference.
void expect_same_words(DType dtype, std::int64_t samples, std::int64_t channels,
                       const std::vector<double>& x_values, const std::vector<double>& dy_values,
                       const std::vector<std::uint8_t>& counts) {
  const Tensor x(dtype, {samples, channels}, x_values);
  const Tensor dy(dtype, {samples, channels}, dy_values);
  const MaskView mask = counts.empty() ? MaskView{} : MaskView{counts.data(), {samples}};
  Sums expected;
  {
    const LevelScope scope("reference");
    expected = sums_of(x, dy, mask, channels, dtype);
  }
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    ASSERT_EQ(sums_of(x, dy, mask, channels, dtype), expected)
        << level << ", " << name(dtype) << " (" << samples << ", " << channels << ")";
  }
}

TEST(SingleRows, ExponentsAroundTheWindowExact) {
  testing::rows_of_many_exponents(&expect_same_words);
}

TEST(SingleRows, ZerosAndSpecialValuesExact) {
  testing::rows_of_special_values(&expect_same_words);
}

TEST(SingleRows, FullAccumulatorsExact) {
  testing::rows_that_fill_accumulators(128, 17, &expect_same_words);
}

}  // namespace
}  // namespace syncbn
