// SPDX-License-Identifier: Apache-2.0
#include "checks.hpp"

#include <algorithm>
#include <charconv>
#include <string>
#include <type_traits>

#include "cpu/float_environment.hpp"
#include "layer.hpp"
#include "sample_view.hpp"
#include "statistics/activation.hpp"
#include "statistics/dtype.hpp"
#include "step/device.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

std::string shape(const Extents& sizes) { return shape_text(sizes); }
std::string shape(const TensorView& tensor) { return shape_text(tensor.sizes); }

[[noreturn]] void refuse(const char* name, const std::string& given, const std::string& allowed) {
  throw InvalidArgument(std::string(name) + ": got " + given + ", expected " + allowed);
}

const char* device_name(Device device) { return device == Device::kCpu ? "CPU" : "CUDA"; }

/// The shortest digits that read back as the same number.
std::string number(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  return std::string(text, end);
}

void check_storage(const char* name, const TensorView& tensor) {
  check_dtype(name, tensor.dtype);
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
  if (tensor.elements.has_value()) {
    std::size_t wanted = 1;
    bool too_many = false;
    for (const std::int64_t size : tensor.sizes) {
      too_many =
          __builtin_mul_overflow(wanted, static_cast<std::size_t>(size), &wanted) || too_many;
    }
    if (empty ? *tensor.elements != 0 : too_many || *tensor.elements != wanted) {
      refuse(name, std::to_string(*tensor.elements) + " elements",
             "those of shape " + shape(tensor));
    }
  }
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

/// What a number of milliseconds may be: added to a clock's nanoseconds it must not overflow.
constexpr std::int64_t kMaxTimeout = std::int64_t{1} << 40;

// Of a layer.

void check_input(const BatchNorm::Options& options, const TensorView& x, const MaskView& mask) {
  check_samples("x", x);
  if (x.sizes[1] != options.channels) {
    throw InvalidArgument("x: got " + std::to_string(x.sizes[1]) +
                          " channels, expected those of the layer, " +
                          std::to_string(options.channels));
  }
  check_mask(mask, x);
}

template <class Arguments>
void check_gradients(const Arguments& a) {
  check_like("dy", a.dy, a.x);
  check_whole_output("dx", a.dx, a.x);
  if (!a.dresidual.absent()) {
    check_whole_output("dresidual", a.dresidual, a.x);
  }
  check_entries("dweight", a.dweight, a.x);
  check_entries("dbias", a.dbias, a.x);
}

/// Both, or where `may_be_absent` neither.
template <class Arguments>
void check_running(const Arguments& a, bool may_be_absent) {
  if (a.running_mean.absent() != a.running_var.absent()) {
    throw InvalidArgument("running_mean, running_var: got only one of them, expected both" +
                          std::string(may_be_absent ? " or neither" : ""));
  }
  if (a.running_mean.absent() && !may_be_absent) {
    throw InvalidArgument("running_mean, running_var: got none, expected both");
  }
  check_per_channel("running_mean", a.running_mean, a.x.sizes[1], a.x.device);
  check_per_channel("running_var", a.running_var, a.x.sizes[1], a.x.device);
}

/// The backward's x holds what the forward's did, as far as can be told without reading it.
void check_same_x(const SavedState& saved, const TensorView& x) {
  if (x.sizes != saved.x.sizes) {
    throw InvalidArgument("x: got shape " + shape_text(x.sizes) +
                          ", expected that of the forward, " + shape_text(saved.x.sizes));
  }
  if (std::find(x.sizes.begin(), x.sizes.end(), 0) != x.sizes.end()) {
    return;  // without elements it is nowhere
  }
  if (x.dtype != saved.x.dtype) {
    throw InvalidArgument(std::string("x: got ") + name(x.dtype) +
                          ", expected the dtype of the forward, " + name(saved.x.dtype));
  }
  if (x.data != saved.x.data && x.data == saved.y) {
    throw InvalidArgument("x: got the forward's y, expected its x");
  }
  if (x.data != saved.x.data) {
    throw InvalidArgument("x: got other memory than the forward did, expected the same x");
  }
  for (std::size_t axis = 0; axis < x.sizes.size(); ++axis) {
    if (x.sizes[axis] > 1 && x.strides[axis] != saved.x.strides[axis]) {
      throw InvalidArgument("x: got other strides than in the forward, expected the same x");
    }
  }
  if (saved.overwritten_by != nullptr) {
    throw InvalidArgument(std::string("x: got the memory that ") + saved.overwritten_by +
                          ", expected what the forward normalized");
  }
}

template <class View>
void check_as_in_forward(const char* name, const View& view, bool in_forward) {
  if (in_forward && view.absent()) {
    throw InvalidArgument(std::string(name) + ": got none, expected that of the forward");
  }
  if (!in_forward && !view.absent()) {
    throw InvalidArgument(std::string(name) + ": got one, expected none, as in the forward");
  }
}

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
  throw InvalidArgument("dtype: got number " + std::to_string(static_cast<int>(dtype)) +
                        ", expected less than " + std::to_string(kDtypeCount));
}

