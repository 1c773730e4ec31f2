#include <vector>

#include "cpu/blocks.hpp"
#include "cpu/cpu_passes.hpp"
#include "cpu/finalize.hpp"
#include "cpu/float_environment.hpp"
#include "cpu/sums.hpp"
#include "statistics/dtype.hpp"

// A group of one rank: statistics straight from the windows that hold its sums.
namespace syncbn::cpu {
namespace {

class MomentsSink final : public SumsSink {
 public:
  MomentsSink(DType dtype, const Moments& to) : dtype_(dtype), to_(to) {}
  void publish(Windows& windows, std::int64_t begin) override {
    finalize_moments(dtype_, windows, begin, to_);
  }

 private:
  DType dtype_;
  const Moments& to_;
};

class GradientsSink final : public SumsSink {
 public:
  GradientsSink(DType dtype, const Gradients& to) : dtype_(dtype), to_(to) {}
  void publish(Windows& windows, std::int64_t begin) override {
    finalize_gradients(dtype_, windows, begin, to_);
  }

 private:
  DType dtype_;
  const Gradients& to_;
};

/// What the plain loops sum, they sum to words.
template <class Sum, class Finalize>
void by_words(const SampleView& x, const Sum& sum, const Finalize& finalize, Executor& executor) {
  constexpr std::int64_t kGrain = 64;
  std::vector<std::int64_t> words(
      static_cast<std::size_t>(x.channels * format_of(x.dtype).words()));
  sum(words.data());
  executor.parallel_for(0, x.channels, kGrain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    finalize(words.data(), begin, end);
  });
}

void moments(const VectorSums& sums, const SampleView& x, const Moments& to, Executor& executor) {
  if (sums.possible()) {
    MomentsSink sink(x.dtype, to);
    sums.run(sink, executor);
    return;
  }
  by_words(
      x, [&](std::int64_t* words) { reference::moment_sums(x, words, executor); },
      [&](const std::int64_t* words, std::int64_t begin, std::int64_t end) {
        finalize_moments(x.dtype, words, begin, end, to);
      },
      executor);
}

void gradients(const VectorSums& sums, const SampleView& dy, const SampleView& x,
               const SampleView* u, const Pullback& pullback, const Gradients& to,
               Executor& executor) {
  if (sums.possible()) {
    GradientsSink sink(x.dtype, to);
    sums.run(sink, executor);
    return;
  }
  by_words(
      x,
      [&](std::int64_t* words) { reference::gradient_sums(dy, x, u, words, pullback, executor); },
      [&](const std::int64_t* words, std::int64_t begin, std::int64_t end) {
        finalize_gradients(x.dtype, words, begin, end, to);
      },
      executor);
}

}  // namespace

void moments_of_one_rank(const SampleView& x, const Moments& to, Executor& executor) {
  moments(VectorSums(x), x, to, executor);
}

void gradients_of_one_rank(const SampleView& dy, const SampleView& x, const SampleView* u,
                           const Pullback& pullback, const Gradients& to, Executor& executor) {
  gradients(VectorSums(dy, x, u, pullback), dy, x, u, pullback, to, executor);
}

void forward_of_one_rank(const SampleView& x, const SampleView* residual, const SampleView& y,
                         std::uint8_t* activation_mask, const double* weight, const double* bias,
                         const Activation& activation, const Moments& to, Executor& executor) {
  const NormalizeConstants constants{to.mean, to.rstd, weight, bias};
  const VectorSums sums(x);
  VectorMap map(x, residual, y, activation_mask, activation);
  const auto set_constants = [&](std::int64_t begin, std::int64_t end) {
    map.constants().set_affine(constants, begin, end);
  };
  const std::int64_t block =
      may_overlap(x, y) ? 0
                        : block_channels(x, sums, map, Direction::kForward, executor.concurrency());
  if (block != 0) {
    MomentsSink sink(x.dtype, to);
    run_in_blocks(x, sums, map, sink, block, set_constants, executor);
    return;
  }
  moments(sums, x, to, executor);
  if (map.possible()) {
    const FloatEnvironment environment;
    set_constants(0, x.channels);
    map.run(executor);
  } else {
    reference::normalize(x, residual, y, activation_mask, constants, activation, executor);
  }
}

void backward_of_one_rank(const SampleView& dy, const SampleView& x, const SampleView* u,
                          const SampleView& dx, const Pullback& pullback, const Gradients& to,
                          Executor& executor) {
  // What came back through the activation is in u, if that is there.
  const SampleView& from = u == nullptr ? dy : *u;
  const Pullback rest = u == nullptr ? pullback : Pullback{{}, {}, nullptr};
  const double* c = to.coefficients;
  const GradientConstants constants{to.mean, to.rstd, c, c + to.channels, c + 2 * to.channels};
  const VectorSums sums(dy, x, u, pullback);
  VectorMap map(from, x, dx, rest);
  const auto set_constants = [&](std::int64_t begin, std::int64_t end) {
    map.constants().set_gradient(constants, begin, end);
  };
  const bool overlap = may_overlap(dx, x) || may_overlap(dx, dy) || may_overlap(dx, from);
  const std::int64_t block =
      overlap ? 0 : block_channels(x, sums, map, Direction::kBackward, executor.concurrency());
  if (block != 0) {
    GradientsSink sink(x.dtype, to);
    run_in_blocks(x, sums, map, sink, block, set_constants, executor);
    return;
  }
  gradients(sums, dy, x, u, pullback, to, executor);
  if (map.possible()) {
    const FloatEnvironment environment;
    set_constants(0, x.channels);
    map.run(executor);
  } else {
    reference::input_gradient(from, x, dx, constants, rest, executor);
  }
}

}  // namespace syncbn::cpu
