// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <vector>

#include "syncbn/batch_norm.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/welford.hpp"

void reference_step(const layer_step* step) {
  using namespace syncbn;
  const std::vector<std::int64_t> shape = {step->samples, step->channels, step->plane};
  const auto view = [&](auto* data) {
    return BasicTensorView<std::conditional_t<
        std::is_const_v<std::remove_pointer_t<decltype(data)>>, const void, void>>(
        data, DType::kFloat32, shape);
  };
  const auto parameter = [&](float* data) {
    return MutableTensorView(data, DType::kFloat32, {step->channels});
  };
  const TensorView weight(step->weight, DType::kFloat32, {step->channels});
  const TensorView bias(step->bias, DType::kFloat32, {step->channels});
  const MaskView mask{step->mask, {step->samples, step->plane}};
  BatchNorm layer({.channels = step->channels,
                   .eps = 1e-3,
                   .momentum = 0.3,
                   .activation = {ActivationKind::kLeakyRelu, 0.2}});
  const MutableTensorView running_mean = parameter(step->running_mean);
  const MutableTensorView running_var = parameter(step->running_var);
  Saved saved;
  layer.forward({.x = view(step->x),
                 .mask = mask,
                 .weight = weight,
                 .bias = bias,
                 .y = view(step->y),
                 .running_mean = running_mean,
                 .running_var = running_var},
                saved);
  layer.backward({.dy = view(step->dy),
                  .x = view(step->x),
                  .mask = mask,
                  .weight = weight,
                  .bias = bias,
                  .dx = view(step->dx),
                  .dweight = parameter(step->dweight),
                  .dbias = parameter(step->dbias),
                  .affine = AffineGradients::kGlobal},
                 saved);
  layer.evaluate({.x = view(step->x),
                  .mask = mask,
                  .weight = weight,
                  .bias = bias,
                  .running_mean = running_mean,
                  .running_var = running_var,
                  .y = view(step->evaluated)});
}

void reference_other_passes(const other_passes* p) {
  using namespace syncbn;
  const std::vector<std::int64_t> shape = {p->samples, p->channels, p->plane};
  const TensorView x(p->x, DType::kFloat32, shape);
  const TensorView dy(p->dy, DType::kFloat32, shape);
  const auto entries = [&](const float* data) {
    return TensorView(data, DType::kFloat32, {p->channels});
  };
  const auto written = [&](float* data) {
    return MutableTensorView(data, DType::kFloat32, {p->channels});
  };
  const MaskView mask{p->mask, {p->samples, p->plane}};
  const Activation activation = {ActivationKind::kLeakyRelu, 0.2};
  BatchNorm layer({.channels = p->channels, .eps = 1e-3, .activation = activation});
  layer.evaluate_backward({.dy = dy,
                           .x = x,
                           .mask = mask,
                           .weight = entries(p->weight),
                           .bias = entries(p->bias),
                           .running_mean = entries(p->running_mean),
                           .running_var = entries(p->running_var),
                           .dx = {p->dx, DType::kFloat32, shape},
                           .dweight = written(p->dweight),
                           .dbias = written(p->dbias)});

  const std::int64_t stride = welford_words(DType::kFloat32, p->channels);
  std::vector<std::int64_t> headers(kHeaderWords);
  std::vector<std::int64_t> records;
  for (const bool second : {false, true}) {
    const std::int64_t begin = second ? p->first : 0;
    const std::int64_t samples = (second ? p->samples : p->first) - begin;
    std::vector<std::int64_t> message(static_cast<std::size_t>(kHeaderWords + stride));
    local_welford(
        {p->x + begin * p->channels * p->plane, DType::kFloat32, {samples, p->channels, p->plane}},
        {p->mask + begin * p->plane, {samples, p->plane}}, message.data(), 5, serial_executor());
    for (std::size_t i = 0; i < headers.size(); ++i) {
      headers[i] += message[i];
    }
    records.insert(records.end(), message.begin() + kHeaderWords, message.end());
  }
  merge_welford(read_header(headers.data(), 2), records.data(), p->mean, p->var, p->rstd,
                p->channels, 2, stride, 1e-3);

  evaluation_input_gradient(dy, mask, p->rstd, entries(p->weight),
                            {p->plain_dx, DType::kFloat32, shape}, serial_executor());
  const MutableTensorView recovered(p->recovered, DType::kFloat32, shape);
  normalize({x,
             {},
             p->mean,
             p->rstd,
             entries(p->weight),
             entries(p->bias),
             {},
             recovered,
             nullptr,
             activation},
            serial_executor());
  recover_input({recovered, p->mean, p->rstd, entries(p->weight), entries(p->bias), recovered,
                 p->activation_mask, 0.2},
                serial_executor());
}
