#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/cpu_passes.hpp"
#include "cpu/float_environment.hpp"
#include "cpu/kernels.hpp"
#include "statistics/finalize.hpp"

// Deals the element-wise passes to threads and vector kernels.
namespace syncbn::cpu {
namespace {

constexpr std::int64_t kElementsPerThread = 16384;
/// From this many output bytes on non-temporal stores pay, if runs are long enough that partly
/// written cache lines at their ends do not matter.
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;
constexpr std::int64_t kStreamRun = 8192;

Operand operand(const SampleView& view) {
  return {view.data, view.sample_stride, view.channel_stride, view.element_stride};
}

Layout common_layout(const SampleView& a, const SampleView& b, const SampleView& c) {
  const Layout ab = syncbn::common_layout(a, b);
  return ab == syncbn::common_layout(b, c) ? ab : Layout::kStrided;
}

/// Six arrays of padded channel constants in one allocation.
class Constants {
 public:
  explicit Constants(std::int64_t channels)
      : padded_((channels + kChannelPadding - 1) / kChannelPadding * kChannelPadding),
        values_(static_cast<std::size_t>(6 * padded_)) {}
  float* array(int i) { return values_.data() + i * padded_; }
  ElementConstants view() { return {array(0), array(1), array(2), array(3), array(4), array(5)}; }

 private:
  std::int64_t padded_;
  std::vector<float> values_;
};

void run(void (*planes)(DType, const ElementsTask&), void (*rows)(DType, const ElementsTask&),
         bool by_rows, ElementsTask task, const SampleView& x, Executor& executor) {
  task.channels = x.channels;
  task.plane = x.plane;
  const std::int64_t elements = x.samples * x.channels * x.plane;
  const auto size = static_cast<std::int64_t>(size_of(x.dtype));
  task.stream = elements * size >= kStreamBytes && (by_rows || x.plane * size >= kStreamRun);
  const std::int64_t blocks = (x.plane + kElementBlock - 1) / kElementBlock;
  const std::int64_t items = by_rows ? x.samples * x.plane : x.samples * x.channels * blocks;
  const std::int64_t grain = std::max<std::int64_t>(1, kElementsPerThread * items / elements);
  executor.parallel_for(0, items, grain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    ElementsTask part = task;
    part.begin = begin;
    part.end = end;
    (by_rows ? rows : planes)(x.dtype, part);
  });
}

bool vectorizable(const Kernels* kernels, DType dtype, Layout layout) {
  return kernels != nullptr && dtype != DType::kFloat64 && layout != Layout::kStrided;
}

}  // namespace

void normalize(const SampleView& x, const SampleView& y, const NormalizeConstants& constants,
               Executor& executor) {
  const Kernels* kernels = active_kernels();
  const Layout layout = syncbn::common_layout(x, y);
  if (!vectorizable(kernels, x.dtype, layout)) {
    reference::normalize(x, y, constants, executor);
    return;
  }
  const FloatEnvironment environment;
  Constants packed(x.channels);
  for (std::int64_t c = 0; c < x.channels; ++c) {
    const AffineF32 p =
        affine_f32(constants.mean[c], constants.rstd[c], constants.weight[c], constants.bias[c]);
    packed.array(0)[c] = p.mean_high;
    packed.array(1)[c] = p.mean_low;
    packed.array(2)[c] = p.a;
    packed.array(4)[c] = p.b;
  }
  ElementsTask task;
  task.x = operand(x);
  task.out = operand(y);
  task.constants = packed.view();
  run(kernels->normalize_planes, kernels->normalize_rows, layout == Layout::kRows, task, x,
      executor);
}

void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, Executor& executor) {
  const Kernels* kernels = active_kernels();
  const Layout layout = common_layout(dy, x, dx);
  if (!vectorizable(kernels, x.dtype, layout)) {
    reference::input_gradient(dy, x, dx, constants, executor);
    return;
  }
  const FloatEnvironment environment;
  Constants packed(x.channels);
  for (std::int64_t c = 0; c < x.channels; ++c) {
    const GradientF32 p = gradient_f32(constants.mean[c], constants.rstd[c],
                                       {constants.c1[c], constants.c2[c], constants.c3[c]});
    packed.array(0)[c] = p.mean_high;
    packed.array(1)[c] = p.mean_low;
    packed.array(2)[c] = p.c1;
    packed.array(3)[c] = p.c2;
    packed.array(4)[c] = p.c3;
    packed.array(5)[c] = p.power;
  }
  ElementsTask task;
  task.x = operand(x);
  task.dy = operand(dy);
  task.out = operand(dx);
  task.constants = packed.view();
  run(kernels->gradient_planes, kernels->gradient_rows, layout == Layout::kRows, task, x, executor);
}

// Evaluation in training code is rare and off the critical path: the plain loops serve it.
void evaluation_input_gradient(const SampleView& dy, const SampleView& dx, const double* c1,
                               Executor& executor) {
  reference::evaluation_input_gradient(dy, dx, c1, executor);
}

}  // namespace syncbn::cpu
