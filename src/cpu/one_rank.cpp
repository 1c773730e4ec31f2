#include <vector>

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

}  // namespace

void moments_of_one_rank(const SampleView& x, const Moments& to, Executor& executor) {
  const VectorSums sums(x);
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

void gradients_of_one_rank(const SampleView& dy, const SampleView& x, const SampleView* u,
                           const Pullback& pullback, const Gradients& to, Executor& executor) {
  const VectorSums sums(dy, x, u, pullback);
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

}  // namespace syncbn::cpu
