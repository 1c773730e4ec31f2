// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "checks.hpp"
#include "layer.hpp"

namespace syncbn {
namespace {

void check_input(const BatchNorm::Options& options, const TensorView& x, const MaskView& mask) {
  check_samples("x", x);
  if (x.sizes[1] != options.channels) {
    throw InvalidArgument("x: got " + std::to_string(x.sizes[1]) +
                          " channels, expected those of the layer, " +
                          std::to_string(options.channels));
  }
  check_mask(mask, x);
}

void check_entries(const char* name, const MutableTensorView& tensor, const TensorView& x) {
  check_per_channel(name, tensor, x.sizes[1], x.device);
  check_output(name, tensor);
}

void check_whole_output(const char* name, const MutableTensorView& tensor, const TensorView& x) {
  check_like(name, tensor, x);
  check_output(name, tensor);
}

/// What is normalized, and with which parameters.
template <class Arguments>
void check_parameters(const Arguments& a) {
  check_per_channel("weight", a.weight, a.x.sizes[1], a.x.device);
  check_per_channel("bias", a.bias, a.x.sizes[1], a.x.device);
  if (!a.residual.absent()) {
    check_like("residual", a.residual, a.x);
  }
}

template <class Arguments>
void check_gradients(const Arguments& a) {
  check_like("dy", a.dy, a.x);
  check_whole_output("dx", a.dx, a.x);
  if (!a.dresidual.absent()) {
    check_whole_output("dresidual", a.dresidual, a.x);
  }
  check_entries("dweight", a.dweight, a.x);
  check_entries("dbias", a.dbias, a.x);
}

/// Both, or where `may_be_absent` neither.
template <class Arguments>
void check_running(const Arguments& a, bool may_be_absent) {
  if (a.running_mean.absent() != a.running_var.absent()) {
    throw InvalidArgument("running_mean, running_var: got only one of them, expected both" +
                          std::string(may_be_absent ? " or neither" : ""));
  }
  if (a.running_mean.absent() && !may_be_absent) {
    throw InvalidArgument("running_mean, running_var: got none, expected both");
  }
  check_per_channel("running_mean", a.running_mean, a.x.sizes[1], a.x.device);
  check_per_channel("running_var", a.running_var, a.x.sizes[1], a.x.device);
}

/// The backward's x holds what the forward's did, as far as can be told without reading it.
void check_same_x(const SavedState& saved, const TensorView& x) {
  if (x.sizes != saved.x.sizes) {
    throw InvalidArgument("x: got shape " + shape_text(x.sizes) +
                          ", expected that of the forward, " + shape_text(saved.x.sizes));
  }
  if (std::find(x.sizes.begin(), x.sizes.end(), 0) != x.sizes.end()) {
    return;  // without elements it is nowhere
  }
  if (x.dtype != saved.x.dtype) {
    throw InvalidArgument(std::string("x: got ") + name(x.dtype) +
                          ", expected the dtype of the forward, " + name(saved.x.dtype));
  }
  if (x.data != saved.x.data && x.data == saved.y) {
    throw InvalidArgument("x: got the forward's y, expected its x");
  }
  if (x.data != saved.x.data) {
    throw InvalidArgument("x: got other memory than the forward did, expected the same x");
  }
  for (std::size_t axis = 0; axis < x.sizes.size(); ++axis) {
    if (x.sizes[axis] > 1 && x.strides[axis] != saved.x.strides[axis]) {
      throw InvalidArgument("x: got other strides than in the forward, expected the same x");
    }
  }
  if (saved.overwritten_by != nullptr) {
    throw InvalidArgument(std::string("x: got the memory that ") + saved.overwritten_by +
                          ", expected what the forward normalized");
  }
}

template <class View>
void check_as_in_forward(const char* name, const View& view, bool in_forward) {
  if (in_forward && view.absent()) {
    throw InvalidArgument(std::string(name) + ": got none, expected that of the forward");
  }
  if (!in_forward && !view.absent()) {
    throw InvalidArgument(std::string(name) + ": got one, expected none, as in the forward");
  }
}

}  // namespace

void check_options(const BatchNorm::Options& options) {
  check_eps(options.eps);
  check_activation(options.activation);
  if (options.statistics > Statistics::kWelford) {
    throw InvalidArgument("statistics: got number " +
                          std::to_string(static_cast<int>(options.statistics)) +
                          ", expected reproducible or welford");
  }
  if (options.momentum.has_value()) {
    check_momentum(*options.momentum);
  }
}

void check_forward(const BatchNorm::Options& options, const BatchNorm::Forward& f) {
  check_input(options, f.x, f.mask);
  check_whole_output("y", f.y, f.x);
  check_parameters(f);
  check_entries("running_mean", f.running_mean, f.x);
  check_entries("running_var", f.running_var, f.x);
  check_options(options);
  if (!options.momentum.has_value() && f.num_batches_tracked == nullptr &&
      !(f.running_mean.absent() && f.running_var.absent())) {
    throw InvalidArgument(
        "num_batches_tracked: got null, expected a counter (momentum is empty, which asks for "
        "cumulative averaging)");
  }
}

void check_layer_forward(const BatchNorm::Options& options, const BatchNorm::Forward& f) {
  check_forward(options, f);
  check_running(f, true);
}

void check_backward(const BatchNorm::Backward& b) {
  check_samples("x", b.x);
  check_mask(b.mask, b.x);
  check_gradients(b);
  if (b.affine > AffineGradients::kGlobal) {
    throw InvalidArgument("affine: got number " + std::to_string(static_cast<int>(b.affine)) +
                          ", expected share or global");
  }
  check_per_channel("weight", b.weight, b.x.sizes[1], b.x.device);
  check_per_channel("bias", b.bias, b.x.sizes[1], b.x.device);
}

void check_saved(const SavedState& saved, const LayerState& layer, const BatchNorm::Backward& b) {
  if (!saved.filled) {
    throw InvalidArgument("saved: got one without content, expected one that a forward filled");
  }
  if (saved.layer != layer.number) {
    throw InvalidArgument(
        "saved: got that of another layer, expected one that this layer's forward filled");
  }
  if (saved.device != b.x.device || saved.channels != b.x.sizes[1]) {
    throw InvalidArgument("saved: got " + std::to_string(saved.channels) +
                          " channels, expected those of x, " + std::to_string(b.x.sizes[1]) +
                          ", on its device");
  }
  check_same_x(saved, b.x);
  check_as_in_forward("mask", b.mask, saved.mask);
  check_as_in_forward("weight", b.weight, saved.weight);
  check_as_in_forward("bias", b.bias, saved.bias);
  if (!b.dresidual.absent() && !saved.residual) {
    throw InvalidArgument("dresidual: got one, expected none, as the forward had no residual");
  }
}

void check_evaluate(const BatchNorm::Options& options, const BatchNorm::Evaluate& e) {
  check_input(options, e.x, e.mask);
  check_whole_output("y", e.y, e.x);
  check_parameters(e);
  check_running(e, true);
}

void check_evaluate_backward(const BatchNorm::Options& options,
                             const BatchNorm::EvaluateBackward& e) {
  check_input(options, e.x, e.mask);
  check_gradients(e);
  check_parameters(e);
  check_running(e, false);
  const bool activated = options.activation.kind != ActivationKind::kNone;
  if (activated && !e.residual.absent() && e.dx.data == e.dy.data && e.dx.data != nullptr) {
    throw InvalidArgument("dx: got dy, expected other memory (with a residual and an activation)");
  }
}

}  // namespace syncbn
