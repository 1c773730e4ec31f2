// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "layer/layer.hpp"
#include "tensors/checks.hpp"

// The checks of a layer's options and of its calls' arguments.
namespace syncbn {
namespace {

void check_input(const BatchNorm::Options& options, const TensorView& x, const MaskView& mask) {
  check_samples("x", x);
  if (x.sizes[1] != options.channels) {
    refuse("x", std::to_string(x.sizes[1]) + " channels",
           "those of the layer, " + std::to_string(options.channels));
  }
  check_mask(mask, x);
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
    refuse("running_mean, running_var", "none", "both");
  }
  check_per_channel("running_mean", a.running_mean, a.x.sizes[1], a.x.device);
  check_per_channel("running_var", a.running_var, a.x.sizes[1], a.x.device);
}

/// The backward's x holds what the forward's did, as far as can be told without reading it.
void check_same_x(const SavedState& saved, const TensorView& x) {
  if (x.sizes != saved.x.sizes) {
    refuse("x", "shape " + shape_text(x.sizes),
           "that of the forward, " + shape_text(saved.x.sizes));
  }
  if (std::find(x.sizes.begin(), x.sizes.end(), 0) != x.sizes.end()) {
    return;  // without elements it is nowhere
  }
  if (x.dtype != saved.x.dtype) {
    refuse("x", name(x.dtype), std::string("the dtype of the forward, ") + name(saved.x.dtype));
  }
  if (x.data != saved.x.data && x.data == saved.y) {
    refuse("x", "the forward's y", "its x");
  }
  if (x.data != saved.x.data) {
    refuse("x", "other memory than the forward did", "the same x");
  }
  for (std::size_t axis = 0; axis < x.sizes.size(); ++axis) {
    if (x.sizes[axis] > 1 && x.strides[axis] != saved.x.strides[axis]) {
      refuse("x", "other strides than in the forward", "the same x");
    }
  }
  if (saved.overwritten_by != nullptr) {
    refuse("x", std::string("the memory that ") + saved.overwritten_by,
           "what the forward normalized");
  }
}

template <class View>
void check_as_in_forward(const char* name, const View& view, bool in_forward) {
  if (in_forward && view.absent()) {
    refuse(name, "none", "that of the forward");
  }
  if (!in_forward && !view.absent()) {
    refuse(name, "one", "none, as in the forward");
  }
}

}  // namespace

void check_options(const BatchNorm::Options& options) {
  check_eps(options.eps);
  check_activation(options.activation);
  check_statistics(options.statistics);
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
  const Region x("x", f.x), residual("residual", f.residual), y("y", f.y);
  const Region weight("weight", f.weight), bias("bias", f.bias);
  const Region mean("running_mean", f.running_mean), var("running_var", f.running_var);
  y.check_apart({&x, &residual}, true);
  y.check_apart({&weight, &bias});
  mean.check_apart({&x, &residual, &y, &weight, &bias});
  var.check_apart({&x, &residual, &y, &weight, &bias, &mean});
  check_options(options);
  check_counter({.mean = f.running_mean,
                 .var = f.running_var,
                 .batches = f.num_batches_tracked,
                 .momentum = options.momentum},
                f.x.device);
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
    refuse("affine", "number " + std::to_string(static_cast<int>(b.affine)), "share or global");
  }
  check_per_channel("weight", b.weight, b.x.sizes[1], b.x.device);
  check_per_channel("bias", b.bias, b.x.sizes[1], b.x.device);
  const Region dy("dy", b.dy), x("x", b.x), weight("weight", b.weight), bias("bias", b.bias);
  const Region dx("dx", b.dx), dresidual("dresidual", b.dresidual);
  const Region dweight("dweight", b.dweight), dbias("dbias", b.dbias);
  dx.check_apart({&dy, &x}, true);
  dx.check_apart({&weight, &bias});
  dresidual.check_apart({&dy}, true);
  dresidual.check_apart({&dx, &x, &weight, &bias});
  dweight.check_apart({&dy, &x, &weight, &bias, &dx, &dresidual});
  dbias.check_apart({&dy, &x, &weight, &bias, &dx, &dresidual, &dweight});
}

void check_saved(const SavedState& saved, const LayerState& layer, const BatchNorm::Backward& b) {
  if (!saved.filled) {
    refuse("saved", "one without content", "one that a forward filled");
  }
  if (saved.layer != layer.number) {
    refuse("saved", "that of another layer", "one that this layer's forward filled");
  }
  if (saved.device != b.x.device || saved.channels != b.x.sizes[1]) {
    refuse("saved", std::to_string(saved.channels) + " channels",
           "those of x, " + std::to_string(b.x.sizes[1]) + ", on its device");
  }
  check_same_x(saved, b.x);
  check_as_in_forward("mask", b.mask, saved.mask);
  check_as_in_forward("weight", b.weight, saved.weight);
  check_as_in_forward("bias", b.bias, saved.bias);
  if (!b.dresidual.absent() && !saved.residual) {
    refuse("dresidual", "one", "none, as the forward had no residual");
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
    refuse("dx", "dy", "other memory (with a residual and an activation)");
  }
}

}  // namespace syncbn
