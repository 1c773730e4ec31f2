// SPDX-License-Identifier: Apache-2.0
#include "tensors/checks.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>

#include "statistics/activation.hpp"
#include "statistics/dtype.hpp"
#include "statistics/float_environment.hpp"
#include "syncbn/error.hpp"
#include "syncbn/step.hpp"
#include "tensors/sample_view.hpp"

namespace syncbn {
namespace {

std::string shape(const Extents& sizes) { return shape_text(sizes); }
std::string shape(const TensorView& tensor) { return shape_text(tensor.sizes); }

const char* device_name(Device device) { return device == Device::kCpu ? "CPU" : "CUDA"; }

/// The shortest digits that read back as the same number.
std::string number(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  return std::string(text, end);
}

void check_device(const char* name, Device device) {
  if (device > Device::kCuda) {
    refuse(name, "device number " + std::to_string(static_cast<int>(device)), "CPU or CUDA");
  }
}

/// Of a view that was made of a range, whose sizes are not negative.
void check_elements(const char* name, std::optional<std::size_t> elements, const Extents& sizes) {
  if (!elements.has_value()) {
    return;
  }
  std::size_t wanted = 1;
  bool empty = false;
  bool too_many = false;
  for (const std::int64_t size : sizes) {
    empty = empty || size == 0;
    too_many = __builtin_mul_overflow(wanted, static_cast<std::size_t>(size), &wanted) || too_many;
  }
  if (empty ? *elements != 0 : too_many || *elements != wanted) {
    refuse(name, std::to_string(*elements) + " elements", "those of shape " + shape(sizes));
  }
}

void check_storage(const char* name, const TensorView& tensor) {
  check_dtype(name, tensor.dtype);
  check_device(name, tensor.device);
  if (tensor.strides.size() != tensor.sizes.size()) {
    refuse(name, std::to_string(tensor.strides.size()) + " strides",
           std::to_string(tensor.sizes.size()) + " (one per axis)");
  }
  bool empty = false;  // numel() could overflow: sizes are not checked yet
  for (const std::int64_t size : tensor.sizes) {
    if (size < 0) {
      refuse(name, "shape " + shape(tensor), "sizes of at least 0");
    }
    empty = empty || size == 0;
  }
  if (tensor.data == nullptr && !empty) {
    refuse(name, "a null pointer for shape " + shape(tensor), "data");
  }
  check_elements(name, tensor.elements, tensor.sizes);
}

// The counts beside the enumerations are those of the kinds that have traits.
template <int kNumber>
concept IsDtype = requires {
  typename std::bool_constant<(size_of(static_cast<DType>(kNumber)) > 0)>;
  typename std::bool_constant<(format_of(static_cast<DType>(kNumber)).words() > 0)>;
};
static_assert(IsDtype<kDtypeCount - 1> && !IsDtype<kDtypeCount>);

template <int kNumber>
concept IsActivation = requires {
  typename std::bool_constant<traits_of(static_cast<ActivationKind>(kNumber)).name != nullptr>;
};
static_assert(IsActivation<kActivationCount - 1> && !IsActivation<kActivationCount>);

}  // namespace

std::string shape_text(const Extents& sizes) {
  std::string text = "(";
  for (const std::int64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + (sizes.size() > kMaxDims ? ", ...)" : ")");
}

void check_dtype(const char* name, DType dtype) {
  if (static_cast<int>(dtype) >= kDtypeCount) {
    refuse(name, "dtype number " + std::to_string(static_cast<int>(dtype)),
           listed(kDtypeCount, [](int i) { return syncbn::name(static_cast<DType>(i)); }));
  }
}

void refuse_dtype(DType dtype) {
  refuse("dtype", "number " + std::to_string(static_cast<int>(dtype)),
         "less than " + std::to_string(kDtypeCount));
}

void check_channels(std::int64_t channels) {
  if (channels == kNoChannels) {
    refuse("channels", "none", "0 to 2^31");
  }
  if (channels < 0 || channels > kMaxChannels) {
    refuse("channels", std::to_string(channels), "0 to 2^31");
  }
}

void check_array(const char* name, const void* array, std::int64_t entries) {
  if (array == nullptr && entries > 0) {
    refuse(name, "a null pointer", std::to_string(entries) + " entries");
  }
}

void check_output(const char* name, const MutableTensorView& tensor) {
  if (std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) != tensor.sizes.end()) {
    return;  // nothing is written
  }
  for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
    if (tensor.sizes[i] > 1 && tensor.strides[i] == 0) {
      refuse(name, "stride 0 of axis " + std::to_string(i) + " of shape " + shape(tensor.sizes),
             "memory of its own for each entry");
    }
  }
}

