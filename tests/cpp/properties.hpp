// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random steps of a layer, for tests of properties. The environment chooses them:
// SYNCBN_SEED (the first case's number) and SYNCBN_CASES (how many follow).

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

namespace syncbn::testing {

inline std::uint64_t environment_number(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// Calls body with the numbers of each case, until one fails. Tests whose cases cost more take a
/// share of them.
inline void for_each_case(const std::function<void(Random&)>& body, std::uint64_t share = 1) {
  const std::uint64_t seed = environment_number("SYNCBN_SEED", 1);
  const std::uint64_t cases = environment_number("SYNCBN_CASES", 1500);
  for (std::uint64_t i = 0; i < std::max<std::uint64_t>(1, cases / share); ++i) {
    SCOPED_TRACE("SYNCBN_SEED=" + std::to_string(seed + i) + " SYNCBN_CASES=1 is this case");
    Random random(seed + i);
    body(random);
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

/// A weight, a bias or a buffer.
struct Parameter {
  bool present = true;
  DType dtype = DType::kFloat32;
  std::vector<double> values;

  Parameter() = default;
  Parameter(Random& random, DType type, std::int64_t channels, double middle)
      : present(!random.one_in(5)),
        dtype(type),
        values(unit_values(random, type, channels, middle)) {}
  Tensor tensor(std::int64_t channels) const { return Tensor(dtype, {channels}, values); }
};

/// The elements of these samples.
template <class T>
std::vector<T> parts_of(const std::vector<T>& values, const std::vector<std::int64_t>& samples,
                        std::int64_t per_sample) {
  std::vector<T> mine;
  for (const std::int64_t n : samples) {
    mine.insert(mine.end(), values.begin() + n * per_sample, values.begin() + (n + 1) * per_sample);
  }
  return mine;
}

inline void put_back(const std::vector<double>& part, const std::vector<std::int64_t>& samples,
                     std::vector<double>& whole_batch) {
  const auto per_sample =
      samples.empty() ? 0 : static_cast<std::int64_t>(part.size() / samples.size());
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const auto from = part.begin() + static_cast<std::int64_t>(i) * per_sample;
    std::copy(from, from + per_sample, whole_batch.begin() + samples[i] * per_sample);
  }
}

/// What a training step takes. All of it is random.
struct Step {
  DType dtype;
  std::vector<std::int64_t> sizes;  ///< of the whole batch; 2 to 6 axes
  std::vector<double> x, dy;
  std::vector<double> residual;    ///< or none
  std::vector<std::uint8_t> mask;  ///< or none
  Parameter weight, bias, running_mean, running_var;
  std::int64_t tracked;  ///< batches before this one
  BatchNorm::Options options{.name = "layer"};
  AffineGradients affine = AffineGradients::kGlobal;
  bool keep = false;      ///< the residual's gradient is wanted
  bool expanded = false;  ///< dy is one number, its strides are 0

  /// A plain one.
  Step(Random& random, DType type, std::vector<std::int64_t> shape)
      : dtype(type), sizes(std::move(shape)), tracked(3) {
    x = rough_values(random, dtype, sizes[0], per_sample());
    dy = rough_values(random, dtype, sizes[0], per_sample());
    for (Parameter* one : {&weight, &bias, &running_mean, &running_var}) {
      *one = Parameter(random, DType::kFloat64, channels(), one == &running_var ? 1 : 0);
      one->present = true;
    }
    options.channels = channels();
  }

  explicit Step(Random& random) {
    dtype = random.one_in(6) ? DType::kFloat64 : kDtypes[random.between(0, 2)];
    choose_sizes(random);
    choose_x(random);
    dy = rough_values(random, dtype, sizes[0], per_sample());
    expanded = random.one_in(8);
    if (expanded) {
      std::fill(dy.begin(), dy.end(), round_to(dtype, random.signed_unit()));
    } else if (random.one_in(12)) {
      spoil(random, dy);
    }
    options.activation = {static_cast<ActivationKind>(random.between(0, 2)), random.signed_unit()};
    if (random.one_in(3)) {
      residual = rough_values(random, dtype, sizes[0], per_sample());
    }
    keep = !residual.empty() && random.one_in(2);
    if (random.one_in(4)) {
      choose_mask(random);
    }
    const auto type = [&] { return random.one_in(2) ? dtype : kDtypes[random.between(0, 3)]; };
    weight = Parameter(random, type(), channels(), 0);
    bias = Parameter(random, type(), channels(), 0);
    running_mean = Parameter(random, type(), channels(), 0);
    running_var = Parameter(random, type(), channels(), 1);
    running_var.present = running_mean.present;
    options.eps = random.pick(std::vector<double>{1e-5, 1e-3, 0, 1});
    options.momentum = random.one_in(4)
                           ? std::nullopt
                           : std::optional(random.pick(std::vector<double>{0.1, 0.01, 0, 1}));
    options.channels = channels();
    tracked = random.between(0, 100);
  }
  std::int64_t channels() const { return sizes[1]; }
  std::int64_t plane() const {
    std::int64_t product = 1;
    for (std::size_t axis = 2; axis < sizes.size(); ++axis) {
      product *= sizes[axis];
    }
    return product;
  }
  std::int64_t per_sample() const { return channels() * plane(); }
  std::string text() const {
    std::string out = std::string(name(dtype)) + " (";
    for (const std::int64_t size : sizes) {
      out += std::to_string(size) + " ";
    }
    return out + "), activation " + std::to_string(static_cast<int>(options.activation.kind)) +
           (residual.empty() ? "" : ", residual") + (keep ? " and its gradient" : "") +
           (mask.empty() ? "" : ", mask") + (expanded ? ", expanded dy" : "") +
           (weight.present ? ", weight" : "") + (bias.present ? ", bias" : "");
  }

 private:
  /// Planes of 1 to 1537 elements in up to 4 axes, 1 to 70 channels or many, at most 4,000
  /// elements, sometimes none.
  void choose_sizes(Random& random) {
    const bool wide = random.one_in(50);
    // Around what kernels take at a time: vectors, blocks of rows, segments.
    const std::vector<std::int64_t> planes = {1,   1,   15,  16,  17,   31,   33,   48,  49,  63,
                                              64,  65,  79,  81,  127,  128,  129,  145, 196, 511,
                                              512, 513, 575, 577, 1024, 1025, 1100, 1537};
    std::int64_t left = wide               ? random.between(1, 2)
                        : random.one_in(2) ? random.between(1, 40)
                                           : random.pick(planes);
    const std::int64_t plane = left;
    std::int64_t channels = wide ? random.pick(std::vector<std::int64_t>{1023, 2048})
                                 : random.between(1, random.one_in(2) ? 8 : 70);
    channels = wide ? channels : std::min(channels, std::max<std::int64_t>(1, 4000 / plane));
    const std::int64_t most = std::max<std::int64_t>(1, 4000 / (plane * channels));
    sizes = {random.between(1, std::min<std::int64_t>(most, 40)), channels};
    if (plane > 1 || random.one_in(3)) {
      for (const std::int64_t factor : {7, 3, 2}) {
        if (left % factor == 0 && random.one_in(2)) {
          sizes.push_back(factor);
          left /= factor;
        }
      }
      sizes.push_back(left);
    }
    if (random.one_in(40)) {  // nothing at all
      sizes[random.one_in(2) ? 0 : sizes.size() - 1] = 0;
    }
  }
  void choose_x(Random& random) {
    x = rough_values(random, dtype, sizes[0], per_sample());
    const std::int64_t kind = random.between(0, 5);
    for (double& value : x) {
      value = kind == 0   ? round_to(dtype, 3 + random.signed_unit())
              : kind == 1 ? round_to(dtype, 1e4 + std::sqrt(3.0) * random.signed_unit())
              : kind == 2 ? round_to(dtype, -0.3)  // constant
                          : value;
    }
    if (random.one_in(8)) {
      spoil(random, x);
    }
  }
  /// A few elements that are not finite, or at the type's ends.
  void spoil(Random& random, std::vector<double>& values) const {
    const double infinity = std::numeric_limits<double>::infinity();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (std::size_t i = 0; i < 3 && !values.empty(); ++i) {
      const double special = random.pick(std::vector<double>{
          infinity, -infinity, nan, -0.0, 0x1p-149, 3e38, -65504, 0x1p-1074, 1e200, 0x1p-24});
      values[random.bits() % values.size()] = round_to(dtype, special);
    }
  }
  /// Single elements, the ends of planes, or whole samples do not count, and often hold NaN.
  void choose_mask(Random& random) {
    const std::int64_t kind = random.between(0, 2);
    for (std::int64_t n = 0; n < sizes[0]; ++n) {
      const std::int64_t length = kind == 1   ? random.between(0, plane())
                                  : kind == 2 ? plane() * random.between(0, 1)
                                              : 0;
      for (std::int64_t e = 0; e < plane(); ++e) {
        const bool counts = kind == 0 ? random.one_in(2) : e < length;
        mask.push_back(counts ? static_cast<std::uint8_t>(random.between(1, 255)) : 0);
      }
    }
    const bool hide = random.one_in(2);
    for (std::size_t i = 0; hide && i < x.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      if (mask[static_cast<std::size_t>(at / per_sample() * plane() + at % plane())] == 0) {
        x[i] = std::numeric_limits<double>::quiet_NaN();
      }
    }
  }
};

}  // namespace syncbn::testing
