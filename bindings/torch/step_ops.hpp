// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/library.h>

#include "bindings/torch/backward_ops.hpp"
#include "bindings/torch/forward_ops.hpp"

// The two doors of a training step's directions as operators, for python/syncbn/step/training.py:
// on both devices, of which a Place is the one of a call's tensors. An argument that is refused has
// changed nothing, and nobody has waited for this rank. Shapes and dtypes stand beside their fakes
// in python/syncbn/operators.py.
namespace syncbn::torch_layer {

/// Registers them for the dispatch key of the Place.
template <class Place>
void register_step(torch::stable::detail::StableLibrary& m) {
  m.impl("forward_begin", TORCH_BOX(&forward_begin<Place>));
  m.impl("forward_finish", TORCH_BOX(&forward_finish<Place>));
  m.impl("backward_begin", TORCH_BOX(&backward_begin<Place>));
  m.impl("backward_finish", TORCH_BOX(&backward_finish<Place>));
  m.impl("update_running_statistics", TORCH_BOX(&update_running_statistics<Place>));
  m.impl("recover_input", TORCH_BOX(&recover_input<Place>));
  m.impl("evaluate", TORCH_BOX(&evaluate<Place>));
}

}  // namespace syncbn::torch_layer
