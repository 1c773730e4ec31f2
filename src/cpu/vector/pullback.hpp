// SPDX-License-Identifier: Apache-2.0
// What has to be made of tensors before it is summed, in pieces that stay in a cache until then:
// the gradient on its way back through a fused activation, and what a mask leaves. Included inside
// a level file's unnamed namespace, after map.hpp; the rules of elements.hpp hold here
// too.

/// u come back through the activation, into `target`: one segment of a plane.
template <class T, class Pass>
inline void pull_segment_by(const SumsTask& task, const T* dy, const T* x, T* target,
                            std::uint8_t* activation_mask, std::int64_t length,
                            std::int64_t channel) {
  const ActivationV<T> activation(task.activation);
  const Companions with{activation_mask};
  const AffineV<T> k =
      affine<T>(*task.constants, [&](const float* array) { return all_lanes<T>(array[channel]); });
  NextRead none;
  const std::int64_t i =
      map_inside<T, Pass, false, false>(x, dy, target, with, 0, length, k, activation, none);
  if (i < length) {
    map_lanes<T, Pass, false, false>(x, dy, target, with, i, length - i, k, activation);
  }
}
template <class T>
inline void pull_segment(const SumsTask& task, const T* dy, const T* x, T* target,
                         std::uint8_t* activation_mask, std::int64_t length, std::int64_t channel) {
  if (activation_mask == nullptr) {
    pull_segment_by<T, Upstream>(task, dy, x, target, activation_mask, length, channel);
  } else {
    pull_segment_by<T, UpstreamActivationMask>(task, dy, x, target, activation_mask, length,
                                               channel);
  }
}

/// The same for `channels` neighbouring channels, from `channel` on, of row e of a sample.
template <class T>
inline void pull_row(const SumsTask& task, std::int64_t sample, std::int64_t e,
                     std::int64_t channel, std::int64_t channels, T* target) {
  const ActivationV<T> activation(task.activation);
  const T* dy = plane_of<T>(task.u, sample, 0) + e * task.u.element_stride + channel;
  const T* x = plane_of<T>(task.v, sample, 0) + e * task.v.element_stride + channel;
  const ElementConstants& all = *task.constants;
  ElementConstants k;
  k.mean_high = all.mean_high + channel;
  k.mean_low = all.mean_low + channel;
  k.scale = all.scale + channel;
  k.shift = all.shift + channel;
  std::uint8_t* activation_mask = mask_run(task.activation_mask, sample, e);
  Rows<T> row{x, dy, target, activation_mask};
  if (activation_mask == nullptr) {
    map_some_rows<T, Upstream, false, 1>(row, channels, 0, k, activation);
  } else {
    row.activation_mask += channel / 8;
    map_some_rows<T, UpstreamActivationMask, false, 1>(row, channels, 0, k, activation);
  }
}

/// u and v of one segment with +0 where an element does not count; u comes back through the
/// activation, if there is one, and is written to task.out. v_kept: not written if v is u.
template <class T>
inline void keep_segment(const SumsTask& task, std::int64_t sample, std::int64_t channel,
                         std::int64_t offset, std::int64_t length, T* u_kept, T* v_kept) {
  const std::uint8_t* mask = task.mask + sample * task.plane + offset;
  const T* u = plane_of<T>(task.u, sample, channel) + offset;
  if (task.v.data == nullptr) {
    keep_counting(u, u_kept, mask, length);
    return;
  }
  const T* v = plane_of<T>(task.v, sample, channel) + offset;
  if (task.constants != nullptr) {
    std::uint8_t* activation_mask = mask_run(task.activation_mask, sample, channel);
    pull_segment(task, u, v, u_kept,
                 activation_mask == nullptr ? activation_mask : activation_mask + offset / 8,
                 length, channel);
    u = u_kept;
  }
  keep_counting(u, u_kept, mask, length);
  keep_counting(v, v_kept, mask, length);
  if (task.out.data != nullptr) {
    keep_counting(u_kept, output_of<T>(task.out, sample, channel) + offset, mask, length);
  }
}
