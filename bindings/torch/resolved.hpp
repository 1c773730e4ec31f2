// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "syncbn/error.hpp"

namespace syncbn::torch_layer {

/// For the dispatch keys Negative and Conjugate of an operator that writes to its arguments:
/// PyTorch's own way with these bits expects the operator to return what it has written to, and
/// takes something else for it.
template <auto kOperator>
struct OnlyResolved;

template <class Result, class... Arguments, Result (*kOperator)(Arguments...)>
struct OnlyResolved<kOperator> {
  static Result call(Arguments...) {
    throw InvalidArgument(
        "got a tensor with PyTorch's negative or conjugate bit, expected the results "
        "of tensor.resolve_neg() and tensor.resolve_conj()");
  }
};

}  // namespace syncbn::torch_layer
