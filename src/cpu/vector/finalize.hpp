// SPDX-License-Identifier: Apache-2.0
// Rounding merged sums, a vector of channels at a time, and what follows per channel. Included
// inside a level file's unnamed namespace; the rules of elements.hpp hold here too, but for
// functions that are always in place.
//
// A sum is kept as high + low, to which everything is added without error as long as it fits. What
// does not fit is bounded, and a result counts only if the bound leaves one number to round to;
// other channels are left to the integers of statistics/finalize.hpp. So the bits are the same.
//
// V is a compiler's vector of doubles: the level's WidestV, or LeastV for what is left of it. Its
// comparisons give IntsOf<V>, all bits set where they hold; casts between the two keep bits.

template <class V>
using IntsOf = decltype(V() == V());
template <class V>
constexpr int kLanesIn = sizeof(V) / sizeof(double);

template <class V>
SYNCBN_INLINE V all_of(double v) {
  return V() + v;
}
/// As integers without a sign.
template <class V>
struct Unsigned {
  typedef std::uint64_t Vector __attribute__((vector_size(sizeof(V))));
};
template <class V>
using BitsOf = typename Unsigned<V>::Vector;
template <class V>
SYNCBN_INLINE BitsOf<V> all_bits(std::uint64_t v) {
  return BitsOf<V>() + v;
}

/// high + low, off by at most about `error`.
template <class V>
struct Expansion {
  V high = V();
  V low = V();
  V error = V();
};

template <class V>
SYNCBN_INLINE V absolute(V v) {
  return (V)((BitsOf<V>)v & all_bits<V>(0x7fffffffffffffff));
}

/// Knuth's TwoSum: a + b becomes a, its error is returned.
template <class V>
SYNCBN_INLINE V two_sum_into(V& a, V b) {
  const V sum = a + b;
  const V b_part = sum - a;
  const V a_part = sum - b_part;
  const V error = (a - a_part) + (b - b_part);
  a = sum;
  return error;
}

template <class V>
SYNCBN_INLINE void add_to(Expansion<V>& sum, V v) {
  const V lost = two_sum_into(sum.low, two_sum_into(sum.high, v));
  sum.error = sum.error + absolute(lost);
}

template <class V>
SYNCBN_INLINE void add_product(Expansion<V>& sum, V a, V b) {
  const V product = a * b;
  add_to(sum, product);
  add_to(sum, V(fused_minus(a, b, product)));
}

/// The sum rounded once. Takes the lanes where that is not certain out of `certain`.
template <class V>
SYNCBN_INLINE V rounded(const Expansion<V>& sum, IntsOf<V>& certain) {
  V high = sum.high;
  const V low = two_sum_into(high, sum.low);
  // Twice the bound, for its own rounding, and the rounding of low - error and low + error.
  const V error = (sum.error + sum.error) + absolute(low) * all_of<V>(0x1p-52);
  const V least = high + (low - error);
  const V most = high + (low + error);
  certain &= ((least == high) & (most == high)) | (sum.error == V());
  return high;
}

/// int64 as doubles, rounded, and what that leaves.
template <class V>
SYNCBN_INLINE V widened_integers(IntsOf<V> v, V& rest) {
  const V top = all_of<V>(0x1p84 + 0x1p63);
  const V two_52 = all_of<V>(0x1p52);
  const auto bits = (BitsOf<V>)v;
  const V low = (V)((bits & all_bits<V>(0xffffffff)) | (BitsOf<V>)two_52) - two_52;
  V value = (V)((bits >> 32) ^ (BitsOf<V>)top) - top;
  rest = two_sum_into(value, low);
  return value;
}

/// One word of each channel.
template <class V>
SYNCBN_INLINE IntsOf<V> words_at(const std::int64_t* words, std::int64_t step) {
  IntsOf<V> all = IntsOf<V>();
#pragma GCC unroll 8
  for (int i = 0; i < kLanesIn<V>; ++i) {
    all[i] = words[i * step];
  }
  return all;
}

