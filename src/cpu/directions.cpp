// SPDX-License-Identifier: Apache-2.0
#include "cpu/blocks.hpp"
#include "cpu/cpu_passes.hpp"
#include "cpu/finalize.hpp"
#include "cpu/sums.hpp"
#include "statistics/dtype.hpp"
#include "tensors/scratch.hpp"

// Sums, what becomes of them, and the element-wise pass: on one rank, where statistics come
// straight from the windows that hold the sums, and in a group, where they come from words of all
// ranks.
namespace syncbn::cpu {
namespace {

/// Channels at which a second thread pays where integers finalize.
constexpr std::int64_t kGrainOfLoops = 64;

struct Forward {
  static constexpr Direction kDirection = Direction::kForward;
  using Statistics = Moments;

  Forward(const SampleView& input, const SampleView* added, const SampleView& output,
          std::uint8_t* bits, const double* weight, const double* bias, const Activation& function,
          const Moments& to)
      : x(input),
        residual(added),
        y(output),
        activation_mask(bits),
        constants{to.mean, to.rstd, weight, bias},
        activation(function),
        sums(input),
        map(input, added, output, bits, function) {}

  bool overlap() const { return may_overlap(x, y); }
  void set_constants(std::int64_t begin, std::int64_t end) {
    map.constants().set_affine(constants, begin, end);
  }
  void sum_by_loops(std::int64_t* words, Executor& executor) const {
    reference::gradient_sums(x, x, nullptr, words, {}, executor);
  }
  void map_by_loops(Executor& executor) const {
    reference::normalize(x, residual, y, activation_mask, constants, activation, executor);
  }

  const SampleView& x;
  const SampleView* residual;
  const SampleView& y;
  std::uint8_t* activation_mask;
  NormalizeConstants constants;
  const Activation& activation;
  VectorSums sums;
  VectorMap map;
};

struct Backward {
  static constexpr Direction kDirection = Direction::kBackward;
  using Statistics = Gradients;

  Backward(const SampleView& gradient, const SampleView& input, const SampleView* kept,
           const SampleView& output, const Pullback& through, const Gradients& to)
      : dy(gradient),
        x(input),
        u(kept),
        dx(output),
        pullback(through),
        from(kept == nullptr ? gradient : *kept),
        rest(kept == nullptr ? through : Pullback{{}, {}, nullptr}),
        constants{to.mean, to.rstd, to.coefficients, to.coefficients + to.channels,
                  to.coefficients + 2 * to.channels},
        sums(gradient, input, kept, through),
        map(from, input, output, rest) {}

  bool overlap() const {
    return may_overlap(dx, x) || may_overlap(dx, dy) || may_overlap(dx, from);
  }
  void set_constants(std::int64_t begin, std::int64_t end) {
    map.constants().set_gradient(constants, begin, end);
  }
  void sum_by_loops(std::int64_t* words, Executor& executor) const {
    reference::gradient_sums(dy, x, u, words, pullback, executor);
  }
  void map_by_loops(Executor& executor) const {
    reference::input_gradient(from, x, dx, constants, rest, executor);
  }

  const SampleView& dy;
  const SampleView& x;
  const SampleView* u;
  const SampleView& dx;
  const Pullback& pullback;
  const SampleView& from;  ///< what came back through the activation is in u, if that is there
  Pullback rest;
  GradientConstants constants;
  VectorSums sums;
  VectorMap map;
};

/// The statistics of one rank.
template <class Statistics>
class StatisticsSink final : public SumsSink {
 public:
  StatisticsSink(DType dtype, const Statistics& to) : dtype_(dtype), to_(to) {}
  void publish(Windows& windows, std::int64_t begin) override {
    finalize(dtype_, windows, begin, to_);
  }

