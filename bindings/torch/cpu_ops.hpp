#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

// Operators on CPU that others are made of.
namespace syncbn::torch_layer {

using torch::stable::Tensor;

Tensor local_moments(const Tensor& x, std::int64_t layer, std::optional<Tensor> call, double eps,
                     std::int64_t frame, std::optional<Tensor> mask, std::int64_t backward);

std::tuple<Tensor, Tensor> local_gradients(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                           const Tensor& rstd, const Tensor& info,
                                           std::optional<Tensor> weight, std::optional<Tensor> bias,
                                           std::optional<Tensor> activation_mask,
                                           std::int64_t activation, double negative_slope,
                                           bool keep, std::int64_t frame,
                                           std::optional<Tensor> mask);

}  // namespace syncbn::torch_layer
