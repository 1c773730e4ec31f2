// SPDX-License-Identifier: Apache-2.0
#include "bindings/torch/step_ops.hpp"

#include "bindings/libtorch/syncbn/torch_executor.hpp"
#include "bindings/torch/resolved.hpp"

namespace syncbn::torch_layer {
namespace {

/// Tensors of the CPU, and PyTorch's threads.
class OnHost {
 public:
  static constexpr Device kDevice = Device::kCpu;

  template <class... Tensors>
  explicit OnHost(const Tensors&...) {}

  Execution execution() { return executor_; }

  struct NoWorkspace {
    static std::int64_t* words() { return nullptr; }
  };
  static NoWorkspace workspace(const Tensor&, DType) { return {}; }

 private:
  detail::TorchExecutor executor_;
};

/// Those that write to arguments, on every device.
void register_written(torch::stable::detail::StableLibrary& m) {
  m.impl("forward_begin", TORCH_BOX(&OnlyResolved<&forward_begin<OnHost>>::call));
  m.impl("forward_finish", TORCH_BOX(&OnlyResolved<&forward_finish<OnHost>>::call));
  m.impl("backward_finish", TORCH_BOX(&OnlyResolved<&backward_finish<OnHost>>::call));
  m.impl("update_running_statistics",
         TORCH_BOX(&OnlyResolved<&update_running_statistics<OnHost>>::call));
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def(
      "form(*, int layer, float eps, float? momentum, int activation, float negative_slope, "
      "int statistics, bool in_place) -> Tensor");
  m.def(
      "forward_begin(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? mask, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "Tensor(d!)? counters, Tensor form, int backward, int way) -> (Tensor? y, Tensor saved, "
      "Tensor? activation_mask, int backward, int number, Tensor? message, Tensor? merged, "
      "int status)");
  m.def(
      "forward_finish(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? mask, "
      "Tensor(a!)? y, Tensor(b!) saved, Tensor(c!)? activation_mask, Tensor(d!)?[] running, "
      "Tensor?[] sum, Tensor form, int ranks) -> ()");
  m.def(
      "backward_begin(Tensor dy, Tensor x, Tensor saved, Tensor? weight, Tensor? bias, "
      "Tensor? activation_mask, Tensor? mask, Tensor form, int wanted, ScalarType? weight_dtype, "
      "ScalarType? bias_dtype, int way) -> (Tensor? dx, Tensor? dweight, Tensor? dbias, Tensor? u, "
      "Tensor? coefficients, Tensor? message, Tensor? merged, int status)");
  m.def(
      "backward_finish(Tensor dy, Tensor x, Tensor saved, Tensor? weight, Tensor? bias, "
      "Tensor? activation_mask, Tensor? mask, Tensor form, bool kept, Tensor(a!)?[] gradients, "
      "Tensor?[] sum, int ranks) -> ()");
  m.def(
      "update_running_statistics(Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, Tensor saved, float? momentum) -> ()");
  m.def(
      "recover_input(Tensor y, Tensor saved, Tensor? weight, Tensor? bias, Tensor form) -> "
      "(Tensor, Tensor)");
  m.def(
      "evaluate(Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, *, float eps) -> "
      "(Tensor y, Tensor saved)");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CompositeExplicitAutograd, m) {
  m.impl("form", TORCH_BOX(&syncbn::torch_layer::new_form));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  syncbn::torch_layer::register_step<syncbn::torch_layer::OnHost>(m);
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Negative, m) { syncbn::torch_layer::register_written(m); }

STABLE_TORCH_LIBRARY_IMPL(syncbn, Conjugate, m) { syncbn::torch_layer::register_written(m); }
