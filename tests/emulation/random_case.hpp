// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "activation_mask.hpp"
#include "on_cuda.hpp"
#include "properties.hpp"
#include "sample_view.hpp"
#include "statistics/dtype.hpp"
#include "step/passes.hpp"
#include "support.hpp"

namespace syncbn {

/// What one forward and backward take, and the random choice of it.
struct Case {
  DType dtype;
  std::vector<std::int64_t> sizes;
  Activation activation;
  Tensor x, dy, residual;
  Memory y_memory, dx_memory;
  bool with_residual;
  bool kept;  ///< the residual's gradient is asked for
  Tensor weight, bias;
  std::vector<std::uint8_t> counts;  ///< an element mask, or nothing

  /// channels: up to `most_channels` times `channels_by`.
  Case(Random& random, int round, const std::vector<std::int64_t>& planes,
       std::int64_t most_channels, std::int64_t channels_by = 1)
      : dtype(kDtypes[round % 4]) {
    sizes = {random.between(1, 5), channels_by * random.between(1, most_channels)};
    std::int64_t per_sample = sizes[1];
    const std::int64_t plane = random.pick(planes);
    if (plane > 1 || random.one_in(2)) {
      sizes.push_back(plane % 4 == 0 && random.one_in(2) ? plane / 4 : plane);
      if (sizes.back() != plane) {
        sizes.push_back(4);
      }
    }
    per_sample *= plane;
    // Most often all tensors lie alike, as in a network.
    const Memory memory = random.pick(kMemories);
    const auto like = [&] { return random.one_in(4) ? random.pick(kMemories) : memory; };
    const auto offset = [&] { return random.one_in(4) ? random.between(1, 3) : 0; };
    x = Tensor(dtype, sizes, memory, offset());
    dy = Tensor(dtype, sizes, like(), offset());
    residual = Tensor(dtype, sizes, like(), offset());
    y_memory = like();
    dx_memory = like();
    std::vector<double> values = rough_values(random, dtype, sizes[0], per_sample);
    if (random.one_in(4)) {
      const double inf = std::numeric_limits<double>::infinity();
      for (const double special : {inf, -inf, std::numeric_limits<double>::quiet_NaN()}) {
        values[size(random.between(0, static_cast<std::int64_t>(values.size()) - 1))] = special;
      }
    }
    if (random.one_in(3)) {  // an element mask, and often NaN where it hides the values
      counts.resize(size(sizes[0] * plane));
      std::generate(counts.begin(), counts.end(),
                    [&] { return static_cast<std::uint8_t>(random.one_in(3) ? 0 : 255); });
      const bool hide = random.one_in(2);
      for (std::int64_t i = 0; hide && i < sizes[0] * per_sample; ++i) {
        if (counts[size(i / per_sample * plane + i % plane)] == 0) {
          values[size(i)] = std::numeric_limits<double>::quiet_NaN();
        }
      }
    }
    x.fill(values);
    dy.fill(rough_values(random, dtype, sizes[0], per_sample));
    residual.fill(rough_values(random, dtype, sizes[0], per_sample));
    activation.kind = static_cast<ActivationKind>(random.between(0, 2));
    with_residual = random.one_in(2);
    kept = with_residual;
    const auto parameter = [&] {
      Tensor out(random.pick(std::vector<DType>{dtype, DType::kFloat32}), {sizes[1]});
      Doubles entries(size(sizes[1]));
      std::generate(entries.begin(), entries.end(), [&] { return 2 * random.signed_unit(); });
      out.fill(entries);
      return out;
    };
    if (!random.one_in(5)) {
      weight = parameter();
      bias = parameter();
    }
  }
  /// Lays all tensors that are used out alike, without gaps.
  void make_dense(Random& random, Memory memory) {
    const std::int64_t per_sample = x.numel() / sizes[0];
    const auto lay = [&](Tensor& tensor) {
      tensor = Tensor(dtype, sizes, memory);
      tensor.fill(rough_values(random, dtype, sizes[0], per_sample));
    };
    lay(x);
    lay(dy);
    if (with_residual) {
      lay(residual);
    }
    y_memory = dx_memory = memory;
  }
  /// A plain step on such memory.
  void make_plain(Random& random, Memory memory, ActivationKind kind) {
    counts.clear();
    with_residual = kept = false;
    activation.kind = kind;
    make_dense(random, memory);
  }
  std::int64_t channels() const { return sizes[1]; }
  MaskView mask(Device device) const {
    if (counts.empty()) {
      return {};
    }
    std::vector<std::int64_t> without_channels = sizes;
    without_channels.erase(without_channels.begin() + 1);
    return {counts.data(), without_channels, device};
  }
  /// Bits of elements that do not count mean nothing: makes them 0.
  std::vector<std::uint8_t> meaningful(std::vector<std::uint8_t> bits) const {
    const SampleView view(x.view(), mask(Device::kCpu));
    const ActivationMaskLayout layout(view);
    for (std::int64_t i = 0; !bits.empty() && i < x.numel(); ++i) {
      const std::int64_t e = i % view.plane;
      const std::int64_t c = i / view.plane % view.channels;
      const std::int64_t n = i / view.plane / view.channels;
      const std::int64_t bit = layout.bit(n, c, e);
      if (!view.counts(n, e)) {
        bits[size(bit / 8)] &= static_cast<std::uint8_t>(~(1u << bit % 8));
      }
    }
    return bits;
  }
  bool masked() const { return with_residual && activation.kind != ActivationKind::kNone; }
  TensorView weight_view() const {
    return weight.numel() > 1 || !weight.storage().empty() ? weight.view() : TensorView();
  }
  TensorView bias_view() const { return bias.storage().empty() ? TensorView() : bias.view(); }
  std::string text() const {
    std::string out = std::string(name(dtype)) + " (";
    for (const std::int64_t s : sizes) {
      out += std::to_string(s) + " ";
    }
    return out + ") activation " + std::to_string(static_cast<int>(activation.kind)) +
           (with_residual ? " residual" : "") + (counts.empty() ? "" : " mask");
  }
};

}  // namespace syncbn
