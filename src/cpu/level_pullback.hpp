// The gradient on its way back through a fused activation, in pieces that stay in a cache until
// they are summed. Included inside a level file's unnamed namespace, after level_elements.hpp,
// whose rules hold here too.

/// u come back through the activation, into `target`: one segment of a plane.
template <class T>
inline void pull_segment(const SumsTask& task, const T* dy, const T* x, T* target,
                         std::uint8_t* activation_mask, std::int64_t length, std::int64_t channel) {
  const ActivationV activation(task.activation);
  const auto here = [&](const float* array) { return broadcast(array[channel]); };
  const AffineV k = affine(*task.constants, here);
  if (activation_mask == nullptr) {
    map_contiguous<T, Upstream, false>(x, dy, target, activation_mask, length, k, activation);
  } else {
    map_contiguous<T, UpstreamActivationMask, false>(x, dy, target, activation_mask, length, k,
                                                     activation);
  }
}

/// The same for `channels` neighbouring channels, from `channel` on, of row e of a sample.
template <class T>
inline void pull_row(const SumsTask& task, std::int64_t sample, std::int64_t e,
                     std::int64_t channel, std::int64_t channels, T* target) {
  const ActivationV activation(task.activation);
  const T* dy = plane_of<T>(task.u, sample, 0) + e * task.u.element_stride + channel;
  const T* x = plane_of<T>(task.v, sample, 0) + e * task.v.element_stride + channel;
  const ElementConstants& all = *task.constants;
  ElementConstants k;
  k.mean_high = all.mean_high + channel;
  k.mean_low = all.mean_low + channel;
  k.scale = all.scale + channel;
  k.shift = all.shift + channel;
  std::uint8_t* activation_mask = mask_run(task.activation_mask, sample, e);
  if (activation_mask == nullptr) {
    map_row<T, Upstream, false>(x, dy, target, activation_mask, channels, k, activation);
  } else {
    map_row<T, UpstreamActivationMask, false>(x, dy, target, activation_mask + channel / 8,
                                              channels, k, activation);
  }
}