/// Digits that were summed over ranks, as a number. Digits are taken from [-2^51, 2^51), so that
/// small numbers of either sign have no digits above their own.
template <class V>
SYNCBN_INLINE Expansion<V> sum_of_digits(const std::int64_t* words, std::int64_t step, int digits,
                                         int unit, IntsOf<V>& certain) {
  Expansion<V> sum;
  BitsOf<V> carry = BitsOf<V>();
  BitsOf<V> signs = BitsOf<V>();
  for (int i = 0; i < digits; ++i) {
    const auto word = (BitsOf<V>)words_at<V>(words + i, step);
    if (i < digits - 1) {
      signs |= word;
    }
    const BitsOf<V> digit = word + carry;
    if (is_zero((V)digit)) {
      carry = BitsOf<V>();
      continue;
    }
    const BitsOf<V> shifted = digit + (std::uint64_t{1} << 51);  // up to 2^63 + 2^51
    carry = shifted >> 52;
    const V value =
        (V)((shifted & all_bits<V>((std::uint64_t{1} << 52) - 1)) | (BitsOf<V>)all_of<V>(0x1p52)) -
        all_of<V>(0x1.8p52);
    const auto power = static_cast<std::uint64_t>(1023 + 52 * i - unit) << 52;
    add_to(sum, V(value * (V)all_bits<V>(power)));
  }
  // A negative word below the top, which no rank sends, or a top that is no digit.
  certain &= (IntsOf<V>)((signs >> 63 | carry) == BitsOf<V>());
  return sum;
}

/// The sums of a window, as long as nothing lies outside of it.
template <class V>
SYNCBN_INLINE Expansion<V> sum_of_window(const WindowArrays& w, int sum, std::int64_t channel) {
  const V high_unit =
      load_any<V>(w.bound[sum] + channel) * all_of<V>(1.0 / (std::int64_t{1} << kHighBits));
  const V low_unit = high_unit * all_of<V>(1.0 / (std::int64_t{1} << kLowBits));
  V high_rest;
  V low_rest;
  Expansion<V> out;
  out.high = widened_integers(load_any<IntsOf<V>>(w.high[sum] + channel), high_rest) * high_unit;
  const V low = widened_integers(load_any<IntsOf<V>>(w.low[sum] + channel), low_rest);
  out.low = two_sum_into(out.high, V(low * low_unit));
  if (__builtin_expect(static_cast<long>(is_zero(high_rest) && is_zero(low_rest)), 1) == 0) {
    add_to(out, V(high_rest * high_unit));
    add_to(out, V(low_rest * low_unit));
  }
  return out;
}

template <class V>
SYNCBN_INLINE void store_certain(IntsOf<V> certain, bool* done) {
  for (int i = 0; i < kLanesIn<V>; ++i) {
    done[i] = certain[i] != 0;
  }
}

/// Both sums of channels. Takes lanes whose words nobody can have sent out of `certain`.
template <class V>
struct SumsPair {
  Expansion<V> first;
  Expansion<V> second;
};
template <class V>
SYNCBN_INLINE SumsPair<V> sums_of(const SumsAt& at, std::int64_t c, IntsOf<V>& certain) {
  if (at.windows != nullptr) {
    certain = V() == V();
    return {sum_of_window<V>(*at.windows, 0, at.channel + c),
            sum_of_window<V>(*at.windows, 1, at.channel + c)};
  }
  const int first = at.format->first.digits;
  const int second = at.format->second.digits;
  const std::int64_t step = first + second + 1;
  const std::int64_t* here = at.words + (at.channel + c) * step;
  certain = words_at<V>(here + first + second, step) == IntsOf<V>();  // no flags
  const auto s = sum_of_digits<V>(here, step, first, at.format->first.unit, certain);
  return {s, sum_of_digits<V>(here + first, step, second, at.format->second.unit, certain)};
}

struct MomentArrays {
  double* mean;
  double* var;
  double* rstd;
  bool* done;
};

template <class V>
SYNCBN_INLINE void round_moments(const SumsAt& at, std::int64_t c, double count, double eps,
                                 const MomentArrays& to) {
  const V n = all_of<V>(count);
  IntsOf<V> certain;
  const auto [s, q] = sums_of<V>(at, c, certain);
  certain &= s.error == V();
  const V minus_high = V() - s.high;
  Expansion<V> spread;  // N*Q - S^2
  add_product(spread, n, q.high);
  add_product(spread, minus_high, s.high);
  add_product(spread, n, q.low);
  add_product(spread, V(minus_high + minus_high), s.low);
  add_product(spread, V(V() - s.low), s.low);
  spread.error = spread.error + n * (q.error + q.error);
  const V means = rounded(s, certain) / n;
  const V difference = rounded(spread, certain);
  const V d = (V)((IntsOf<V>)difference & (difference > V()));
  const V vars = d / n / n;
  store_any(to.mean + c, means);
  store_any(to.var + c, vars);
  store_any(to.rstd + c, V(all_of<V>(1.0) / square_root(V(vars + all_of<V>(eps)))));
  store_certain<V>(certain, to.done + c);
}

