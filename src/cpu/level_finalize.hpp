// Rounding merged sums, four channels at a time, and what follows per channel. Included inside a
// level file's unnamed namespace; the rules of level_elements.hpp hold here too, but for functions
// that are always in place.
//
// A sum is kept as high + low, to which everything is added without error as long as it fits. What
// does not fit is bounded, and a result counts only if the bound leaves one number to round to;
// other channels are left to the integers of statistics/finalize.hpp. So the bits are the same.

/// high + low, off by at most about `error`.
struct Expansion {
  __m256d high = _mm256_setzero_pd();
  __m256d low = _mm256_setzero_pd();
  __m256d error = _mm256_setzero_pd();
};

inline __m256d absolute(__m256d v) {
  return _mm256_and_pd(v, _mm256_castsi256_pd(_mm256_set1_epi64x(0x7fffffffffffffffLL)));
}

/// Knuth's TwoSum: a + b becomes a, its error is returned.
SYNCBN_INLINE __m256d two_sum_into(__m256d& a, __m256d b) {
  const __m256d sum = _mm256_add_pd(a, b);
  const __m256d b_part = _mm256_sub_pd(sum, a);
  const __m256d a_part = _mm256_sub_pd(sum, b_part);
  const __m256d error = _mm256_add_pd(_mm256_sub_pd(a, a_part), _mm256_sub_pd(b, b_part));
  a = sum;
  return error;
}

SYNCBN_INLINE void add_to(Expansion& sum, __m256d v) {
  const __m256d lost = two_sum_into(sum.low, two_sum_into(sum.high, v));
  sum.error = _mm256_add_pd(sum.error, absolute(lost));
}

SYNCBN_INLINE void add_product(Expansion& sum, __m256d a, __m256d b) {
  const __m256d product = _mm256_mul_pd(a, b);
  add_to(sum, product);
  add_to(sum, _mm256_fmsub_pd(a, b, product));
}

/// The sum rounded once. Takes the lanes where that is not certain out of `certain`.
SYNCBN_INLINE __m256d rounded(const Expansion& sum, __m256d& certain) {
  __m256d high = sum.high;
  const __m256d low = two_sum_into(high, sum.low);
  // Twice the bound, for its own rounding, and the rounding of low - error and low + error.
  const __m256d error = _mm256_add_pd(_mm256_add_pd(sum.error, sum.error),
                                      _mm256_mul_pd(absolute(low), _mm256_set1_pd(0x1p-52)));
  const __m256d least = _mm256_add_pd(high, _mm256_sub_pd(low, error));
  const __m256d most = _mm256_add_pd(high, _mm256_add_pd(low, error));
  const __m256d one =
      _mm256_and_pd(_mm256_cmp_pd(least, high, _CMP_EQ_OQ), _mm256_cmp_pd(most, high, _CMP_EQ_OQ));
  const __m256d exact = _mm256_cmp_pd(sum.error, _mm256_setzero_pd(), _CMP_EQ_OQ);
  certain = _mm256_and_pd(certain, _mm256_or_pd(one, exact));
  return high;
}

/// Four int64 as doubles, rounded, and what that leaves.
SYNCBN_INLINE __m256d widened_integers(__m256i v, __m256d& rest) {
  const __m256d top = _mm256_set1_pd(0x1p84 + 0x1p63);
  const __m256i low_bits = _mm256_blend_epi32(v, _mm256_castpd_si256(_mm256_set1_pd(0x1p52)), 0xaa);
  const __m256i high_bits = _mm256_xor_si256(_mm256_srli_epi64(v, 32), _mm256_castpd_si256(top));
  const __m256d low = _mm256_sub_pd(_mm256_castsi256_pd(low_bits), _mm256_set1_pd(0x1p52));
  __m256d value = _mm256_sub_pd(_mm256_castsi256_pd(high_bits), top);
  rest = two_sum_into(value, low);
  return value;
}

/// One word of each of four channels.
inline __m256i four_words(const std::int64_t* words, std::int64_t step) {
  return _mm256_set_epi64x(words[3 * step], words[2 * step], words[step], words[0]);
}

/// Digits that were summed over ranks, as a number. Digits are taken from [-2^51, 2^51), so that
/// small numbers of either sign have no digits above their own.
SYNCBN_INLINE Expansion sum_of_digits(const std::int64_t* words, std::int64_t step, int digits,
                                      int unit, __m256d& certain) {
  const __m256i half = _mm256_set1_epi64x(std::int64_t{1} << 51);
  const __m256i mask = _mm256_set1_epi64x((std::int64_t{1} << 52) - 1);
  const __m256i one = _mm256_castpd_si256(_mm256_set1_pd(0x1p52));
  Expansion sum;
  __m256i carry = _mm256_setzero_si256();
  __m256i signs = _mm256_setzero_si256();
  for (int i = 0; i < digits; ++i) {
    const __m256i word = four_words(words + i, step);
    if (i < digits - 1) {
      signs = _mm256_or_si256(signs, word);
    }
    const __m256i digit = _mm256_add_epi64(word, carry);
    if (_mm256_testz_si256(digit, digit) != 0) {
      carry = _mm256_setzero_si256();
      continue;
    }
    const __m256i shifted = _mm256_add_epi64(digit, half);  // as unsigned: up to 2^63 + 2^51
    carry = _mm256_srli_epi64(shifted, 52);
    const __m256d value =
        _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(_mm256_and_si256(shifted, mask), one)),
                      _mm256_set1_pd(0x1.8p52));
    const __m256i power = _mm256_set1_epi64x(static_cast<std::int64_t>(1023 + 52 * i - unit) << 52);
    add_to(sum, _mm256_mul_pd(value, _mm256_castsi256_pd(power)));
  }
  // A negative word below the top, which no rank sends, or a top that is no digit.
  const __m256i other = _mm256_or_si256(_mm256_srli_epi64(signs, 63), carry);
  certain = _mm256_and_pd(certain,
                          _mm256_castsi256_pd(_mm256_cmpeq_epi64(other, _mm256_setzero_si256())));
  return sum;
}

