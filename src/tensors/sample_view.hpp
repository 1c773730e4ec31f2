// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

#include "syncbn/tensor.hpp"

namespace syncbn {

/// N or a spatial size is 0. tensor: 2 or more axes.
bool has_no_elements(const TensorView& tensor);

/// How the elements of a plane (n, c) lie in memory.
enum class Layout : std::uint8_t {
  kPlanes,   ///< a plane is contiguous (NCHW and slices of it)
  kRows,     ///< neighbouring channels are neighbours in memory (channels-last, 2-D input)
  kStrided,  ///< anything else
};

/// A tensor (N, C, spatial...) seen as N x C planes of `plane` elements, e = 0..plane-1 in
/// row-major order of the spatial axes. Strides in elements. Spatial axes are merged where strides
/// allow.
struct SampleView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t samples = 0;
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  std::int64_t sample_stride = 0;
  std::int64_t channel_stride = 0;
  int spatial_dims = 0;  ///< after merging; at most 1 means that `element_stride` tells all
  std::int64_t element_stride = 1;
  std::array<std::int64_t, kMaxDims> sizes;
  std::array<std::int64_t, kMaxDims> strides;
  const std::uint8_t* mask = nullptr;  ///< `plane` bytes a sample, 0: left out; null: all count

  explicit SampleView(const TensorView& tensor, const MaskView& which = {});

  /// Elements per channel that count.
  std::int64_t count() const;
  bool counts(std::int64_t n, std::int64_t e) const {
    return mask == nullptr || mask[n * plane + e] != 0;
  }
  bool empty() const { return samples == 0 || plane == 0; }
  bool planes_contiguous() const {
    return plane == 1 || (spatial_dims <= 1 && element_stride == 1);
  }
  bool rows_contiguous() const {
    return spatial_dims <= 1 && (channel_stride == 1 || channels == 1);
  }
};

/// Walks along one plane of a view, from element e on.
class PlaneCursor {
 public:
  PlaneCursor(const SampleView& view, std::int64_t n, std::int64_t c, std::int64_t e);
  std::int64_t offset() const { return offset_; }
  void advance();

 private:
  const SampleView* view_;
  std::int64_t offset_;
  std::array<std::int64_t, kMaxDims> index_;
};

/// The fastest layout that fits all given views; a plane of one element is a row.
Layout common_layout(const SampleView& a, const SampleView& b);
Layout common_layout(const SampleView& a, const SampleView& b, const SampleView& c);

}  // namespace syncbn
