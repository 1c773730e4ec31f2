// SPDX-License-Identifier: Apache-2.0
#include "cpu/elements.hpp"

#include <algorithm>
#include <cstddef>

#include "statistics/activation.hpp"
#include "statistics/dtype.hpp"

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

/// Tensors of so many bytes lie beyond the caches, beside others.
constexpr std::int64_t kBeyondCaches = std::int64_t{16} << 20;

/// Whether the system has not given memory for these addresses yet, by a page in their middle. At
/// the first store it clears a page, in the caches, where plain stores find it.
bool is_fresh([[maybe_unused]] const void* data, [[maybe_unused]] std::int64_t bytes) {
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

std::int64_t bytes_of(const SampleView& view) {
  return view.samples * view.channels * view.plane * static_cast<std::int64_t>(size_of(view.dtype));
}

/// Whether stores that go past the caches pay.
bool pays_to_stream(const ElementsTask& task, bool by_rows, const SampleView& out) {
  const auto size = static_cast<std::int64_t>(size_of(out.dtype));
  const std::int64_t bytes = bytes_of(out);
  return (by_rows || task.run * out.plane * size >= kStreamRun) && bytes >= kStreamBytes &&
         (bytes >= kStreamFreshBytes || !is_fresh(out.data, bytes));
}

ElementPass gradient_pass(const Pullback& pullback) {
  return pullback.activation.kind == ActivationKind::kNone ? ElementPass::kGradient
         : pullback.activation_mask != nullptr             ? ElementPass::kGradientActivationMask
                                                           : ElementPass::kGradientActivated;
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
      values_(static_cast<std::size_t>(kArrays * padded_) * sizeof(float)) {}

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

VectorMap::VectorMap(ElementPass pass, const SampleView& x, const SampleView* other,
                     const SampleView& out, const std::uint8_t* activation_mask,
                     const ActivationConstants& activation)
    : kernels_(active_kernels()), pass_(pass), x_(&x), packed_(x.channels) {
  const Layout layout = layout_of(x, other, out);
  rows_ = layout == Layout::kRows;
  possible_ = vectorizable(kernels_, x, layout, activation_mask);
  if (possible_) {
    set_tensors(task_, x, other, out);
    task_.constants = packed_.view();
    task_.activation = activation;
    task_.activation_mask = activation_mask_operand(x, activation_mask);
    task_.stream = pays_to_stream(task_, rows_, out);
    task_.beyond_caches = bytes_of(out) >= kBeyondCaches;
  }
}

VectorMap::VectorMap(const SampleView& x, const SampleView* residual, const SampleView& y,
                     const std::uint8_t* activation_mask, const Activation& activation)
    : VectorMap(residual != nullptr                        ? ElementPass::kNormalizeResidual
                : activation.kind != ActivationKind::kNone ? ElementPass::kNormalizeActivated
                                                           : ElementPass::kNormalize,
                x, residual, y, activation_mask, activation_constants(activation)) {}

VectorMap::VectorMap(const SampleView& dy, const SampleView& x, const SampleView& dx,
                     const Pullback& pullback)
    : VectorMap(
          gradient_pass(pullback), x, &dy, dx,
          pullback.activation.kind == ActivationKind::kNone ? nullptr : pullback.activation_mask,
          activation_constants(pullback.activation)) {
  if (possible_ && pass_ == ElementPass::kGradientActivated) {
    packed_.set_affine(pullback.affine, 0, x.channels);
  }
}

VectorMap::VectorMap(const SampleView& y, const SampleView& x, std::uint8_t* activation_mask,
                     const NormalizeConstants& constants, double negative_slope)
    : VectorMap(ElementPass::kRecover, y, nullptr, x, activation_mask,
                {false, 1.0f / static_cast<float>(negative_slope)}) {
  if (possible_) {
    packed_.set_inverse(constants, y.channels);
  }
}

void VectorMap::run(Executor& executor) const {
  const std::int64_t elements = x_->samples * x_->channels * x_->plane;
  const std::int64_t blocks = (x_->plane + kElementBlock - 1) / kElementBlock;
  const std::int64_t items = x_->samples * (rows_ ? x_->plane : x_->channels * blocks);
  const std::int64_t grain = std::max<std::int64_t>(1, kElementsPerThread * items / elements);
  executor.parallel_for(0, items, grain, [&](std::int64_t begin, std::int64_t end) {
    ElementsTask part = task_;
    part.begin = begin;
    part.end = end;
    run(part);
  });
}

ElementsTask VectorMap::task(std::int64_t begin, std::int64_t end) const {
  ElementsTask part = task_;
  const auto size = static_cast<std::int64_t>(size_of(x_->dtype));
  for (Operand* tensor : {&part.x, &part.other, &part.out}) {
    if (tensor->data != nullptr) {
      tensor->data =
          static_cast<const std::byte*>(tensor->data) + begin * tensor->channel_stride * size;
    }
  }
  part.constants = part.constants.from(begin);
  if (part.activation_mask.data != nullptr) {
    part.activation_mask.data += begin * part.activation_mask.run_bytes;
  }
  part.channels = end - begin;
  part.run = part.run == 1 ? 1 : part.channels;
  return part;
}

void normalize(const SampleView& x, const SampleView* residual, const SampleView& y,
               std::uint8_t* activation_mask, const NormalizeConstants& constants,
               const Activation& activation, Executor& executor) {
  VectorMap map(x, residual, y, activation_mask, activation);
  if (!map.possible()) {
    reference::normalize(x, residual, y, activation_mask, constants, activation, executor);
    return;
  }
  map.constants().set_affine(constants, 0, x.channels);
  map.run(executor);
}

void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, const Pullback& pullback,
                    Executor& executor) {
  VectorMap map(dy, x, dx, pullback);
  if (!map.possible()) {
    reference::input_gradient(dy, x, dx, constants, pullback, executor);
    return;
  }
  map.constants().set_gradient(constants, 0, x.channels);
  map.run(executor);
}

// Evaluation in training code is rare and off the critical path: the plain loops serve it.
void evaluation_input_gradient(const SampleView& u, const SampleView& dx, const double* c1,
                               Executor& executor) {
  reference::evaluation_input_gradient(u, dx, c1, executor);
}

void recover_input(const SampleView& y, const SampleView& x, std::uint8_t* activation_mask,
                   const NormalizeConstants& constants, double negative_slope, Executor& executor) {
  const VectorMap map(y, x, activation_mask, constants, negative_slope);
  if (!map.possible()) {
    reference::recover_input(y, x, activation_mask, constants, negative_slope, executor);
    return;
  }
  map.run(executor);
}

}  // namespace syncbn::cpu
