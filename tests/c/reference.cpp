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
  BatchNormOptions options;
  options.eps = 1e-3;
  options.activation = {ActivationKind::kLeakyRelu, 0.2};
  batch_norm_evaluate_backward(dy, x, mask, entries(p->weight), entries(p->bias), {},
                               entries(p->running_mean), entries(p->running_var),
                               {p->dx, DType::kFloat32, shape}, written(p->dweight),
                               written(p->dbias), {}, options, serial_executor());

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
  normalize(x, {}, p->mean, p->rstd, entries(p->weight), entries(p->bias), {}, recovered, nullptr,
            options.activation, serial_executor());
  recover_input(recovered, p->mean, p->rstd, entries(p->weight), entries(p->bias), recovered,
                p->activation_mask, 0.2, serial_executor());
}