void check_samples(const char* name, const TensorView& tensor) {
  if (tensor.absent()) {
    refuse(name, "none", std::string("a tensor of ") + kSampleAxes);
  }
  if (tensor.sizes.size() < 2 || tensor.sizes.size() > kMaxDims) {
    refuse(name, std::to_string(tensor.sizes.size()) + " axes, shape " + shape(tensor),
           kSampleAxes);
  }
  check_storage(name, tensor);
  if (tensor.sizes[1] > kMaxChannels) {  // also where there are no elements: messages have words
    refuse(name, "shape " + shape(tensor), "at most 2^31 channels");
  }
  if (has_no_elements(tensor)) {
    return;
  }
  std::int64_t count = 1;  // elements per channel, without overflow
  for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
    if (i == 1) {
      continue;
    }
    if (count > kMaxCount / tensor.sizes[i]) {
      refuse(name, "shape " + shape(tensor), "at most 2^36 elements per channel");
    }
    count *= tensor.sizes[i];
  }
}

void check_like(const char* name, const TensorView& tensor, const TensorView& x) {
  if (tensor.absent()) {
    refuse(name, "none", "a tensor like x");
  }
  check_storage(name, tensor);
  if (tensor.sizes != x.sizes) {
    refuse(name, "shape " + shape(tensor), "the shape of x, " + shape(x));
  }
  if (tensor.dtype != x.dtype) {
    refuse(name, syncbn::name(tensor.dtype),
           std::string("the dtype of x, ") + syncbn::name(x.dtype));
  }
  if (tensor.device != x.device) {
    refuse(name, std::string("a tensor on ") + device_name(tensor.device),
           std::string("the device of x, ") + device_name(x.device));
  }
}

Region::Region(const char* name, const void* data, DType dtype, const Extents& sizes,
               const Extents& strides)
    : name_(name), data_(data), dtype_(dtype), sizes_(&sizes), strides_(&strides) {
  std::int64_t first = 0;
  std::int64_t last = 0;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  std::int64_t bytes = data == nullptr ? 0 : size;
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    std::int64_t reach = 0;
    std::int64_t& end = strides[axis] < 0 ? first : last;
    if (__builtin_mul_overflow(sizes[axis] - 1, strides[axis], &reach) ||
        __builtin_add_overflow(end, reach, &end) ||
        __builtin_mul_overflow(bytes, sizes[axis], &bytes)) {
      return;
    }
  }
  const std::int64_t numel = bytes / size;
  if (numel > 0 && -numel < first && last < numel && last - first + 1 == numel) {
    begin_ = reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(first * size);
    end_ = begin_ + static_cast<std::uintptr_t>(bytes);
  }
}

bool Region::is(const Region& other) const {
  bool same = data_ == other.data_ && dtype_ == other.dtype_ && *sizes_ == *other.sizes_;
  for (std::size_t axis = 0; same && axis < sizes_->size(); ++axis) {
    same = (*sizes_)[axis] == 1 || (*strides_)[axis] == (*other.strides_)[axis];
  }
  return same;
}

void Region::check_apart(std::initializer_list<const Region*> others, bool whole) const {
  for (const Region* other : others) {
    const bool shared = begin_ < other->end_ && other->begin_ < end_;
    if (shared && !whole) {
      refuse(name_, std::string("memory of ") + other->name_, "memory of its own");
    }
    if (shared && !is(*other)) {
      refuse(name_, std::string("memory of ") + other->name_,
             "exactly that tensor, or other memory");
    }
  }
}