template <class V>
SYNCBN_INLINE void round_sums(const SumsAt& at, std::int64_t c, double* first, double* second,
                              bool* done) {
  IntsOf<V> certain;
  const auto [a, b] = sums_of<V>(at, c, certain);
  store_any(first + c, rounded(a, certain));
  store_any(second + c, rounded(b, certain));
  store_certain<V>(certain, done + c);
}

/// Calls body(vector, c) for wide vectors of channels, then small ones; up to three channels are
/// left.
template <class Body>
SYNCBN_INLINE void in_vectors(std::int64_t channels, const Body& body) {
  constexpr std::int64_t kWide = sizeof(WidestV) / sizeof(double);
  constexpr std::int64_t kLeast = sizeof(LeastV) / sizeof(double);
  std::int64_t c = 0;
  for (; c + kWide <= channels; c += kWide) {
    body(WidestV(), c);
  }
  for (; c + kLeast <= channels; c += kLeast) {
    body(LeastV(), c);
  }
}

void round_moments(const SumsAt& at, std::int64_t channels, double count, double eps, double* mean,
                   double* var, double* rstd, bool* done) {
  const MomentArrays to{mean, var, rstd, done};
  in_vectors(channels, [&](auto vector, std::int64_t c) __attribute__((always_inline)) {
    round_moments<decltype(vector)>(at, c, count, eps, to);
  });
}

void round_sums(const SumsAt& at, std::int64_t channels, double* first, double* second,
                bool* done) {
  in_vectors(channels, [&](auto vector, std::int64_t c) __attribute__((always_inline)) {
    round_sums<decltype(vector)>(at, c, first, second, done);
  });
}

// The formulas of statistics/finalize.hpp in loops that compilers turn into vectors.

void coefficients(const CoefficientArrays& of, std::int64_t channels, std::int64_t count) {
  const CoefficientArrays a = of;
  double* __restrict c1 = a.c1;
  double* __restrict c2 = a.c2;
  double* __restrict c3 = a.c3;
  double* __restrict dweight = a.dweight;
  for (std::int64_t c = 0; c < channels; ++c) {
    const ChannelGradients g =
        channel_gradients(a.first[c], a.second[c], {0}, a.mean[c], a.rstd[c]);
    const Coefficients k = coefficients_of(g, a.weight[c], a.rstd[c], count);
    dweight[c] = g.dweight;
    c1[c] = k.c1;
    c2[c] = k.c2;
    c3[c] = k.c3;
  }
}

void update_running(float* running, const double* values, std::int64_t channels, double factor,
                    double correction) {
  float* __restrict to = running;
  for (std::int64_t c = 0; c < channels; ++c) {
    to[c] = static_cast<float>(
        running_update(static_cast<double>(to[c]), values[c] * correction, factor));
  }
}

void pack_affine(const double* mean, const double* rstd, const double* weight, const double* bias,
                 std::int64_t channels, float* const* arrays) {
  float* __restrict mean_high = arrays[0];
  float* __restrict mean_low = arrays[1];
  float* __restrict scale = arrays[2];
  float* __restrict shift = arrays[3];
  for (std::int64_t c = 0; c < channels; ++c) {
    const AffineF32 p = affine_f32(mean[c], rstd[c], weight[c], bias[c]);
    mean_high[c] = p.mean_high;
    mean_low[c] = p.mean_low;
    scale[c] = p.a;
    shift[c] = p.b;
  }
}

void pack_gradient(const double* mean, const double* rstd, const double* c1, const double* c2,
                   const double* c3, std::int64_t channels, float* const* arrays) {
  float* __restrict mean_high = arrays[0];
  float* __restrict mean_low = arrays[1];
  float* __restrict to_c1 = arrays[4];
  float* __restrict to_c2 = arrays[5];
  float* __restrict to_c3 = arrays[6];
  float* __restrict power = arrays[7];
  for (std::int64_t c = 0; c < channels; ++c) {
    const GradientF32 p = gradient_f32(mean[c], rstd[c], {c1[c], c2[c], c3[c]});
    mean_high[c] = p.mean_high;
    mean_low[c] = p.mean_low;
    to_c1[c] = p.c1;
    to_c2[c] = p.c2;
    to_c3[c] = p.c3;
    power[c] = p.power;
  }
}
