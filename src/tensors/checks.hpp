// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "statistics/header.hpp"
#include "syncbn/error.hpp"
#include "syncbn/options.hpp"
#include "syncbn/tensor.hpp"

// Argument checks. Each throws InvalidArgument with the argument's name, what was given and what is
// allowed; none changes anything.
namespace syncbn {

struct Running;

[[noreturn]] inline void refuse(const char* name, const std::string& given,
                                const std::string& allowed) {
  throw InvalidArgument(std::string(name) + ": got " + given + ", expected " + allowed);
}

void check_dtype(const char* name, DType dtype);

/// "(2, 3, 4)".
std::string shape_text(const Extents& sizes);

/// "a, b or c", the names of kinds 0 to count - 1.
template <class Name>
std::string listed(int count, const Name& name) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += (i == 0 ? "" : i < count - 1 ? ", " : " or ") + std::string(name(i));
  }
  return text;
}

/// 0 to kMaxChannels.
void check_channels(std::int64_t channels);

/// An array of `entries` entries; may be null if there are none.
void check_array(const char* name, const void* array, std::int64_t entries);

/// Somewhere to write to: no two entries in one place (stride 0).
void check_output(const char* name, const MutableTensorView& tensor);

/// Where a checked tensor lies. One that is absent, empty or has gaps lies nowhere: tensors with
/// gaps may lie in each other's.
class Region {
 public:
  template <class Void>
  Region(const char* name, const BasicTensorView<Void>& tensor)
      : Region(name, tensor.data, tensor.dtype, tensor.sizes, tensor.strides) {}

  /// Refuses an output that shares memory with another tensor. whole: it may be exactly that one.
  void check_apart(std::initializer_list<const Region*> others, bool whole = false) const;

 private:
  Region(const char* name, const void* data, DType dtype, const Extents& sizes,
         const Extents& strides);
  bool is(const Region& other) const;

  const char* name_;
  const void* data_;
  DType dtype_;
  const Extents* sizes_;
  const Extents* strides_;
  std::uintptr_t begin_ = 0;
  std::uintptr_t end_ = 0;
};

/// What is expected of samples, in C and in C++.
inline constexpr const char* kSampleAxes = "2 to 12 axes (N, C, spatial...)";
static_assert(kMaxDims == 12);

/// A tensor of samples: 2 to 12 axes, strides for each, a known dtype, data unless it is empty, at
/// most kMaxChannels channels and kMaxCount elements per channel.
void check_samples(const char* name, const TensorView& tensor);

/// The same sizes, dtype and device as x.
void check_like(const char* name, const TensorView& tensor, const TensorView& x);

/// Absent, or bytes of x's shape without its channels, on its device.
void check_mask(const MaskView& mask, const TensorView& x);

/// Absent, or one axis of `channels` entries on `device`.
void check_per_channel(const char* name, const TensorView& tensor, std::int64_t channels,
                       Device device);

inline void check_entries(const char* name, const MutableTensorView& tensor, const TensorView& x) {
  check_per_channel(name, tensor, x.sizes[1], x.device);
  check_output(name, tensor);
}

inline void check_whole_output(const char* name, const MutableTensorView& tensor,
                               const TensorView& x) {
  check_like(name, tensor, x);
  check_output(name, tensor);
}

/// What is normalized, and with which parameters.
template <class Arguments>
void check_parameters(const Arguments& a) {
  check_per_channel("weight", a.weight, a.x.sizes[1], a.x.device);
  check_per_channel("bias", a.bias, a.x.sizes[1], a.x.device);
  if (!a.residual.absent()) {
    check_like("residual", a.residual, a.x);
  }
}

void check_eps(double eps, const char* name = "eps");
void check_activation(const Activation& activation);
void check_statistics(Statistics statistics);
// Inline: src/comm needs no other object of this room.
inline void check_ranks(int ranks) {
  if (ranks < 1 || ranks > kMaxRanks) {
    refuse("ranks", std::to_string(ranks), "1 to " + std::to_string(kMaxRanks));
  }
}
inline void check_rank(int rank, int ranks) {
  if (rank < 0 || rank >= ranks) {
    refuse("rank", std::to_string(rank), "0 to " + std::to_string(ranks - 1));
  }
}

/// Elements per channel over all ranks.
void check_elements_over_ranks(const char* name, std::int64_t count);

/// A rank's place in its group.
struct Place {
  int rank = 0;
  int ranks = 1;
  bool operator==(const Place&) const = default;
};

/// As the communicator says it, whose class may be the caller's: so it is asked once, and what
/// follows takes this answer.
template <class Group>
Place place_of(const Group& group) {
  const Place place{group.rank(), group.size()};
  check_ranks(place.ranks);
  check_rank(place.rank, place.ranks);
  return place;
}

/// Without a number of its own a layer would meet any other of its shape.
void check_layer(const char* name, std::uint64_t layer, int ranks);

/// Of a group: 1 ms to 2^40 ms, which added to a clock's nanoseconds do not overflow. least: 0 for
/// a wait that may only look. bits: fewer for a group that waits for several time limits. Inline,
/// as libraries beside the core check theirs, too.
inline void check_timeout(std::chrono::milliseconds timeout, const char* name = "timeout",
                          std::int64_t least = 1, int bits = 40) {
  if (timeout.count() < least || timeout.count() > std::int64_t{1} << bits) {
    refuse(name, std::to_string(timeout.count()) + " ms",
           std::to_string(least) + " ms to 2^" + std::to_string(bits) + " ms");
  }
}
void check_momentum(double momentum);

/// What counts batches; on CUDA, whose memory is not read, whether it is there.
void check_counter(const Running& running, Device device);

}  // namespace syncbn
