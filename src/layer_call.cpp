#include "layer_call.hpp"

#include <string>

#include "checks.hpp"

namespace syncbn {
namespace {

void check_affine(const MutableTensorView& dweight, const MutableTensorView& dbias,
                  const TensorView& x) {
  check_per_channel("dweight", dweight, x.sizes[1], x.device);
  check_per_channel("dbias", dbias, x.sizes[1], x.device);
  check_output("dweight", dweight);
  check_output("dbias", dbias);
}

}  // namespace

void check_forward(const TensorView& x, const MaskView& mask, const TensorView& weight,
                   const TensorView& bias, const TensorView& residual, const MutableTensorView& y,
                   const MutableTensorView& running_mean, const MutableTensorView& running_var,
                   const std::int64_t* num_batches_tracked, const BatchNormOptions& options,
                   int ranks) {
  check_ranks(ranks);
  check_samples("x", x);
  check_mask(mask, x);
  check_like("y", y, x);
  check_output("y", y);
  const std::int64_t channels = x.sizes[1];
  check_per_channel("weight", weight, channels, x.device);
  check_per_channel("bias", bias, channels, x.device);
  check_per_channel("running.mean", running_mean, channels, x.device);
  check_per_channel("running.var", running_var, channels, x.device);
  check_output("running.mean", running_mean);
  check_output("running.var", running_var);
  if (!residual.absent()) {
    check_like("residual", residual, x);
  }
  check_eps(options.eps);
  check_activation(options.activation);
  check_layer("options.layer", options.layer, ranks);
  if (options.statistics > Statistics::kWelford) {
    throw InvalidArgument("statistics: got number " +
                          std::to_string(static_cast<int>(options.statistics)) +
                          ", expected reproducible or welford");
  }
  if (options.momentum.has_value()) {
    check_momentum(*options.momentum);
  } else if (num_batches_tracked == nullptr && !(running_mean.absent() && running_var.absent())) {
    throw InvalidArgument(
        "running.num_batches_tracked: got null, expected a counter (momentum is empty, which asks "
        "for cumulative averaging)");
  }
}

void check_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                    const TensorView& weight, const MutableTensorView& dx,
                    const MutableTensorView& dweight, const MutableTensorView& dbias,
                    const MutableTensorView& dresidual, AffineGradients which, int ranks) {
  check_ranks(ranks);
  check_samples("x", x);
  check_mask(mask, x);
  check_like("dy", dy, x);
  check_like("dx", dx, x);
  check_output("dx", dx);
  if (!dresidual.absent()) {
    check_like("dresidual", dresidual, x);
    check_output("dresidual", dresidual);
  }
  if (which > AffineGradients::kGlobal) {
    throw InvalidArgument("which: got number " + std::to_string(static_cast<int>(which)) +
                          ", expected share or global");
  }
  check_per_channel("weight", weight, x.sizes[1], x.device);
  check_affine(dweight, dbias, x);
}

void check_evaluate_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                             const TensorView& residual, const MutableTensorView& dx,
                             const MutableTensorView& dweight, const MutableTensorView& dbias,
                             const MutableTensorView& dresidual, const BatchNormOptions& options) {
  check_eps(options.eps);
  check_samples("x", x);
  check_mask(mask, x);
  check_like("dy", dy, x);
  check_like("dx", dx, x);
  check_output("dx", dx);
  if (!dresidual.absent()) {
    check_like("dresidual", dresidual, x);
    check_output("dresidual", dresidual);
  }
  check_activation(options.activation);
  check_affine(dweight, dbias, x);
  const bool activated = options.activation.kind != ActivationKind::kNone;
  if (activated && !residual.absent() && dx.data == dy.data && dx.data != nullptr) {
    throw InvalidArgument("dx: got dy, expected other memory (with a residual and an activation)");
  }
}

bool check_running(const TensorView& running_mean, const TensorView& running_var,
                   bool may_be_absent) {
  if (running_mean.absent() != running_var.absent()) {
    throw InvalidArgument("running_mean, running_var: got only one of them, expected both" +
                          std::string(may_be_absent ? " or neither" : ""));
  }
  if (running_mean.absent() && !may_be_absent) {
    throw InvalidArgument("running_mean, running_var: got none, expected both");
  }
  return !running_mean.absent();
}

}  // namespace syncbn
