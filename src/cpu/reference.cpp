#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/cpu_passes.hpp"
#include "cpu/float_environment.hpp"
#include "statistics/finalize.hpp"
#include "statistics/format.hpp"
#include "statistics/slots.hpp"

// docs/numerics.md as plain loops, one element at a time.
namespace syncbn::cpu::reference {
namespace {

/// One lane: a double for inputs of at most 32 bits, a compensated pair for float64.
template <class T>
struct Lane {
  double sum = 0.0;
  void add(T u) { sum += to_double(u); }
  void add_product(T u, T v) { sum = std::fma(to_double(u), to_double(v), sum); }
  void fold(const Lane& other) { sum += other.sum; }
  double rest() const { return 0.0; }
};

template <>
struct Lane<double> {
  double sum = 0.0;
  double carry = 0.0;
  void add(double u) {
    const TwoSumResult t = two_sum(sum, u);
    sum = t.sum;
    carry += t.error;
  }
  void add_product(double u, double v) {
    const double product = u * v;
    const double error = std::fma(u, v, -product);
    const TwoSumResult t = two_sum(sum, product);
    sum = t.sum;
    carry += error + t.error;
  }
  void fold(const Lane& other) {
    const TwoSumResult t = two_sum(sum, other.sum);
    sum = t.sum;
    carry = (carry + other.carry) + t.error;
  }
  double rest() const { return carry; }
};

template <class LaneType>
void fold(LaneType* lanes) {
  for (int h = kLanes / 2; h >= 1; h /= 2) {
    for (int l = 0; l < h; ++l) {
      lanes[l].fold(lanes[l + h]);
    }
  }
}

/// Merges one segment's partial(s); returns the flag to raise, if any.
std::int64_t merge(double sum, double rest, std::int64_t* slots, int unit, bool first) {
  if (!is_finite(sum)) {
    return first ? first_sum_flag(sum) : kSecondNonFinite;
  }
  add_partial(slots, sum, unit);
  if (is_finite(rest)) {
    add_partial(slots, rest, unit);
  }
  return 0;
}

template <class T>
void channel_sums(const SampleView& u, const SampleView& v, std::int64_t c, const Format& format,
                  std::int64_t* slots, std::int64_t* words) {
  std::fill_n(slots, format.slots(), 0);
  std::int64_t flags = 0;
  const T* u_data = static_cast<const T*>(u.data);
  const T* v_data = static_cast<const T*>(v.data);
  for (std::int64_t n = 0; n < u.samples; ++n) {
    PlaneCursor u_at(u, n, c, 0);
    PlaneCursor v_at(v, n, c, 0);
    for (std::int64_t begin = 0; begin < u.plane; begin += kSegment) {
      Lane<T> first[kLanes];
      Lane<T> second[kLanes];
      const std::int64_t length = std::min<std::int64_t>(kSegment, u.plane - begin);
      for (std::int64_t e = 0; e < length; ++e, u_at.advance(), v_at.advance()) {
        const T a = u_data[u_at.offset()];
        first[e % kLanes].add(a);
        second[e % kLanes].add_product(a, v_data[v_at.offset()]);
      }
      fold(first);
      fold(second);
      flags |= merge(first[0].sum, first[0].rest(), slots, format.first.unit, true);
      flags |= merge(second[0].sum, second[0].rest(), slots + format.first.slots,
                     format.second.unit, false);
    }
  }
  slots_to_digits(slots, format.first.slots, words, format.first.digits);
  slots_to_digits(slots + format.first.slots, format.second.slots, words + format.first.digits,
                  format.second.digits);
  words[format.words() - 1] = flags;
}

/// Calls body(n, c) for all planes of the view, on the executor's threads.
template <class Body>
void for_each_plane(const SampleView& x, Executor& executor, const Body& body) {
  executor.parallel_for(0, x.samples * x.channels, std::max<std::int64_t>(1, 4096 / x.plane),
                        [&](std::int64_t begin, std::int64_t end) {
                          const FloatEnvironment environment;
                          for (std::int64_t i = begin; i < end; ++i) {
                            body(i / x.channels, i % x.channels);
                          }
                        });
}

template <class T, class Function>
void map_plane(const SampleView& in, const SampleView& out, std::int64_t n, std::int64_t c,
               const Function& function) {
  const T* in_data = static_cast<const T*>(in.data);
  T* out_data = static_cast<T*>(const_cast<void*>(out.data));
  PlaneCursor from(in, n, c, 0);
  PlaneCursor to(out, n, c, 0);
  for (std::int64_t e = 0; e < in.plane; ++e, from.advance(), to.advance()) {
    out_data[to.offset()] = function(in_data[from.offset()]);
  }
}

template <class T, class Function>
void map_planes(const SampleView& a, const SampleView& b, const SampleView& out, std::int64_t n,
                std::int64_t c, const Function& function) {
  const T* a_data = static_cast<const T*>(a.data);
  const T* b_data = static_cast<const T*>(b.data);
  T* out_data = static_cast<T*>(const_cast<void*>(out.data));
  PlaneCursor a_at(a, n, c, 0);
  PlaneCursor b_at(b, n, c, 0);
  PlaneCursor to(out, n, c, 0);
  for (std::int64_t e = 0; e < a.plane; ++e, a_at.advance(), b_at.advance(), to.advance()) {
    out_data[to.offset()] = function(a_data[a_at.offset()], b_data[b_at.offset()]);
  }
}

template <class T>
T rounded(float v) {
  T out;
  from_float(v, out);
  return out;
}

template <class T>
void normalize_plane(const SampleView& x, const SampleView& y, const NormalizeConstants& k,
                     std::int64_t n, std::int64_t c) {
  if constexpr (sizeof(T) == 8) {
    const double w = k.weight[c] * k.rstd[c];
    map_plane<T>(x, y, n, c, [&](double v) { return std::fma(w, v - k.mean[c], k.bias[c]); });
  } else {
    const AffineF32 p = affine_f32(k.mean[c], k.rstd[c], k.weight[c], k.bias[c]);
    map_plane<T>(x, y, n, c, [&](T v) {
      const float t = (to_float(v) - p.mean_high) - p.mean_low;
      return rounded<T>(std::fma(p.a, t, p.b));
    });
  }
}

template <class T>
void gradient_plane(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& k, std::int64_t n, std::int64_t c) {
  const Coefficients coefficients{k.c1[c], k.c2[c], k.c3[c]};
  if constexpr (sizeof(T) == 8) {
    map_planes<T>(dy, x, dx, n, c, [&](double u, double v) {
      return std::fma(coefficients.c1, u,
                      std::fma(coefficients.c2, v - k.mean[c], coefficients.c3));
    });
  } else {
    const GradientF32 p = gradient_f32(k.mean[c], k.rstd[c], coefficients);
    map_planes<T>(dy, x, dx, n, c, [&](T u, T v) {
      const float t = (to_float(v) - p.mean_high) - p.mean_low;
      return rounded<T>(std::fma(p.c1, to_float(u), std::fma(p.c2, t * p.power, p.c3)));
    });
  }
}

template <class T>
void evaluation_plane(const SampleView& dy, const SampleView& dx, double c1, std::int64_t n,
                      std::int64_t c) {
  if constexpr (sizeof(T) == 8) {
    map_plane<T>(dy, dx, n, c, [&](double u) { return c1 * u; });
  } else {
    const float w = static_cast<float>(c1);
    map_plane<T>(dy, dx, n, c, [&](T u) { return rounded<T>(w * to_float(u)); });
  }
}

/// Calls function with a value of the element type.
template <class Function>
void by_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function(Half{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat32:
      return function(float{});
    case DType::kFloat64:
      return function(double{});
  }
}

}  // namespace

void local_sums(const SampleView& u, const SampleView* v, std::int64_t* words, Executor& executor) {
  const Format& format = format_of(u.dtype);
  executor.parallel_for(0, u.channels, 1, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    std::vector<std::int64_t> slots(static_cast<std::size_t>(format.slots()));
    for (std::int64_t c = begin; c < end; ++c) {
      by_type(u.dtype, [&](auto type) {
        channel_sums<decltype(type)>(u, v == nullptr ? u : *v, c, format, slots.data(),
                                     words + c * format.words());
      });
    }
  });
}

void normalize(const SampleView& x, const SampleView& y, const NormalizeConstants& constants,
               Executor& executor) {
  by_type(x.dtype, [&](auto type) {
    for_each_plane(x, executor, [&](std::int64_t n, std::int64_t c) {
      normalize_plane<decltype(type)>(x, y, constants, n, c);
    });
  });
}

void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, Executor& executor) {
  by_type(x.dtype, [&](auto type) {
    for_each_plane(x, executor, [&](std::int64_t n, std::int64_t c) {
      gradient_plane<decltype(type)>(dy, x, dx, constants, n, c);
    });
  });
}

void evaluation_input_gradient(const SampleView& dy, const SampleView& dx, const double* c1,
                               Executor& executor) {
  by_type(dy.dtype, [&](auto type) {
    for_each_plane(dy, executor, [&](std::int64_t n, std::int64_t c) {
      evaluation_plane<decltype(type)>(dy, dx, c1[c], n, c);
    });
  });
}

}  // namespace syncbn::cpu::reference