void check_mask(const MaskView& mask, const TensorView& x) {
  if (mask.absent()) {
    return;
  }
  Extents sizes{x.sizes[0]};
  for (std::size_t i = 2; i < x.sizes.size(); ++i) {
    sizes.push_back(x.sizes[i]);
  }
  if (mask.sizes != sizes) {
    refuse("mask", "shape " + shape(mask.sizes),
           shape(sizes) + ", the shape of x without its channels");
  }
  if (mask.data == nullptr && std::find(sizes.begin(), sizes.end(), 0) == sizes.end()) {
    refuse("mask", "a null pointer for shape " + shape(sizes), "data");
  }
  check_elements("mask", mask.elements, sizes);
  check_device("mask", mask.device);
  if (mask.device != x.device) {
    refuse("mask", std::string("a tensor on ") + device_name(mask.device),
           std::string("the device of x, ") + device_name(x.device));
  }
}

void check_per_channel(const char* name, const TensorView& tensor, std::int64_t channels,
                       Device device) {
  if (tensor.absent()) {
    return;
  }
  check_storage(name, tensor);
  if (tensor.sizes.size() != 1 || tensor.sizes[0] != channels) {
    refuse(name, "shape " + shape(tensor),
           "(" + std::to_string(channels) + "), one entry per channel of x");
  }
  if (tensor.device != device) {
    refuse(name, std::string("a tensor on ") + device_name(tensor.device),
           std::string("the device of x, ") + device_name(device));
  }
}

void check_eps(double eps, const char* name) {
  const cpu::FloatEnvironment environment;
  if (!(eps >= 0) || eps - eps != 0) {
    refuse(name, number(eps), "a finite number of at least 0");
  }
}

void check_activation(const Activation& activation) {
  if (traits_of(activation.kind).scaled &&
      activation.negative_slope - activation.negative_slope != 0) {
    refuse("activation.negative_slope", number(activation.negative_slope), "a finite number");
  }
}

void refuse_activation(ActivationKind kind) {
  refuse("activation", "number " + std::to_string(static_cast<int>(kind)),
         listed(kActivationCount,
                [](int i) { return traits_of(static_cast<ActivationKind>(i)).name; }));
}

void check_statistics(Statistics statistics) {
  if (statistics > Statistics::kWelford) {
    refuse("statistics", "number " + std::to_string(static_cast<int>(statistics)),
           "reproducible or welford");
  }
}

void check_elements_over_ranks(const char* name, std::int64_t count) {
  if (count < 0 || count > kMaxCount) {
    refuse(name, std::to_string(count), "0 to 2^36 elements per channel");
  }
}

void check_layer(const char* name, std::uint64_t layer, int ranks) {
  if (layer == 0 && ranks > 1) {
    refuse(name, "0",
           "this layer's own number, from 1 on, the same on all ranks (there are " +
               std::to_string(ranks) + " ranks)");
  }
}

void check_momentum(double momentum) {
  const cpu::FloatEnvironment environment;
  if (!(momentum >= 0 && momentum <= 1)) {
    refuse("momentum", number(momentum), "a number in [0, 1]");
  }
}

void check_counter(const Running& r, Device device) {
  constexpr std::int64_t kMost = std::int64_t{1} << 53;  // what a quotient is made of
  const bool averages = !r.momentum.has_value() && !(r.mean.absent() && r.var.absent());
  if (r.batches == nullptr) {
    if (averages) {
      refuse("num_batches_tracked", "null",
             "a counter (momentum is empty, which asks for cumulative averaging)");
    }
    return;
  }
  if (device != Device::kCpu) {
    return;
  }
  if (!r.momentum.has_value() && (*r.batches < 0 || *r.batches > kMost)) {
    refuse("num_batches_tracked", std::to_string(*r.batches), "0 to 2^53");
  }
  if (*r.batches == std::numeric_limits<std::int64_t>::max()) {
    refuse("num_batches_tracked", "9223372036854775807", "room for one more");
  }
}

}  // namespace syncbn
