// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "cpu/cpu_passes.hpp"
#include "statistics/dtype.hpp"
#include "statistics/elements.hpp"
#include "statistics/finalize.hpp"
#include "statistics/lanes.hpp"
#include "statistics/slots.hpp"
#include "tensors/activation_mask.hpp"

// docs/numerics.md as plain loops, one element at a time.
namespace syncbn::cpu::reference {
namespace {

/// Merges one segment's partial(s); returns the flag to raise, if any.
std::int64_t merge(double sum, double rest, const ExactSum& to, bool first) {
  if (is_finite(sum)) {
    to.add(sum);
    if (is_finite(rest)) {
      to.add(rest);
    }
  }
  return partial_flag(sum, first);
}

/// Sums of u and u*x of channel c, u(n, e, dy, x) being what becomes of dy.
template <class T, class U>
void channel_sums(const SampleView& dy, const SampleView& x, std::int64_t c, const Format& format,
                  std::int64_t* slots, std::int64_t* words, const U& u) {
  std::fill_n(slots, format.slots(), 0);
  const ExactSum sum = exact_sum(slots, format, true), products = exact_sum(slots, format, false);
  std::int64_t flags = 0;
  const T* dy_data = static_cast<const T*>(dy.data);
  const T* x_data = static_cast<const T*>(x.data);
  for (std::int64_t n = 0; n < x.samples; ++n) {
    PlaneCursor dy_at(dy, n, c, 0);
    PlaneCursor x_at(x, n, c, 0);
    for (std::int64_t begin = 0; begin < x.plane; begin += kSegment) {
      Lane<T> first[kLanes];
      Lane<T> second[kLanes];
      const std::int64_t length = std::min<std::int64_t>(kSegment, x.plane - begin);
      for (std::int64_t e = 0; e < length; ++e, dy_at.advance(), x_at.advance()) {
        if (!x.counts(n, begin + e)) {
          continue;
        }
        const T b = x_data[x_at.offset()];
        const T a = u(n, begin + e, dy_data[dy_at.offset()], b);
        first[e % kLanes].add(to_double(a));
        second[e % kLanes].add_product(to_double(a), to_double(b));
      }
      fold(first);
      fold(second);
      flags |= merge(first[0].sum, first[0].rest(), sum, true);
      flags |= merge(second[0].sum, second[0].rest(), products, false);
    }
  }
  sum.write(words);
  products.write(words + format.first.digits);
  words[format.words() - 1] = flags;
}

/// v of channel c before residual and activation.
template <class T>
Affine<T> affine_of(const NormalizeConstants& k, std::int64_t c) {
  return Affine<T>(k.mean[c], k.rstd[c], k.weight[c], k.bias[c]);
}

void set_bit(std::uint8_t* bits, std::int64_t bit, bool value) {
  std::uint8_t& byte = bits[bit / 8];
  const auto one = static_cast<std::uint8_t>(1u << (bit % 8));
  byte = static_cast<std::uint8_t>(value ? byte | one : byte & ~one);
}

/// dy of one channel pulled back through the activation.
template <class T>
class PullbackOf {
 public:
  PullbackOf(const Pullback& pullback, const SampleView& x, std::int64_t c)
      : activation_mask_(pullback.activation_mask),
        layout_(x),
        channel_(c),
        activation_(pullback.activation) {
    if (activation_mask_ == nullptr && pullback.activation.kind != ActivationKind::kNone) {
      affine_.emplace(affine_of<T>(pullback.affine, c));
    }
  }
  T operator()(std::int64_t n, std::int64_t e, T dy, T x) const {
    if (affine_.has_value()) {
      return activation_.gradient(dy, activation_.passes((*affine_)(x)));
    }
    if (activation_mask_ == nullptr) {
      return dy;
    }
    const std::int64_t bit = layout_.bit(n, channel_, e);
    return activation_.gradient(dy, (activation_mask_[bit / 8] >> (bit % 8) & 1) != 0);
  }

