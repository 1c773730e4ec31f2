// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

namespace syncbn::testing {

/// What a layer's step reads and writes, where its numbers do not matter.
struct SmallStep {
  explicit SmallStep(const std::vector<std::int64_t>& sizes, DType dtype = DType::kFloat32)
      : x(dtype, sizes) {
    Random random(7);
    x.fill(unit_values(random, dtype, x.numel()));
    y = dx = dresidual = x;
  }
  void forward(BatchNorm& layer, Saved& saved, bool residual = false) {
    layer.forward({.x = x.view(), .residual = residual ? x.view() : TensorView(), .y = y.view()},
                  saved);
  }
  void backward(BatchNorm& layer, const Saved& saved, bool residual = false) {
    layer.backward({.dy = x.view(),
                    .x = x.view(),
                    .dx = dx.view(),
                    .dresidual = residual ? dresidual.view() : MutableTensorView()},
                   saved);
  }
  Tensor x, y, dx, dresidual;
};

inline void expect_empty(const Saved& saved) {
  EXPECT_TRUE(saved.mean().empty() && saved.var().empty() && saved.rstd().empty());
  EXPECT_EQ(saved.count(), 0);
}

/// A copy of what was thrown; anything else goes on.
template <class Expected>
Expected error_of(const std::exception_ptr& error) {
  if (error == nullptr) {
    throw std::logic_error("nothing was thrown");
  }
  try {
    std::rethrow_exception(error);
  } catch (const Expected& expected) {
    return expected;
  }
}

template <class Expected, class Function>
Expected error_of_call(const Function& function) {
  return error_of<Expected>(run_ranks(1, [&](int) { function(); })[0]);
}

}  // namespace syncbn::testing
