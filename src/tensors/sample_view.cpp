// SPDX-License-Identifier: Apache-2.0
#include "tensors/sample_view.hpp"

#include <algorithm>

namespace syncbn {

bool has_no_elements(const TensorView& tensor) {
  const auto& sizes = tensor.sizes;
  return sizes[0] == 0 || std::find(sizes.begin() + 2, sizes.end(), 0) != sizes.end();
}

namespace {

/// Of one sample it may be any number, with which nobody should have to compute.
std::int64_t stride_of_samples(const TensorView& tensor) {
  constexpr std::int64_t kLargest = std::int64_t{1} << 40;
  const std::int64_t stride = tensor.strides[0];
  return tensor.sizes[0] > 1 || (-kLargest < stride && stride < kLargest) ? stride : 0;
}

}  // namespace

SampleView::SampleView(const TensorView& tensor, const MaskView& which)
    : data(tensor.data),
      dtype(tensor.dtype),
      samples(tensor.sizes[0]),
      channels(tensor.sizes[1]),
      plane(1),
      sample_stride(stride_of_samples(tensor)),
      channel_stride(tensor.strides[1]),
      mask(which.data) {
  if (has_no_elements(tensor)) {
    plane = 0;  // the other sizes may be any, and so may be the strides
    return;
  }
  for (std::size_t i = 2; i < tensor.sizes.size(); ++i) {
    const std::int64_t size = tensor.sizes[i];
    const std::int64_t stride = tensor.strides[i];
    plane *= size;
    if (size == 1) {
      continue;
    }
    const auto last = static_cast<std::size_t>(spatial_dims) - 1;
    // Unsigned: without channels strides may still be any.
    const auto step = static_cast<std::uint64_t>(stride) * static_cast<std::uint64_t>(size);
    if (spatial_dims > 0 && strides[last] == static_cast<std::int64_t>(step)) {
      sizes[last] *= size;
      strides[last] = stride;
    } else {
      sizes[last + 1] = size;
      strides[last + 1] = stride;
      ++spatial_dims;
    }
  }
  if (spatial_dims == 1) {
    element_stride = strides[0];
  }
}

std::int64_t SampleView::count() const {
  const std::int64_t elements = samples * plane;
  return mask == nullptr ? elements : elements - std::count(mask, mask + elements, 0);
}

PlaneCursor::PlaneCursor(const SampleView& view, std::int64_t n, std::int64_t c, std::int64_t e)
    : view_(&view), offset_(n * view.sample_stride + c * view.channel_stride) {
  if (view.spatial_dims <= 1) {
    offset_ += e * view.element_stride;
    return;
  }
  for (auto d = static_cast<std::size_t>(view.spatial_dims); d-- > 0;) {
    index_[d] = e % view.sizes[d];
    e /= view.sizes[d];
    offset_ += index_[d] * view.strides[d];
  }
}

void PlaneCursor::advance() {
  if (view_->spatial_dims <= 1) {
    offset_ += view_->element_stride;
    return;
  }
  for (auto d = static_cast<std::size_t>(view_->spatial_dims); d-- > 0;) {
    offset_ += view_->strides[d];
    if (++index_[d] < view_->sizes[d]) {
      return;
    }
    offset_ -= index_[d] * view_->strides[d];
    index_[d] = 0;
  }
}

Layout common_layout(const SampleView& a, const SampleView& b) {
  if (a.rows_contiguous() && b.rows_contiguous() && (a.plane == 1 || a.channels > 1)) {
    return Layout::kRows;
  }
  if (a.planes_contiguous() && b.planes_contiguous()) {
    return Layout::kPlanes;
  }
  return a.rows_contiguous() && b.rows_contiguous() ? Layout::kRows : Layout::kStrided;
}

Layout common_layout(const SampleView& a, const SampleView& b, const SampleView& c) {
  const Layout ab = common_layout(a, b);
  return ab == common_layout(b, c) ? ab : Layout::kStrided;
}

}  // namespace syncbn
