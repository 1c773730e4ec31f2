// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "cuda/widen.cuh"
#include "cuda/window.cuh"
#include "statistics/dtype.hpp"
#include "statistics/elements.hpp"

// 2-D input, where every element is a partial, as src/cpu/vector/single_rows.hpp has it: elements
// are added in floating point to accumulators that begin at magic numbers, 1.5 * 2^52 units each.
// That is exact while all of them are multiples of the accumulator's unit and small enough for the
// sum to stay in the magic number's binade.
namespace syncbn::cuda {

/// Some elements of a channel and their largest and smallest nonzero exponent, as their bits have
/// it. Zeros are below and above all others.
template <class T, int kCount>
struct ElementRange {
  int largest;
  int smallest;

  SYNCBN_DEVICE explicit ElementRange(const T (&elements)[kCount]) {
    std::uint32_t most = 0;
    std::uint32_t least = 0xffffffffu;  // less one, so that 0 comes last
    SYNCBN_UNROLL(8)
    for (int i = 0; i < kCount; ++i) {
      const std::uint32_t bits = bit_copy<std::uint32_t>(widened(elements[i])) & 0x7fffffffu;
      most = bits > most ? bits : most;
      least = bits - 1 < least ? bits - 1 : least;
    }
    largest = static_cast<int>(most >> 23);
    smallest = least == 0xffffffffu ? kNone : static_cast<int>((least + 1) >> 23);
  }

  static constexpr int kNone = 255;
};

/// One thread's sums of elements and of products of one channel, of types of at most 32 bits.
template <class T>
class RowSums {
 public:
  static constexpr int kAtOnce = 4;

  /// Adds u and u*v; false, and nothing is added, where that would not be exact.
  SYNCBN_DEVICE bool add(const T (&u)[kAtOnce], const T (&v)[kAtOnce], PartialSum<T>& sum,
                         PartialSum<T>& product) {
    const ElementRange<T, kAtOnce> of_u(u);
    const ElementRange<T, kAtOnce> of_v(v);
    const bool fit = fits(of_u, of_v);
    if (!fit || rows_ == kMostRows) {
      finish(sum, product);
    }
    if (!fit) {
      top_u_ = top_of(of_u.largest);
      top_v_ = top_of(of_v.largest);
      if (!fits(of_u, of_v)) {
        return false;
      }
    }
    if (rows_ == 0) {
      first_ = magic(first_unit());
      high_ = magic(high_unit());
      low_ = magic(high_unit() - kLowBits);
    }
    rows_ += kAtOnce;
    SYNCBN_UNROLL(4)
    for (int i = 0; i < kAtOnce; ++i) {
      const double x = as_double(u[i]);
      const double y = as_double(v[i]);
      first_ += x;
      const double before = high_;
      high_ = std::fma(x, y, before);
      if constexpr (kHasLow) {
        low_ += std::fma(x, y, -(high_ - before));
      }
    }
    return true;
  }

  /// Hands over what was added.
  SYNCBN_DEVICE void finish(PartialSum<T>& sum, PartialSum<T>& product) {
    if (rows_ == 0) {
      return;
    }
    Lane<T> of_sum;
    Lane<T> of_product;
    of_sum.sum = first_ - magic(first_unit());
    of_product.sum = high_ - magic(high_unit());
    sum.add(of_sum, of_product);
    product.add(of_sum, of_product);
    if constexpr (kHasLow) {
      of_product.sum = low_ - magic(high_unit() - kLowBits);
      product.add(of_sum, of_product);
    }
    rows_ = 0;
  }

 private:
  static constexpr int kFraction = ElementTraits<T>::kFraction;
  /// Of 16-bit types a product has few enough bits for one accumulator.
  static constexpr bool kHasLow = kFraction > 10;
  /// An accumulator takes 2^6 numbers below 2^45 units.
  static constexpr int kMostRows = 64;
  static constexpr int kHighBits = 45;
  /// What is left of a product is at most half a unit: that many bits below it.
  static constexpr int kLowBits = 46;
  static constexpr int kSlack = 2;  // binades that later elements may be larger by
  static constexpr int kLargest = 254;

  /// The exponent of 1 in the bits of a float.
  static constexpr int kBias = 127;

  // An element whose bits have the exponent e is below 2^(e + 1 - kBias), and a multiple of
  // 2^(e - kBias - kFraction).
  SYNCBN_DEVICE bool fits(const ElementRange<T, kAtOnce>& u,
                          const ElementRange<T, kAtOnce>& v) const {
    constexpr int kBits = kHighBits + (kHasLow ? kLowBits : 0);
    return u.largest <= top_u_ && v.largest <= top_v_ &&
           u.smallest - kFraction > top_u_ - kHighBits &&
           u.smallest + v.smallest - 2 * kFraction >= top_u_ + top_v_ + 2 - kBits;
  }
  SYNCBN_DEVICE static int top_of(int largest) {
    return largest + kSlack < kLargest ? largest + kSlack : kLargest;
  }
  SYNCBN_DEVICE int first_unit() const { return top_u_ + 1 - kBias - kHighBits; }
  SYNCBN_DEVICE int high_unit() const { return top_u_ + top_v_ + 2 - 2 * kBias - kHighBits; }
  /// 1.5 * 2^52 units of 2^unit.
  SYNCBN_DEVICE static double magic(int unit) {
    return bit_copy<double>(static_cast<std::uint64_t>(unit + 52 + 1023) << 52 | std::uint64_t{1}
                                                                                     << 51);
  }

  double first_ = 0.0;
  double high_ = 0.0;
  double low_ = 0.0;
  int top_u_ = -1;  ///< exponents that no element is above
  int top_v_ = -1;
  int rows_ = 0;
};

/// Partials of float64 are pairs, added one by one.
template <>
class RowSums<double> {
 public:
  static constexpr int kAtOnce = 1;
  SYNCBN_DEVICE bool add(const double*, const double*, PartialSum<double>&, PartialSum<double>&) {
    return false;
  }
  SYNCBN_DEVICE void finish(PartialSum<double>&, PartialSum<double>&) {}
};

}  // namespace syncbn::cuda
