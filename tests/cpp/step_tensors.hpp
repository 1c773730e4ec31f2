// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/batch_norm_op.hpp"

namespace syncbn::testing {

/// One rank's layer, or operator, and what its step reads and writes, for tests of steps that fail.
/// Each call has a layer of its own, whose making may fail too.
struct StepTensors {
  static constexpr std::int64_t kC = 5;
  static std::vector<double> random_values(int seed) {
    Random random(static_cast<std::uint64_t>(seed));
    return unit_values(random, DType::kFloat32, 4 * kC * 6);
  }

  explicit StepTensors(void (*change)(StepTensors&)) { change(*this); }

  void forward(Communicator& group, Executor& executor = serial_executor()) {
    if (as_op) {
      statistics = batch_norm_op({x.view(), mean.view(), var.view(), {}, {}, tracked},
                                 {y.view(), {}, {}, mean.view(), var.view(), &tracked}, attributes,
                                 group, executor);
      return;
    }
    BatchNorm(options, group)
        .forward({.x = x.view(),
                  .weight = weight.view(),
                  .bias = weight.view(),
                  .y = y.view(),
                  .running_mean = mean.view(),
                  .running_var = var.view(),
                  .num_batches_tracked = &tracked},
                 saved, executor);
  }
  void backward(Communicator& group, Executor& executor = serial_executor()) {
    if (as_op) {
      batch_norm_op_backward({dy.view(), x.view(), {}, dx.view(), dweight.view(), dbias.view()},
                             statistics, attributes, group, executor);
      return;
    }
    BatchNorm(options, group)
        .backward({.dy = dy.view(),
                   .x = x.view(),
                   .weight = weight.view(),
                   .bias = weight.view(),
                   .dx = dx.view(),
                   .dweight = dweight.view(),
                   .dbias = dbias.view()},
                  saved, executor);
  }
  /// What outlives a step.
  std::vector<std::vector<double>> state() const {
    return {mean.values(), var.values(), {static_cast<double>(tracked)}};
  }
  std::vector<std::vector<double>> results() const {
    return {y.values(),          dx.values(),         dweight.values(), dbias.values(),
            statistics.mean,     statistics.var,      statistics.rstd,  values(saved.mean()),
            values(saved.var()), values(saved.rstd())};
  }

  Tensor x{DType::kFloat32, {4, kC, 6}, random_values(1)},
      dy{DType::kFloat32, {4, kC, 6}, random_values(2)};
  Tensor y = x, dx = x;
  Tensor weight{DType::kFloat32, {kC}, {1, 2, 3, 4, 5}}, mean = weight, var = weight;
  Tensor dweight = weight, dbias = weight;
  std::int64_t tracked = 3;
  BatchNorm::Options options{.channels = kC, .name = "layer"};
  Saved saved;
  bool as_op = false;
  BatchNormOpAttributes attributes{.layer = 1};
  BatchNormOpStatistics statistics;
};

/// The layers and operators whose steps are tried.
inline constexpr std::pair<const char*, void (*)(StepTensors&)> kStepKinds[] = {
    {"plain", [](StepTensors&) {}},
    {"welford", [](StepTensors& s) { s.options.statistics = Statistics::kWelford; }},
    {"cumulative", [](StepTensors& s) { s.options.momentum.reset(); }},
    {"relu", [](StepTensors& s) { s.options.activation.kind = ActivationKind::kRelu; }},
    {"op", [](StepTensors& s) { s.as_op = true; }},
    {"estimates", [](StepTensors& s) { s.as_op = s.attributes.use_global_est = true; }}};

}  // namespace syncbn::testing
