#include "reference.h"

#include "syncbn/batch_norm.hpp"

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
  BatchNormOptions options;
  options.eps = 1e-3;
  options.momentum = 0.3;
  options.activation = {ActivationKind::kLeakyRelu, 0.2};
  const auto self = self_communicator();
  const MutableTensorView running_mean = parameter(step->running_mean);
  const MutableTensorView running_var = parameter(step->running_var);
  const BatchStatistics statistics =
      batch_norm_forward(view(step->x), mask, weight, bias, {}, view(step->y),
                         {running_mean, running_var}, options, *self, serial_executor());
  batch_norm_backward(view(step->dy), view(step->x), mask, weight, bias, statistics, view(step->dx),
                      parameter(step->dweight), parameter(step->dbias), {},
                      AffineGradients::kGlobal, *self, serial_executor());
  batch_norm_evaluate(view(step->x), mask, weight, bias, {}, running_mean, running_var,
                      view(step->evaluated), options, serial_executor());
}
