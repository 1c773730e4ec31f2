#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/cpu_passes.hpp"
#include "cpu/float_environment.hpp"
#include "cpu/kernels.hpp"
#include "cpu/packed.hpp"
#include "statistics/activation.hpp"
#include "statistics/dtype.hpp"
#include "statistics/finalize.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

// Deals the element-wise passes to threads and vector kernels.
namespace syncbn::cpu {
namespace {

constexpr std::int64_t kElementsPerThread = 16384;
/// From this many output bytes on non-temporal stores pay; into fresh memory, from the second on.
constexpr std::int64_t kStreamBytes = std::int64_t{2} << 20;
constexpr std::int64_t kStreamFreshBytes = std::int64_t{8} << 20;

/// Whether the system has not given memory for these addresses yet, by a page in their middle. At
/// the first store it clears a page, in the caches, where plain stores find it.
bool is_fresh(const void* data, std::int64_t bytes) {
#if defined(__linux__)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto middle =
      reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes) / 2;
  unsigned char in_memory = 1;
  return mincore(reinterpret_cast<void*>(middle / page * page), 1, &in_memory) == 0 &&
         (in_memory & 1) == 0;
#else
  return false;
#endif
}

Layout layout_of(const SampleView& x, const SampleView* other, const SampleView& out) {
  return other == nullptr ? common_layout(x, out) : common_layout(x, *other, out);
}

/// As ElementsTask::run, of one tensor.
std::int64_t planes_without_gaps(const SampleView& view) {
  if (view.channels > 1 && view.channel_stride != view.plane) {
    return 1;
  }
  const bool whole = view.samples == 1 || view.sample_stride == view.channels * view.plane;
  return whole ? view.samples * view.channels : view.channels;
}

void run(ElementPass pass, ElementsTask task, const Kernels& kernels, bool by_rows,
         const SampleView& x, const SampleView* other, const SampleView& out, Executor& executor) {
  set_tensors(task, x, other, out);
  const std::int64_t elements = x.samples * x.channels * x.plane;
  const auto size = static_cast<std::int64_t>(size_of(x.dtype));
  const bool may_stream = by_rows || task.run * x.plane * size >= kStreamRun;
  const std::int64_t bytes = elements * size;
  task.stream = may_stream && bytes >= kStreamBytes &&
                (bytes >= kStreamFreshBytes || !is_fresh(out.data, bytes));
  const std::int64_t blocks = (x.plane + kElementBlock - 1) / kElementBlock;
  const std::int64_t items = by_rows ? x.samples * x.plane : x.samples * x.channels * blocks;
  const std::int64_t grain = std::max<std::int64_t>(1, kElementsPerThread * items / elements);
  executor.parallel_for(0, items, grain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    ElementsTask part = task;
    part.begin = begin;
    part.end = end;
    (by_rows ? kernels.map_rows : kernels.map_planes)(x.dtype, pass, part);
  });
}

}  // namespace

void set_tensors(ElementsTask& task, const SampleView& x, const SampleView* other,
                 const SampleView& out) {
  task.x = operand(x);
  if (other != nullptr) {
    task.other = operand(*other);
  }
  task.out = operand(out);
  task.channels = x.channels;
  task.plane = x.plane;
  task.mask = x.mask;
  task.run = std::min({planes_without_gaps(x), planes_without_gaps(out),
                       planes_without_gaps(other == nullptr ? x : *other)});
}

PackedConstants::PackedConstants(std::int64_t channels)
    : padded_((channels + 2 * kChannelPadding - 1) / kChannelPadding * kChannelPadding),
      values_(static_cast<std::size_t>(kArrays * padded_)) {}

void PackedConstants::set_affine(const NormalizeConstants& from, std::int64_t begin,
                                 std::int64_t end) {
  float* arrays[kArrays];
  arrays_from(begin, arrays);
  active_kernels()->pack_affine(from.mean + begin, from.rstd + begin, from.weight + begin,
                                from.bias + begin, end - begin, arrays);
}

void PackedConstants::set_inverse(const NormalizeConstants& from, std::int64_t channels) {
  set_affine(from, 0, channels);
  for (std::int64_t c = 0; c < channels; ++c) {
    array(2)[c] = 1.0f / array(2)[c];
  }
}

void PackedConstants::set_gradient(const GradientConstants& from, std::int64_t begin,
                                   std::int64_t end) {
  float* arrays[kArrays];
  arrays_from(begin, arrays);
  active_kernels()->pack_gradient(from.mean + begin, from.rstd + begin, from.c1 + begin,
                                  from.c2 + begin, from.c3 + begin, end - begin, arrays);
}