 private:
  DType dtype_;
  const Statistics& to_;
};

/// loops(words): the sums where the vector kernels cannot.
template <class Statistics, class Loops>
void statistics_alone(const VectorSums& sums, const SampleView& x, const Loops& loops,
                      const Statistics& to, Executor& executor) {
  if (sums.possible()) {
    StatisticsSink<Statistics> sink(x.dtype, to);
    sums.run(sink, executor);
    return;
  }
  const ScratchArray<std::int64_t> words(
      static_cast<std::size_t>(x.channels * format_of(x.dtype).words()));
  loops(words.data());
  executor.parallel_for(0, x.channels, kGrainOfLoops, [&](std::int64_t begin, std::int64_t end) {
    finalize(x.dtype, words.data(), begin, end, to);
  });
}

template <class One>
std::int64_t block_of(const One& one, Executor& executor) {
  return one.overlap()
             ? 0
             : block_channels(one.x, one.sums, one.map, One::kDirection, executor.concurrency());
}

template <class One>
void map_all(One& one, Executor& executor) {
  if (!one.map.possible()) {
    one.map_by_loops(executor);
    return;
  }
  one.set_constants(0, one.x.channels);
  one.map.run(executor);
}

template <class One>
void alone(One one, const typename One::Statistics& to, Executor& executor) {
  const std::int64_t block = block_of(one, executor);
  if (block != 0) {
    StatisticsSink<typename One::Statistics> sink(one.x.dtype, to);
    run_in_blocks(
        one.x, one.sums, one.map, sink, block,
        [&](std::int64_t begin, std::int64_t end) { one.set_constants(begin, end); }, executor);
    return;
  }
  statistics_alone(
      one.sums, one.x, [&](std::int64_t* words) { one.sum_by_loops(words, executor); }, to,
      executor);
  map_all(one, executor);
}

template <class One>
bool in_group(One one, std::int64_t* words, GroupSums& group, Executor& executor) {
  const std::int64_t channels = one.x.channels;
  const std::int64_t block = group.streams() ? block_of(one, executor) : 0;
  if (block == 0) {
    sum_words(one.sums, one.x.dtype, words, executor, [&] { one.sum_by_loops(words, executor); });
    group.publish(channels);
  } else {
    WordsSink sink(one.x.dtype, words);
    const auto set_constants = [&](std::int64_t begin, std::int64_t end) {
      group.finalize(begin, end);
      one.set_constants(begin, end);
    };
    if (run_in_waves(one.x, one.sums, one.map, sink, block, group, set_constants, executor)) {
      return true;
    }
  }
  if (!group.wait(channels)) {
    return false;
  }
  for_each_channel(channels, executor,
                   [&](std::int64_t begin, std::int64_t end) { group.finalize(begin, end); });
  map_all(one, executor);
  return true;
}

}  // namespace

void forward_of_one_rank(const SampleView& x, const SampleView* residual, const SampleView& y,
                         std::uint8_t* activation_mask, const double* weight, const double* bias,
                         const Activation& activation, const Moments& to, Executor& executor) {
  alone(Forward(x, residual, y, activation_mask, weight, bias, activation, to), to, executor);
}

void backward_of_one_rank(const SampleView& dy, const SampleView& x, const SampleView* u,
                          const SampleView& dx, const Pullback& pullback, const Gradients& to,
                          Executor& executor) {
  alone(Backward(dy, x, u, dx, pullback, to), to, executor);
}

bool forward_in_group(const SampleView& x, const SampleView* residual, const SampleView& y,
                      std::uint8_t* activation_mask, const double* weight, const double* bias,
                      const Activation& activation, const Moments& to, std::int64_t* words,
                      GroupSums& group, Executor& executor) {
  return in_group(Forward(x, residual, y, activation_mask, weight, bias, activation, to), words,
                  group, executor);
}

bool backward_in_group(const SampleView& dy, const SampleView& x, const SampleView* u,
                       const SampleView& dx, const Pullback& pullback, const Gradients& to,
                       std::int64_t* words, GroupSums& group, Executor& executor) {
  return in_group(Backward(dy, x, u, dx, pullback, to), words, group, executor);
}

}  // namespace syncbn::cpu
