#pragma once

#include <cstdint>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/batch_norm_op.hpp"

namespace syncbn::testing {

/// What one layer's step reads and writes, for tests of steps that fail.
struct LayerTensors {
  static constexpr std::int64_t kC = 5;
  static std::vector<double> values(int seed) {
    Random random(static_cast<std::uint64_t>(seed));
    std::vector<double> all(4 * kC * 6);
    for (double& value : all) {
      value = round_to(DType::kFloat32, random.signed_unit());
    }
    return all;
  }

  Tensor x{DType::kFloat32, {4, kC, 6}, values(1)}, dy{DType::kFloat32, {4, kC, 6}, values(2)};
  Tensor y = x, dx = x;
  Tensor weight{DType::kFloat32, {kC}, {1, 2, 3, 4, 5}}, mean = weight, var = weight;
  Tensor dweight = weight, dbias = weight;
  std::int64_t tracked = 3;
  BatchNormOptions options{.layer = 1};
  BatchNormOpAttributes attributes{.layer = 1};
  BatchStatistics statistics;
};

}  // namespace syncbn::testing
