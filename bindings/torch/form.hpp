// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "bindings/torch/tensors.hpp"
#include "syncbn/options.hpp"

// What is constant over the calls of a layer: one argument of the operators in the place of seven.
namespace syncbn::torch_layer {

/// It lies in a tensor of bytes on the CPU, which Python keeps, and which nobody else reads.
struct Form {
  std::uint64_t layer = 0;  ///< the layer's number, as layer_identity() takes it
  double eps = 0;
  double momentum = 0;
  double negative_slope = 0;
  std::int32_t activation = 0;
  std::int32_t statistics = 0;
  // 0 or 1; no bool, as the bytes may be anybody's.
  std::int32_t cumulative = 0;  ///< without a momentum
  std::int32_t in_place = 0;    ///< y lies over x

  std::optional<double> factor() const {
    return cumulative != 0 ? std::nullopt : std::optional(momentum);
  }
  Activation act() const { return {static_cast<ActivationKind>(activation), negative_slope}; }
  Statistics mode() const { return static_cast<Statistics>(statistics); }
};
static_assert(std::is_trivially_copyable_v<Form>);

inline Tensor new_form(std::int64_t layer, double eps, std::optional<double> momentum,
                       std::int64_t activation, double negative_slope, std::int64_t statistics,
                       bool in_place) {
  if (statistics != 0 && statistics != 1) {
    throw InvalidArgument("statistics: got number " + std::to_string(statistics) +
                          ", expected 0 (reproducible) or 1 (welford)");
  }
  if (activation < 0 || activation >= kActivationCount) {
    throw InvalidArgument("activation: got number " + std::to_string(activation) +
                          ", expected less than " + std::to_string(kActivationCount));
  }
  Form form;
  std::memset(static_cast<void*>(&form), 0,
              sizeof form);  // also what pads it: equal forms are equal
  form.layer = static_cast<std::uint64_t>(layer);
  form.eps = eps;
  form.momentum = momentum.value_or(0);
  form.negative_slope = negative_slope;
  form.activation = static_cast<std::int32_t>(activation);
  form.statistics = static_cast<std::int32_t>(statistics);
  form.cumulative = momentum.has_value() ? 0 : 1;
  form.in_place = in_place ? 1 : 0;
  const std::int64_t size = sizeof form;
  const std::int64_t stride = 1;
  AtenTensorHandle made = nullptr;
  if (aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(),
                               aoti_torch_device_type_cpu(), 0, &made) != 0) {
    throw NoMemory(sizeof form);
  }
  Tensor out(made);
  std::memcpy(out.mutable_data_ptr(), &form, sizeof form);
  return out;
}

inline Form form_of(const Tensor& tensor) {
  Form form;
  bool known = tensor.is_cpu() && tensor.scalar_type() == ScalarType::Byte &&
               tensor.is_contiguous() && tensor.numel() == static_cast<std::int64_t>(sizeof(Form));
  if (known) {
    check_storage("form", tensor);
    std::memcpy(&form, tensor.const_data_ptr(), sizeof form);
    const auto below = [](int count, std::int32_t number) { return number >= 0 && number < count; };
    known = below(kActivationCount, form.activation) && below(2, form.statistics) &&
            below(2, form.cumulative) && below(2, form.in_place);
  }
  if (!known) {
    throw InvalidArgument("form: expected what the operator form returned");
  }
  return form;
}

}  // namespace syncbn::torch_layer