/// The sums of a window, as long as nothing lies outside of it.
SYNCBN_INLINE Expansion sum_of_window(const WindowArrays& w, int sum, std::int64_t channel) {
  const auto limbs = [channel](const std::int64_t* of) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(of + channel));
  };
  const __m256d high_unit = _mm256_mul_pd(_mm256_loadu_pd(w.bound[sum] + channel),
                                          _mm256_set1_pd(1.0 / (std::int64_t{1} << kHighBits)));
  const __m256d low_unit =
      _mm256_mul_pd(high_unit, _mm256_set1_pd(1.0 / (std::int64_t{1} << kLowBits)));
  __m256d high_rest;
  __m256d low_rest;
  Expansion out;
  out.high = _mm256_mul_pd(widened_integers(limbs(w.high[sum]), high_rest), high_unit);
  const __m256d low = widened_integers(limbs(w.low[sum]), low_rest);
  out.low = two_sum_into(out.high, _mm256_mul_pd(low, low_unit));
  const __m256i rests = _mm256_castpd_si256(_mm256_or_pd(high_rest, low_rest));
  if (__builtin_expect(static_cast<long>(_mm256_testz_si256(rests, rests)), 1) == 0) {
    add_to(out, _mm256_mul_pd(high_rest, high_unit));
    add_to(out, _mm256_mul_pd(low_rest, low_unit));
  }
  return out;
}

inline __m256d without_flags(const std::int64_t* flags, std::int64_t step) {
  return _mm256_castsi256_pd(_mm256_cmpeq_epi64(four_words(flags, step), _mm256_setzero_si256()));
}

inline void store_certain(__m256d certain, bool* done) {
  const int lanes = _mm256_movemask_pd(certain);
  for (int i = 0; i < 4; ++i) {
    done[i] = (lanes >> i & 1) != 0;
  }
}

/// Both sums of four channels. Takes lanes whose words nobody can have sent out of `certain`.
struct SumsPair {
  Expansion first;
  Expansion second;
};
SYNCBN_INLINE SumsPair sums_of(const SumsAt& at, std::int64_t c, __m256d& certain) {
  if (at.windows != nullptr) {
    certain = _mm256_castsi256_pd(_mm256_set1_epi64x(-1));
    return {sum_of_window(*at.windows, 0, at.channel + c),
            sum_of_window(*at.windows, 1, at.channel + c)};
  }
  const int first = at.format->first.digits;
  const int second = at.format->second.digits;
  const std::int64_t step = first + second + 1;
  const std::int64_t* here = at.words + (at.channel + c) * step;
  certain = without_flags(here + first + second, step);
  const Expansion s = sum_of_digits(here, step, first, at.format->first.unit, certain);
  return {s, sum_of_digits(here + first, step, second, at.format->second.unit, certain)};
}

void round_moments(const SumsAt& at, std::int64_t channels, double count, double eps, double* mean,
                   double* var, double* rstd, bool* done) {
  const __m256d n = _mm256_set1_pd(count);
  const __m256d zero = _mm256_setzero_pd();
  for (std::int64_t c = 0; c + 4 <= channels; c += 4) {
    __m256d certain;
    const auto [s, q] = sums_of(at, c, certain);
    certain = _mm256_and_pd(certain, _mm256_cmp_pd(s.error, zero, _CMP_EQ_OQ));
    const __m256d minus_high = _mm256_sub_pd(zero, s.high);
    Expansion spread;  // N*Q - S^2
    add_product(spread, n, q.high);
    add_product(spread, minus_high, s.high);
    add_product(spread, n, q.low);
    add_product(spread, _mm256_add_pd(minus_high, minus_high), s.low);
    add_product(spread, _mm256_sub_pd(zero, s.low), s.low);
    spread.error = _mm256_add_pd(spread.error, _mm256_mul_pd(n, _mm256_add_pd(q.error, q.error)));
    const __m256d means = _mm256_div_pd(rounded(s, certain), n);
    const __m256d d = _mm256_max_pd(rounded(spread, certain), zero);  // of zeros the second
    const __m256d vars = _mm256_div_pd(_mm256_div_pd(d, n), n);
    const __m256d deviation = _mm256_sqrt_pd(_mm256_add_pd(vars, _mm256_set1_pd(eps)));
    _mm256_storeu_pd(mean + c, means);
    _mm256_storeu_pd(var + c, vars);
    _mm256_storeu_pd(rstd + c, _mm256_div_pd(_mm256_set1_pd(1.0), deviation));
    store_certain(certain, done + c);
  }
}

void round_sums(const SumsAt& at, std::int64_t channels, double* first, double* second,
                bool* done) {
  for (std::int64_t c = 0; c + 4 <= channels; c += 4) {
    __m256d certain;
    const auto [a, b] = sums_of(at, c, certain);
    _mm256_storeu_pd(first + c, rounded(a, certain));
    _mm256_storeu_pd(second + c, rounded(b, certain));
    store_certain(certain, done + c);
  }
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