 private:
  const std::uint8_t* activation_mask_;
  ActivationMaskLayout layout_;
  std::int64_t channel_;
  ActivationOf<T> activation_;
  std::optional<Affine<T>> affine_;
};

/// Calls body(n, c) for all planes of the view, on the executor's threads, `at_once` of them (a
/// divisor of their number) on one thread.
template <class Body>
void for_each_plane(const SampleView& x, std::int64_t at_once, Executor& executor,
                    const Body& body) {
  const std::int64_t items = x.samples * x.channels / at_once;
  executor.parallel_for(0, items, std::max<std::int64_t>(1, 4096 / (x.plane * at_once)),
                        [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t i = begin * at_once; i < end * at_once; ++i) {
                            body(i / x.channels, i % x.channels);
                          }
                        });
}

/// out = function(e, a, b) along plane (n, c), and +0 where an element of x does not count.
template <class T, class Function>
void map_plane(const SampleView& x, const SampleView& a, const SampleView& b, const SampleView& out,
               std::int64_t n, std::int64_t c, const Function& function) {
  const T* a_data = static_cast<const T*>(a.data);
  const T* b_data = static_cast<const T*>(b.data);
  T* out_data = static_cast<T*>(const_cast<void*>(out.data));
  PlaneCursor a_at(a, n, c, 0);
  PlaneCursor b_at(b, n, c, 0);
  PlaneCursor to(out, n, c, 0);
  for (std::int64_t e = 0; e < x.plane; ++e, a_at.advance(), b_at.advance(), to.advance()) {
    out_data[to.offset()] =
        x.counts(n, e) ? function(e, a_data[a_at.offset()], b_data[b_at.offset()]) : T{};
  }
}

template <class T>
void normalize_plane(const SampleView& x, const SampleView* residual, const SampleView& y,
                     std::uint8_t* activation_mask, const NormalizeConstants& k,
                     const Activation& activation, std::int64_t n, std::int64_t c) {
  const Affine<T> affine = affine_of<T>(k, c);
  const ActivationOf<T> activate(activation);
  const ActivationMaskLayout layout(x);
  map_plane<T>(x, x, residual == nullptr ? x : *residual, y, n, c,
               [&](std::int64_t e, T value, T other) {
                 Wide<T> v = affine(value);
                 if (residual != nullptr) {
                   v += widened(other);
                 }
                 if (activation_mask != nullptr) {
                   set_bit(activation_mask, layout.bit(n, c, e), activate.passes(v));
                 }
                 return rounded<T>(activate.value(v));
               });
}

template <class T>
void gradient_plane(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& k, const Pullback& pullback, std::int64_t n,
                    std::int64_t c) {
  const PullbackOf<T> pull(pullback, x, c);
  const InputGradientOf<T> gradient(k.mean[c], k.rstd[c], {k.c1[c], k.c2[c], k.c3[c]});
  map_plane<T>(x, dy, x, dx, n, c,
               [&](std::int64_t e, T u, T v) { return gradient(pull(n, e, u, v), v); });
}

}  // namespace

void gradient_sums(const SampleView& dy, const SampleView& x, const SampleView* u,
                   std::int64_t* words, const Pullback& pullback, Executor& executor) {
  const Format& format = format_of(x.dtype);
  executor.parallel_for(0, x.channels, 1, [&](std::int64_t begin, std::int64_t end) {
    std::array<std::int64_t, kDoubleFormat.slots()> slots;  // the longest
    for (std::int64_t c = begin; c < end; ++c) {
      dispatch_dtype(x.dtype, [&](auto type) {
        using T = decltype(type);
        const PullbackOf<T> pull(pullback, x, c);
        channel_sums<T>(dy, x, c, format, slots.data(), words + c * format.words(), pull);
        for (std::int64_t n = 0; u != nullptr && n < x.samples; ++n) {
          map_plane<T>(x, dy, x, *u, n, c,
                       [&](std::int64_t e, T a, T b) { return pull(n, e, a, b); });
        }
      });
    }
  });
}

void normalize(const SampleView& x, const SampleView* residual, const SampleView& y,
               std::uint8_t* activation_mask, const NormalizeConstants& constants,
               const Activation& activation, Executor& executor) {
  dispatch_dtype(x.dtype, [&](auto type) {
    // Neighbouring channels may share a byte of the activation mask: then whole samples go to a
    // thread.
    const std::int64_t at_once = activation_mask == nullptr ? 1 : x.channels;
    for_each_plane(x, at_once, executor, [&](std::int64_t n, std::int64_t c) {
      normalize_plane<decltype(type)>(x, residual, y, activation_mask, constants, activation, n, c);
    });
  });
}

void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, const Pullback& pullback,
                    Executor& executor) {
  dispatch_dtype(x.dtype, [&](auto type) {
    for_each_plane(x, 1, executor, [&](std::int64_t n, std::int64_t c) {
      gradient_plane<decltype(type)>(dy, x, dx, constants, pullback, n, c);
    });
  });
}

void evaluation_input_gradient(const SampleView& u, const SampleView& dx, const double* c1,
                               Executor& executor) {
  dispatch_dtype(u.dtype, [&](auto type) {
    using T = decltype(type);
    for_each_plane(u, 1, executor, [&](std::int64_t n, std::int64_t c) {
      const auto w = static_cast<Wide<T>>(c1[c]);
      map_plane<T>(u, u, u, dx, n, c,
                   [&](std::int64_t, T v, T) { return rounded<T>(w * widened(v)); });
    });
  });
}

void recover_input(const SampleView& y, const SampleView& x, std::uint8_t* activation_mask,
                   const NormalizeConstants& constants, double negative_slope, Executor& executor) {
  dispatch_dtype(y.dtype, [&](auto type) {
    using T = decltype(type);
    const Wide<T> factor = 1 / static_cast<Wide<T>>(negative_slope);
    const ActivationMaskLayout layout(y);
    for_each_plane(y, y.channels, executor, [&](std::int64_t n, std::int64_t c) {
      const Affine<T> affine = affine_of<T>(constants, c);
      map_plane<T>(y, y, y, x, n, c, [&](std::int64_t e, T value, T) {
        const Wide<T> v = widened(value);
        set_bit(activation_mask, layout.bit(n, c, e), v > 0);
        return affine.inverse(v > 0 ? v : v * factor);
      });
    });
  });
}

}  // namespace syncbn::cpu::reference
