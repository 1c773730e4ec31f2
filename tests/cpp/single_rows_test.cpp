// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "one_rank.hpp"
#include "single_rows_cases.hpp"
#include "support.hpp"

namespace syncbn::testing {
namespace {

/// 2-D input, whose rows are added in floating point wherever that is exact, at the edges of where
/// it is: all levels give the reference's words.
class SingleRows : public OneRankDirections {
 protected:
  auto check() {
    return [this](DType dtype, std::int64_t samples, std::int64_t channels,
                  const std::vector<double>& x, const std::vector<double>& dy,
                  const std::vector<std::uint8_t>& counts) {
      Random random(1);
      OneRank one(random, dtype, {samples, channels}, Memory::kPlanes, 0);
      one.x.fill(x);
      one.dy.fill(dy);
      one.mask = counts;
      one.mask_sizes = counts.empty() ? std::vector<std::int64_t>() : std::vector{samples};
      SCOPED_TRACE(std::string(name(dtype)) + ", " + std::to_string(samples) + " samples, " +
                   std::to_string(channels) + " channels");
      compare(one, false);
    };
  }
};

TEST_F(SingleRows, ExponentsAroundTheWindowExact) { rows_of_many_exponents(check()); }

TEST_F(SingleRows, ZerosAndSpecialValuesExact) { rows_of_special_values(check()); }

TEST_F(SingleRows, FullAccumulatorsExact) { rows_that_fill_accumulators(128, 17, check()); }

}  // namespace
}  // namespace syncbn::testing
