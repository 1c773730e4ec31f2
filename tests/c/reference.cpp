// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include "syncbn/batch_norm.hpp"

namespace {

using namespace syncbn;

/// Views of a step.
struct Views {
  explicit Views(const layer_step* step) : s(*step), mask{s.mask, {s.samples, s.plane}} {}
  const layer_step& s;
  const MaskView mask;
  TensorView input(const float* data) const {
    return {data, DType::kFloat32, {s.samples, s.channels, s.plane}};
  }
  MutableTensorView output(float* data) const {
    return {data, DType::kFloat32, {s.samples, s.channels, s.plane}};
  }
  TensorView entries(const float* data) const { return {data, DType::kFloat32, {s.channels}}; }
  MutableTensorView written(float* data) const { return {data, DType::kFloat32, {s.channels}}; }
  BatchNorm layer() const {
    return BatchNorm({.channels = s.channels,
                      .eps = 1e-3,
                      .momentum = 0.3,
                      .activation = {ActivationKind::kLeakyRelu, 0.2}});
  }
};

}  // namespace

void reference_step(const layer_step* step) {
  const Views v(step);
  BatchNorm layer = v.layer();
  Saved saved;
  layer.forward({.x = v.input(step->x),
                 .mask = v.mask,
                 .weight = v.entries(step->weight),
                 .bias = v.entries(step->bias),
                 .y = v.output(step->y),
                 .running_mean = v.written(step->running_mean),
                 .running_var = v.written(step->running_var)},
                saved);
  layer.backward({.dy = v.input(step->dy),
                  .x = v.input(step->x),
                  .mask = v.mask,
                  .weight = v.entries(step->weight),
                  .bias = v.entries(step->bias),
                  .dx = v.output(step->dx),
                  .dweight = v.written(step->dweight),
                  .dbias = v.written(step->dbias),
                  .affine = AffineGradients::kGlobal},
                 saved);
  layer.evaluate({.x = v.input(step->x),
                  .mask = v.mask,
                  .weight = v.entries(step->weight),
                  .bias = v.entries(step->bias),
                  .running_mean = v.entries(step->running_mean),
                  .running_var = v.entries(step->running_var),
                  .y = v.output(step->evaluated)});
}

void reference_evaluate_backward(const layer_step* step) {
  const Views v(step);
  v.layer().evaluate_backward({.dy = v.input(step->dy),
                               .x = v.input(step->x),
                               .mask = v.mask,
                               .weight = v.entries(step->weight),
                               .bias = v.entries(step->bias),
                               .running_mean = v.entries(step->running_mean),
                               .running_var = v.entries(step->running_var),
                               .dx = v.output(step->dx),
                               .dweight = v.written(step->dweight),
                               .dbias = v.written(step->dbias)});
}
