// SPDX-License-Identifier: Apache-2.0
#include "cpu/sums.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "statistics/dtype.hpp"

// Deals the sums of a tensor to threads and vector kernels, and merges their windows. How it is
// dealt never affects a bit: partials are defined by the contract and added exactly.
namespace syncbn::cpu {
namespace {

/// Below this many elements a second thread costs more than it brings.
constexpr std::int64_t kElementsPerThread = 16384;
constexpr std::int64_t kChannelStep = kChannelPadding;
/// Neighbouring channels of a row that one thread reads at least, where others read the rest.
constexpr std::int64_t kRowPiece = 512;

Operand operand(const SampleView& view, std::int64_t channel) {
  Operand out = cpu::operand(view);
  out.data = static_cast<const std::byte*>(view.data) +
             channel * view.channel_stride * static_cast<std::int64_t>(size_of(view.dtype));
  return out;
}

}  // namespace

/// One thread's share: channels [c0, c1) x units [u0, u1).
struct VectorSums::Share {
  std::int64_t channel_begin;
  std::int64_t channel_end;
  std::int64_t unit_begin;
  std::int64_t unit_end;
};

/// For channels from `channel` on; constants: room for the task's.
SumsTask VectorSums::task(std::int64_t channel, ElementConstants& constants) const {
  SumsTask task;
  task.u = operand(*u_, channel);
  task.plane = u_->plane;
  task.mask = (v_ == nullptr ? *u_ : *v_).mask;
  if (v_ != nullptr) {
    task.v = operand(*v_, channel);
  }
  if (out_ != nullptr) {
    task.out = operand(*out_, channel);
  }
  if (packed_.has_value()) {  // with pullback_
    constants = packed_->view().from(channel);
    task.constants = &constants;
    task.activation = activation_constants(pullback_->activation);
    task.activation_mask = activation_mask_operand(*v_, pullback_->activation_mask);
    if (task.activation_mask.data != nullptr) {  // kChannelStep keeps this at a whole byte
      task.activation_mask.data += ActivationMaskLayout(*v_).bit(0, channel, 0) / 8;
    }
  }
  return task;
}

/// Of all samples.
std::int64_t VectorSums::units() const {
  return u_->samples * ((u_->plane + kSegment - 1) / kSegment);
}

Windows VectorSums::sum(std::int64_t begin, std::int64_t end, const Meanwhile* meanwhile) const {
  Windows windows(format_of(u_->dtype), end - begin);
  sum({begin, end, 0, units()}, meanwhile, windows);
  return windows;
}

void VectorSums::sum(const Share& share, const Meanwhile* meanwhile, Windows& windows) const {
  const std::int64_t channels = windows.channels();
  ElementConstants constants;
  SumsTask part = task(share.channel_begin, constants);
  part.channels = channels;
  part.meanwhile = meanwhile;
  part.unit_begin = share.unit_begin;
  part.unit_end = share.unit_end;
  kernels_->place_windows(u_->dtype, part, windows.arrays());
  for (std::int64_t unit = share.unit_begin; unit < share.unit_end; unit += kFlushInterval) {
    if (unit > share.unit_begin) {
      windows.flush(0, channels);
    }
    part.unit_begin = unit;
    part.unit_end = std::min(unit + kFlushInterval, share.unit_end);
    (rows_ ? kernels_->sum_rows : kernels_->sum_planes)(u_->dtype, part, windows, windows.arrays());
  }
}

void VectorSums::run(SumsSink& sink, Executor& executor) const {
  const std::int64_t units = this->units();
  const std::int64_t elements = u_->samples * u_->channels * u_->plane;
  const std::int64_t most = std::max<std::int64_t>(
      1, std::min<std::int64_t>(executor.concurrency(), elements / kElementsPerThread));
  const std::int64_t blocks = (u_->channels + kChannelStep - 1) / kChannelStep;
  // Channels need no merge afterwards; rows are read in long pieces, or whole.
  const bool long_pieces = u_->channels >= most * kRowPiece || (units < most && blocks > units);
  const bool by_channel = most == 1 || (rows_ ? long_pieces : blocks >= most);
  const std::int64_t pieces = std::min(most, by_channel ? blocks : units);
  const auto share = [&](std::int64_t i) {
    return by_channel
               ? Share{blocks * i / pieces * kChannelStep,
                       std::min(u_->channels, blocks * (i + 1) / pieces * kChannelStep), 0, units}
               : Share{0, u_->channels, units * i / pieces, units * (i + 1) / pieces};
  };
  if (by_channel) {
    executor.parallel_for(0, pieces, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const Share part = share(i);
        Windows windows = sum(part.channel_begin, part.channel_end, nullptr);
        sink.publish(windows, part.channel_begin);
      }
    });
    return;
  }
  // Made and ended on this thread, which keeps their memory for the next call.
  const ScratchArray<std::optional<Windows>> owned(static_cast<std::size_t>(pieces));
  const ScratchArray<Windows*> windows(owned.size());
  for (std::size_t i = 0; i < windows.size(); ++i) {
    windows[i] = &owned[i].emplace(format_of(u_->dtype), u_->channels);
  }
  executor.parallel_for(0, pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      sum(share(i), nullptr, *windows[static_cast<std::size_t>(i)]);
    }
  });
  for (std::size_t i = 1; i < windows.size(); ++i) {
    windows[0]->absorb(*windows[i], 0, u_->channels);
  }
  sink.publish(*windows[0], 0);
}

VectorSums::VectorSums(const SampleView& x) : kernels_(active_kernels()), u_(&x) {
  const Layout layout = common_layout(x, x);
  rows_ = layout == Layout::kRows;
  possible_ = vectorizable(kernels_, x, layout, nullptr);
}

VectorSums::VectorSums(const SampleView& dy, const SampleView& x, const SampleView* u,
                       const Pullback& pullback)
    : kernels_(active_kernels()), u_(&dy), v_(&x), out_(u) {
  const Layout layout = u == nullptr ? common_layout(dy, x) : common_layout(dy, x, *u);
  rows_ = layout == Layout::kRows;
  possible_ = vectorizable(kernels_, x, layout, pullback.activation_mask);
  const bool activated = pullback.activation.kind != ActivationKind::kNone;
  if (possible_ && (activated || u != nullptr)) {
    pullback_ = &pullback;
    packed_.emplace(x.channels);
    if (activated && pullback.activation_mask == nullptr) {
      packed_->set_affine(pullback.affine, 0, x.channels);
    }
  }
}

void moment_sums(const SampleView& x, std::int64_t* words, Executor& executor) {
  sum_words(VectorSums(x), x.dtype, words, executor,
            [&] { reference::gradient_sums(x, x, nullptr, words, {}, executor); });
}

void gradient_sums(const SampleView& dy, const SampleView& x, const SampleView* u,
                   std::int64_t* words, const Pullback& pullback, Executor& executor) {
  sum_words(VectorSums(dy, x, u, pullback), x.dtype, words, executor,
            [&] { reference::gradient_sums(dy, x, u, words, pullback, executor); });
}

}  // namespace syncbn::cpu
