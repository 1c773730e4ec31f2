// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "cuda/divisor.cuh"
#include "statistics/dtype.hpp"
#include "statistics/elements.hpp"
#include "step/passes.hpp"
#include "tensors/activation_mask.hpp"
#include "tensors/sample_view.hpp"

// What kernels are given: tensors, per-channel arrays and the activation, by value.
namespace syncbn::cuda {

inline constexpr int kMaxSpatialDims = 8;

SYNCBN_HD constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// A SampleView without what kernels do not need. Strides in elements.
struct Operand {
  void* data = nullptr;
  std::int64_t sample_stride = 0;
  std::int64_t channel_stride = 0;
  std::int64_t element_stride = 0;
  int dims = 0;  ///< from 2 on, element_stride does not tell all
  Divisor sizes[kMaxSpatialDims];
  std::int64_t strides[kMaxSpatialDims] = {};

  template <class T>
  SYNCBN_DEVICE T* at(std::int64_t n, std::int64_t c) const {
    return static_cast<T*>(data) + n * sample_stride + c * channel_stride;
  }
  SYNCBN_DEVICE std::int64_t element(std::int64_t e) const {
    if (dims <= 1) {
      return e * element_stride;
    }
    std::int64_t offset = 0;
    for (int d = dims - 1; d >= 0; --d) {
      offset += sizes[d].remainder(e) * strides[d];
      e = sizes[d].quotient(e);
    }
    return offset;
  }
};

/// One entry per channel, of any dtype; `absent` where there is no array.
struct ChannelArray {
  void* data = nullptr;
  std::int64_t stride = 0;
  DType dtype = DType::kFloat32;
  double absent = 0.0;

  SYNCBN_DEVICE double get(std::int64_t c) const {
    return data == nullptr ? absent : load_entry(dtype, data, c * stride);
  }
  /// Rounds once to the dtype.
  SYNCBN_DEVICE void set(std::int64_t c, double value) const {
    if (data != nullptr) {
      store_entry(dtype, data, c * stride, value);
    }
  }
};

/// Channel parameters of normalize.
struct AffineArrays {
  const double* mean = nullptr;
  const double* rstd = nullptr;
  ChannelArray weight;
  ChannelArray bias;

  template <class T>
  SYNCBN_DEVICE Affine<T> channel(std::int64_t c) const {
    return Affine<T>(mean[c], rstd[c], weight.get(c), bias.get(c));
  }
};

/// Bits of an activation mask, read or written.
struct MaskBits {
  std::uint8_t* data = nullptr;
  bool by_rows = false;
  std::int64_t run_bytes = 0;
  std::int64_t sample_bytes = 0;

  SYNCBN_DEVICE std::int64_t bit(std::int64_t n, std::int64_t c, std::int64_t e) const {
    return mask_bit(by_rows, run_bytes, sample_bytes, n, c, e);
  }
  /// Lowest bit first: that of (n, c, e), then those of its neighbours within the byte.
  SYNCBN_DEVICE unsigned get(std::int64_t n, std::int64_t c, std::int64_t e) const {
    const std::int64_t at = bit(n, c, e);
    return static_cast<unsigned>(data[at / 8]) >> (at % 8);
  }
};

/// How dy comes back through the activation.
struct PullbackArrays {
  AppliedActivation activation;
  AffineArrays affine;  ///< without a mask
  MaskBits mask;
};

/// The pullback of one channel.
template <class T>
class ChannelPullback {
 public:
  SYNCBN_DEVICE ChannelPullback(const PullbackArrays& arrays, std::int64_t c) {
    if (arrays.activation.changes() && arrays.mask.data == nullptr) {
      affine_ = arrays.affine.channel<T>(c);
    }
  }
  ChannelPullback() = default;
  /// `bits`: the mask's, if there is one, that of this element lowest.
  SYNCBN_DEVICE T operator()(const PullbackArrays& arrays, const ActivationOf<T>& activation,
                             unsigned bits, T dy, T x) const {
    if (!arrays.activation.changes()) {
      return dy;
    }
    return arrays.mask.data == nullptr ? without_mask(activation, dy, x)
                                       : activation.gradient(dy, (bits & 1u) != 0);
  }
  SYNCBN_DEVICE T without_mask(const ActivationOf<T>& activation, T dy, T x) const {
    return activation.gradient(dy, activation.passes(affine_(x)));
  }
  SYNCBN_DEVICE const Affine<T>& affine() const { return affine_; }

 private:
  Affine<T> affine_;
};

/// The options of a kernel that are known at run time,
struct AnyOptions {
  static constexpr bool kPlain = false;
};
/// or when it is compiled: no masks, no residual or its gradient, and what becomes of values that
/// are not positive.
template <NotPositive kNotPositive>
struct Plain {
  static constexpr bool kPlain = true;
  static constexpr NotPositive kRest = kNotPositive;
};

/// The activation as kernels see it.
template <class T, class Options>
SYNCBN_DEVICE ActivationOf<T> activation_of(const AppliedActivation& given) {
  if constexpr (Options::kPlain) {
    AppliedActivation known;
    known.rest = Options::kRest;
    return ActivationOf<T>(known);
  } else {
    return ActivationOf<T>(given);
  }
}

/// Bit k: whether element k of a vector counts. counts: a byte per element of a plane, null: all
/// do. A vector lies along a plane (one_channel), or across channels, which share the byte.
template <int kVector>
SYNCBN_DEVICE unsigned counted_bits(const std::uint8_t* counts, std::int64_t element,
                                    bool one_channel) {
  constexpr unsigned kAll = (1u << kVector) - 1;
  if (counts == nullptr) {
    return kAll;
  }
  if (!one_channel) {
    return counts[element] != 0 ? kAll : 0;
  }
  unsigned bits = 0;
  SYNCBN_UNROLL(8)
  for (int k = 0; k < kVector; ++k) {
    bits |= static_cast<unsigned>(counts[element + k] != 0) << k;
  }
  return bits;
}

/// Elements of a 16-byte access.
template <class T>
inline constexpr int kWidest = 16 / static_cast<int>(sizeof(T));

}  // namespace syncbn::cuda
