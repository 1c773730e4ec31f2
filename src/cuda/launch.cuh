// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "cuda/device/primitives.cuh"
#include "cuda/passes.hpp"
#include "cuda/views.cuh"
#include "cuda/window.cuh"
#include "syncbn/error.hpp"
#include "tensors/sample_view.hpp"

// The host's side of a launch: views for kernels, sizes of grids, errors.
namespace syncbn::cuda {

inline Operand operand(const char* name, const SampleView& view) {
  if (view.spatial_dims > kMaxSpatialDims) {
    throw InvalidArgument(
        std::string(name) + ": got strides that leave " + std::to_string(view.spatial_dims) +
        " spatial axes apart, expected at most " + std::to_string(kMaxSpatialDims) + " on CUDA");
  }
  Operand out;
  out.data = const_cast<void*>(view.data);
  out.sample_stride = view.sample_stride;
  out.channel_stride = view.channel_stride;
  out.element_stride = view.element_stride;
  if (view.empty()) {  // sizes of 0 are no divisors
    return out;
  }
  out.dims = view.spatial_dims;
  for (int d = 0; d < view.spatial_dims; ++d) {
    out.sizes[d] = Divisor(view.sizes[static_cast<std::size_t>(d)]);
    out.strides[d] = view.strides[static_cast<std::size_t>(d)];
  }
  return out;
}

inline ChannelArray channel_array(const TensorView& tensor, double absent) {
  if (tensor.absent()) {
    return {nullptr, 0, DType::kFloat32, absent};
  }
  return {const_cast<void*>(tensor.data), tensor.strides[0], tensor.dtype, absent};
}

inline MaskBits mask_bits(const std::uint8_t* mask, const SampleView& x) {
  const ActivationMaskLayout layout(x);
  return {const_cast<std::uint8_t*>(mask), layout.by_rows, layout.run_bytes, layout.sample_bytes};
}

inline PullbackArrays pullback_arrays(const ActivationGradient& through, const double* mean,
                                      const double* rstd, const SampleView& x) {
  return {through.activation,
          {mean, rstd, channel_array(through.weight, 1.0), channel_array(through.bias, 0.0)},
          mask_bits(through.activation_mask, x)};
}

inline MessageHeader header_of(const ForwardCall& call) {
  MessageHeader header;
  header.layer = call.layer;
  header.call = call.call;
  header.eps = call.eps;
  header.backward = call.backward;
  return header;
}

/// The layout that fits all views (as the mask does, if there is one: else runs of bits and of
/// memory would differ), and whether 16-byte accesses do.
struct Plan {
  Layout layout;
  bool wide;

  Plan(std::initializer_list<const SampleView*> views, const std::uint8_t* activation_mask) {
    const SampleView& x = **views.begin();
    layout = common_layout(x, x);
    const Layout of_mask = layout;
    for (const SampleView* view : views) {
      layout = common_layout(x, *view) == layout ? layout : Layout::kStrided;
    }
    if (activation_mask != nullptr && layout != of_mask) {
      layout = Layout::kStrided;
    }
    const auto vector = static_cast<std::int64_t>(16 / size_of(x.dtype));
    // The stride of an axis of one index is never taken.
    const auto fits = [vector](std::int64_t stride, std::int64_t length) {
      return length == 1 || stride % vector == 0;
    };
    const bool rows = layout == Layout::kRows;
    wide = layout != Layout::kStrided && (rows ? x.channels : x.plane) % vector == 0;
    for (const SampleView* view : views) {
      wide =
          wide && fits(view->sample_stride, x.samples) &&
          (rows ? fits(view->element_stride, x.plane) : fits(view->channel_stride, x.channels)) &&
          reinterpret_cast<std::uintptr_t>(view->data) % 16 == 0;
    }
  }
};

/// Throws what became of a call. CUDA reports what enqueued work did wrong at any later call.
inline void require(const std::string& what, const device::Failure& failure) {
  if (failure.of_earlier_work) {
    throw Error(std::string("CUDA: work that was enqueued earlier failed: ") + failure.text +
                " (reported when " + what +
                "; with CUDA_LAUNCH_BLOCKING=1 the call that enqueued it reports it)");
  }
  if (failure.text != nullptr) {
    throw Unavailable("CUDA: " + what + " failed: " + failure.text);
  }
}

inline int multiprocessors() {
  int count = 0;
  require("finding the device", device::multiprocessors(&count));
  return count;
}

/// Blocks for `items` of work, `per_block` at a time, no more than the device runs at once, which
/// is `of_multiprocessor` on each of its multiprocessors.
inline unsigned grid_for(std::int64_t items, std::int64_t per_block,
                         std::int64_t of_multiprocessor = 8) {
  const std::int64_t most = of_multiprocessor * multiprocessors();
  return static_cast<unsigned>(std::clamp<std::int64_t>(divide_up(items, per_block), 1, most));
}

/// Starts a kernel; `name` is for the error.
template <class Kernel, class... Arguments>
void start(const char* name, Kernel kernel, unsigned blocks, unsigned threads, std::size_t shared,
           const Stream& stream, const Arguments&... arguments) {
  const device::Failure failure =
      device::launch(kernel, blocks, threads, shared, stream.handle, arguments...);
  if (failure.text != nullptr) {
    require(std::string("starting ") + name + " (" + std::to_string(blocks) + " blocks of " +
                std::to_string(threads) + " threads)",
            failure);
  }
}

/// Calls body(Plain<...>) if the activation is known at compile time.
template <class Body>
bool with_plain_options(bool masked, const AppliedActivation& activation, const Body& body) {
  switch (masked ? NotPositive::kScaled : activation.rest) {
    case NotPositive::kKept:
      return body(Plain<NotPositive::kKept>());
    case NotPositive::kZero:
      return body(Plain<NotPositive::kZero>());
    case NotPositive::kScaled:
      break;
  }
  return false;
}

/// Loads kernels on the current device.
template <class... Kernels>
void load(Kernels... kernels) {
  (require("loading a kernel", device::load(kernels)), ...);
}

}  // namespace syncbn::cuda
