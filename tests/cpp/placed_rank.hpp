// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank's share of a random step, in layouts of its own.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "properties.hpp"
#include "support.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn::testing {

/// How a rank's tensors lie in memory.
struct Placement {
  Memory x = Memory::kPlanes;
  Memory dy = Memory::kPlanes;
  Memory residual = Memory::kPlanes;
  Memory out = Memory::kPlanes;
  std::int64_t offset = 0;
  bool in_place = false;           ///< y over x, dx over dy
  bool residual_in_place = false;  ///< the residual's gradient over dy

  Placement() = default;
  explicit Placement(Random& random)
      : x(random.pick(kMemories)), offset(random.between(0, 3)), in_place(random.one_in(4)) {
    const auto like_x = [&] { return random.one_in(2) ? random.pick(kMemories) : x; };
    dy = like_x();
    residual = like_x();
    out = like_x();
    residual_in_place = !in_place && random.one_in(4);
  }
};

/// What a rank has, in its own layouts.
struct Rank {
  Tensor x, dy, residual, y, dx, u;
  TensorView dy_view;
  std::vector<std::uint8_t> mask;
  std::vector<std::int64_t> mask_sizes;
  Tensor weight, bias, running_mean, running_var, dweight, dbias;
  std::int64_t tracked;
  Placement placement;
  const Step& step;

  Rank(const Step& s, const std::vector<std::int64_t>& samples, const Placement& how)
      : weight(s.weight.tensor(s.channels())),
        bias(s.bias.tensor(s.channels())),
        running_mean(s.running_mean.tensor(s.channels())),
        running_var(s.running_var.tensor(s.channels())),
        dweight(s.weight.dtype, {s.channels()}),
        dbias(s.bias.dtype, {s.channels()}),
        tracked(s.tracked),
        placement(how),
        step(s) {
    std::vector<std::int64_t> sizes = step.sizes;
    sizes[0] = static_cast<std::int64_t>(samples.size());
    const auto part = [&](const std::vector<double>& values, Memory memory) {
      Tensor out(step.dtype, sizes, memory, how.offset);
      out.fill(parts_of(values, samples, step.per_sample()));
      return out;
    };
    x = part(step.x, how.x);
    dy = part(step.dy, how.dy);
    y = Tensor(step.dtype, sizes, how.out, how.offset);
    dx = y;
    u = y;
    if (!step.residual.empty()) {
      residual = part(step.residual, how.residual);
    }
    dy_view = std::as_const(dy).view();
    if (step.expanded && dy.numel() > 0) {  // one element stands for all
      std::fill(dy_view.strides.begin(), dy_view.strides.end(), 0);
      placement.in_place = placement.residual_in_place = false;
    }
    if (!step.mask.empty()) {
      mask = parts_of(step.mask, samples, step.plane());
      sizes.erase(sizes.begin() + 1);
      mask_sizes = std::move(sizes);
    }
  }
  MaskView mask_view() const { return {mask.data(), mask_sizes}; }
  TensorView x_view() const { return x.view(); }
  TensorView residual_view() const {
    return step.residual.empty() ? TensorView() : residual.view();
  }
  TensorView weight_view() const { return step.weight.present ? weight.view() : TensorView(); }
  TensorView bias_view() const { return step.bias.present ? bias.view() : TensorView(); }
  MutableTensorView mean_view() { return view(step.running_mean, running_mean); }
  MutableTensorView var_view() { return view(step.running_var, running_var); }
  Tensor& y_out() { return placement.in_place ? x : y; }
  Tensor& dx_out() { return placement.in_place ? dy : dx; }
  Tensor& u_out() { return placement.residual_in_place ? dy : u; }
  MutableTensorView u_view() { return step.keep ? u_out().view() : MutableTensorView(); }

 private:
  static MutableTensorView view(const Parameter& which, Tensor& of) {
    return which.present ? of.view() : MutableTensorView();
  }
};

}  // namespace syncbn::testing
