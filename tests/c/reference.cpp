// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm.hpp"

extern "C" {
#include "step.h"
}

namespace {

using namespace syncbn;

/// Views of a batch.
struct Views {
  explicit Views(const step_memory* m) : mask{m->mask, {SAMPLES, PLANE}} {}
  const MaskView mask;
  TensorView input(const float* data) const {
    return {data, DType::kFloat32, {SAMPLES, CHANNELS, PLANE}};
  }
  MutableTensorView output(float* data) const {
    return {data, DType::kFloat32, {SAMPLES, CHANNELS, PLANE}};
  }
  TensorView entries(const float* data) const { return {data, DType::kFloat32, {CHANNELS}}; }
  MutableTensorView written(float* data) const { return {data, DType::kFloat32, {CHANNELS}}; }
  BatchNorm layer() const {
    return BatchNorm({.channels = CHANNELS,
                      .eps = 1e-3,
                      .momentum = 0.3,
                      .activation = {ActivationKind::kLeakyRelu, 0.2}});
  }
};

}  // namespace

void reference_step(step_memory* m, int residual) {
  const Views v(m);
  const TensorView added = residual != 0 ? v.input(m->residual) : TensorView();
  BatchNorm layer = v.layer();
  Saved saved;
  layer.forward({.x = v.input(m->x),
                 .mask = v.mask,
                 .weight = v.entries(m->weight),
                 .bias = v.entries(m->bias),
                 .residual = added,
                 .y = v.output(m->y),
                 .running_mean = v.written(m->running_mean),
                 .running_var = v.written(m->running_var)},
                saved);
  layer.backward({.dy = v.input(m->dy),
                  .x = v.input(m->x),
                  .mask = v.mask,
                  .weight = v.entries(m->weight),
                  .bias = v.entries(m->bias),
                  .dx = v.output(m->dx),
                  .dweight = v.written(m->dweight),
                  .dbias = v.written(m->dbias),
                  .dresidual = residual != 0 ? v.output(m->dresidual) : MutableTensorView(),
                  .affine = AffineGradients::kGlobal},
                 saved);
  layer.evaluate({.x = v.input(m->x),
                  .mask = v.mask,
                  .weight = v.entries(m->weight),
                  .bias = v.entries(m->bias),
                  .residual = added,
                  .running_mean = v.entries(m->running_mean),
                  .running_var = v.entries(m->running_var),
                  .y = v.output(m->evaluated)});
}

void reference_evaluate_backward(step_memory* m) {
  const Views v(m);
  v.layer().evaluate_backward({.dy = v.input(m->dy),
                               .x = v.input(m->x),
                               .mask = v.mask,
                               .weight = v.entries(m->weight),
                               .bias = v.entries(m->bias),
                               .running_mean = v.entries(m->running_mean),
                               .running_var = v.entries(m->running_var),
                               .dx = v.output(m->dx),
                               .dweight = v.written(m->dweight),
                               .dbias = v.written(m->dbias)});
}