void check_channels(std::int64_t channels) {
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
  if (tensor.sizes.size() < 2 || tensor.sizes.size() > kMaxDims) {
    refuse(name, std::to_string(tensor.sizes.size()) + " axes, shape " + shape(tensor),
           "2 to " + std::to_string(kMaxDims) + " axes (N, C, spatial...)");
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

void check_on_cpu(Device device) {
  if (device != Device::kCpu) {
    cuda_passes();
    throw InvalidArgument(
        "device: got a CUDA tensor, expected one on CPU; CUDA tensors go to syncbn/batch_norm.hpp");
  }
}

void check_count(std::int64_t backward, std::int64_t forward) {
  if (backward != forward) {
    throw DivergenceError("backward: the ranks bring " + std::to_string(backward) +
                          " elements per channel, forward had " + std::to_string(forward));
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

void check_ranks(int ranks) {
  if (ranks < 1 || ranks > kMaxRanks) {
    refuse("ranks", std::to_string(ranks), "1 to " + std::to_string(kMaxRanks));
  }
}

void check_layer(const char* name, std::uint64_t layer, int ranks) {
  if (layer == 0 && ranks > 1) {
    refuse(name, "0",
           "this layer's own number, from 1 on, the same on all ranks (there are " +
               std::to_string(ranks) + " ranks)");
  }
}

void check_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() < 1 || timeout.count() > kMaxTimeout) {
    refuse("timeout", std::to_string(timeout.count()) + " ms", "1 ms to 2^40 ms");
  }
}

void check_momentum(double momentum) {
  const cpu::FloatEnvironment environment;
  if (!(momentum >= 0 && momentum <= 1)) {
    refuse("momentum", number(momentum), "a number in [0, 1]");
  }
}

void check_options(const BatchNorm::Options& options) {
  check_eps(options.eps);
  check_activation(options.activation);
  if (options.statistics > Statistics::kWelford) {
    throw InvalidArgument("statistics: got number " +
                          std::to_string(static_cast<int>(options.statistics)) +
                          ", expected reproducible or welford");
  }
  if (options.momentum.has_value()) {
    check_momentum(*options.momentum);
  }
}

void check_forward(const BatchNorm::Options& options, const BatchNorm::Forward& f) {
  check_input(options, f.x, f.mask);
  check_whole_output("y", f.y, f.x);
  check_parameters(f);
  check_entries("running_mean", f.running_mean, f.x);
  check_entries("running_var", f.running_var, f.x);
  check_options(options);
  if (!options.momentum.has_value() && f.num_batches_tracked == nullptr &&
      !(f.running_mean.absent() && f.running_var.absent())) {
    throw InvalidArgument(
        "num_batches_tracked: got null, expected a counter (momentum is empty, which asks for "
        "cumulative averaging)");
  }
}

void check_layer_forward(const BatchNorm::Options& options, const BatchNorm::Forward& f) {
  check_forward(options, f);
  check_running(f, true);
}

void check_backward(const BatchNorm::Backward& b) {
  check_samples("x", b.x);
  check_mask(b.mask, b.x);
  check_gradients(b);
  if (b.affine > AffineGradients::kGlobal) {
    throw InvalidArgument("affine: got number " + std::to_string(static_cast<int>(b.affine)) +
                          ", expected share or global");
  }
  check_per_channel("weight", b.weight, b.x.sizes[1], b.x.device);
  check_per_channel("bias", b.bias, b.x.sizes[1], b.x.device);
}

void check_saved(const SavedState& saved, const LayerState& layer, const BatchNorm::Backward& b) {
  if (!saved.filled) {
    throw InvalidArgument("saved: got one without content, expected one that a forward filled");
  }
  if (saved.layer != layer.number) {
    throw InvalidArgument(
        "saved: got that of another layer, expected one that this layer's forward filled");
  }
  if (saved.device != b.x.device || saved.channels != b.x.sizes[1]) {
    throw InvalidArgument("saved: got " + std::to_string(saved.channels) +
                          " channels, expected those of x, " + std::to_string(b.x.sizes[1]) +
                          ", on its device");
  }
  check_same_x(saved, b.x);
  check_as_in_forward("mask", b.mask, saved.mask);
  check_as_in_forward("weight", b.weight, saved.weight);
  check_as_in_forward("bias", b.bias, saved.bias);
  if (!b.dresidual.absent() && !saved.residual) {
    throw InvalidArgument("dresidual: got one, expected none, as the forward had no residual");
  }
}

void check_evaluate(const BatchNorm::Options& options, const BatchNorm::Evaluate& e) {
  check_input(options, e.x, e.mask);
  check_whole_output("y", e.y, e.x);
  check_parameters(e);
  check_running(e, true);
}

void check_evaluate_backward(const BatchNorm::Options& options,
                             const BatchNorm::EvaluateBackward& e) {
  check_input(options, e.x, e.mask);
  check_gradients(e);
  check_parameters(e);
  check_running(e, false);
  const bool activated = options.activation.kind != ActivationKind::kNone;
  if (activated && !e.residual.absent() && e.dx.data == e.dy.data && e.dx.data != nullptr) {
    throw InvalidArgument("dx: got dy, expected other memory (with a residual and an activation)");
  }
}

}  // namespace syncbn