ElementConstants PackedConstants::view() const {
  return {array(0), array(1), array(2), array(3), array(4), array(5), array(6), array(7)};
}

bool vectorizable(const Kernels* kernels, const SampleView& x, Layout layout,
                  const std::uint8_t* activation_mask) {
  return kernels != nullptr && is_vectorized(x.dtype) && layout != Layout::kStrided &&
         (activation_mask == nullptr ||
          ActivationMaskLayout(x).by_rows == (layout == Layout::kRows));
}

ActivationMaskOperand activation_mask_operand(const SampleView& x,
                                              const std::uint8_t* activation_mask) {
  const ActivationMaskLayout layout(x);
  return {const_cast<std::uint8_t*>(activation_mask), layout.sample_bytes, layout.run_bytes};
}

ActivationConstants activation_constants(const Activation& activation) {
  const ActivationTraits traits = traits_of(activation.kind);
  return {traits.zero, traits.scaled ? static_cast<float>(activation.negative_slope) : 1.0f};
}

void normalize(const SampleView& x, const SampleView* residual, const SampleView& y,
               std::uint8_t* activation_mask, const NormalizeConstants& constants,
               const Activation& activation, Executor& executor) {
  const Kernels* kernels = active_kernels();
  const Layout layout = layout_of(x, residual, y);
  if (!vectorizable(kernels, x, layout, activation_mask)) {
    reference::normalize(x, residual, y, activation_mask, constants, activation, executor);
    return;
  }
  const FloatEnvironment environment;
  PackedConstants packed(x.channels);
  packed.set_affine(constants, 0, x.channels);
  ElementsTask task;
  task.constants = packed.view();
  task.activation = activation_constants(activation);
  task.activation_mask = activation_mask_operand(x, activation_mask);
  const ElementPass pass = residual != nullptr ? ElementPass::kNormalizeResidual
                           : activation.kind != ActivationKind::kNone
                               ? ElementPass::kNormalizeActivated
                               : ElementPass::kNormalize;
  run(pass, task, *kernels, layout == Layout::kRows, x, residual, y, executor);
}

void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, const Pullback& pullback,
                    Executor& executor) {
  const Kernels* kernels = active_kernels();
  const Layout layout = layout_of(x, &dy, dx);
  if (!vectorizable(kernels, x, layout, pullback.activation_mask)) {
    reference::input_gradient(dy, x, dx, constants, pullback, executor);
    return;
  }
  const FloatEnvironment environment;
  PackedConstants packed(x.channels);
  packed.set_gradient(constants, 0, x.channels);
  ElementsTask task;
  task.activation = activation_constants(pullback.activation);
  ElementPass pass = ElementPass::kGradient;
  if (pullback.activation.kind != ActivationKind::kNone) {
    pass = pullback.activation_mask != nullptr ? ElementPass::kGradientActivationMask
                                               : ElementPass::kGradientActivated;
    task.activation_mask = activation_mask_operand(x, pullback.activation_mask);
    if (pullback.activation_mask == nullptr) {
      packed.set_affine(pullback.affine, 0, x.channels);
    }
  }
  task.constants = packed.view();
  run(pass, task, *kernels, layout == Layout::kRows, x, &dy, dx, executor);
}

// Evaluation in training code is rare and off the critical path: the plain loops serve it.
void evaluation_input_gradient(const SampleView& u, const SampleView& dx, const double* c1,
                               Executor& executor) {
  reference::evaluation_input_gradient(u, dx, c1, executor);
}

void recover_input(const SampleView& y, const SampleView& x, std::uint8_t* activation_mask,
                   const NormalizeConstants& constants, double negative_slope, Executor& executor) {
  const Kernels* kernels = active_kernels();
  const Layout layout = common_layout(y, x);
  if (!vectorizable(kernels, y, layout, activation_mask)) {
    reference::recover_input(y, x, activation_mask, constants, negative_slope, executor);
    return;
  }
  const FloatEnvironment environment;
  PackedConstants packed(y.channels);
  packed.set_inverse(constants, y.channels);
  ElementsTask task;
  task.constants = packed.view();
  task.activation = {false, 1.0f / static_cast<float>(negative_slope)};
  task.activation_mask = activation_mask_operand(y, activation_mask);
  run(ElementPass::kRecover, task, *kernels, layout == Layout::kRows, y, nullptr, x, executor);
}

}  // namespace syncbn::cpu
