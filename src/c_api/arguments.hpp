// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "statistics/activation.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/c_api.h"
#include "syncbn/error.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/options.hpp"
#include "tensors/checks.hpp"
#include "tensors/sample_view.hpp"

struct syncbn_executor {
  std::unique_ptr<syncbn::Executor> of_cpp;
};

// C arguments as those of the C++ interface, and exceptions as codes.
namespace syncbn::c_api {

/// Keeps the exception that is being handled for syncbn_last_error, and returns its code.
SYNCBN_API syncbn_status keep_exception() noexcept;

/// What the caller's function threw over the border: nothing for SYNCBN_STATUS_OK, else the
/// exception that stands for its code, with the text that it left or one that names the function.
void raise_unless_ok(const char* name, std::int32_t status);

/// Forgets the text of an error before the caller's function may leave one, and calls it.
void clear_last_error();
template <class Function>
void raise_unless_ok(const char* name, const Function& function) {
  clear_last_error();
  raise_unless_ok(name, static_cast<std::int32_t>(function()));
}

template <class Body>
syncbn_status guarded(const Body& body) noexcept {
  try {
    body();
    return SYNCBN_STATUS_OK;
  } catch (...) {
    return keep_exception();
  }
}

template <class T>
T& required(const char* name, T* pointer) {
  if (pointer == nullptr) {
    refuse(name, "NULL", "a pointer");
  }
  return *pointer;
}

/// A struct that begins with its size. A library with more members than the program knows reads the
/// missing ones as their defaults; so they are only ever appended, and not into padding.
template <class T>
const T& sized(const char* name, const T* given) {
  const T& from = required(name, given);
  if (from.struct_size != sizeof(T)) {
    throw InvalidArgument(std::string(name) + ".struct_size: got " +
                          std::to_string(from.struct_size) + ", expected " +
                          std::to_string(sizeof(T)));
  }
  return from;
}

/// An array of `count` entries, which may be NULL if there are none.
inline void require_array(const char* name, const void* array, std::int64_t count) {
  if (array == nullptr && count > 0) {
    refuse(name, "NULL", "an array");
  }
}

/// `value` as an enumeration whose members are 0 to `last`.
template <class Enum>
Enum enum_of(const char* name, std::int32_t value, Enum last, const char* expected) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    refuse(name, std::to_string(value), expected);
  }
  return static_cast<Enum>(value);
}

/// The same for one with `count` members that have names, which in C are in capitals behind a
/// prefix.
template <class Enum, class Name>
Enum named_enum_of(const char* name, std::int32_t value, int count, const char* prefix,
                   const Name& name_of) {
  if (value < 0 || value >= count) {
    const std::string names = listed(count, [&](int i) {
      std::string text = prefix;
      for (const char* c = name_of(static_cast<Enum>(i)); *c != '\0'; ++c) {
        text += *c >= 'a' && *c <= 'z' ? static_cast<char>(*c - 'a' + 'A') : *c;
      }
      return text;
    });
    refuse(name, std::to_string(value), names);
  }
  return static_cast<Enum>(value);
}

inline DType dtype_of(const char* name, std::int32_t dtype) {
  static_assert(kDtypeCount == SYNCBN_DTYPE_FLOAT64 + 1, "each has a name in C");
  return named_enum_of<DType>(name, dtype, kDtypeCount, "SYNCBN_DTYPE_", syncbn::name);
}

inline Device device_of(const char* name, std::int32_t device) {
  return enum_of(name, device, Device::kCuda, "SYNCBN_DEVICE_CPU or SYNCBN_DEVICE_CUDA");
}

/// The sizes of so many axes are there only if the number can be right. axes: what is expected.
inline Extents sizes_of(const char* name, std::int32_t ndim, const std::int64_t* sizes,
                        const char* axes) {
  if (ndim < 0 || ndim > kMaxDims) {
    refuse(name, std::to_string(ndim) + " axes", axes);
  }
  require_array((std::string(name) + ".sizes").c_str(), sizes, ndim);
  return Extents(sizes, sizes + ndim);
}

inline MutableTensorView tensor(const char* name, const syncbn_tensor* given,
                                const char* axes = "1 axis (C)") {
  if (given == nullptr) {
    return {};
  }
  const Extents sizes = sizes_of(name, given->ndim, given->sizes, axes);
  MutableTensorView view(given->data, dtype_of(name, given->dtype), sizes);
  if (given->strides != nullptr) {
    view.strides = Extents(given->strides, given->strides + given->ndim);
  }
  view.device = device_of(name, given->device);
  return view;
}

inline MutableTensorView samples(const char* name, const syncbn_tensor* given) {
  return tensor(name, &required(name, given), kSampleAxes);
}

inline MaskView mask_of(const syncbn_mask* given) {
  if (given == nullptr) {
    return {};
  }
  return {given->data, sizes_of("mask", given->ndim, given->sizes, "1 to 11 axes (N, spatial...)"),
          device_of("mask", given->device)};
}

inline Activation activation_of(const syncbn_activation& given) {
  static_assert(kActivationCount == SYNCBN_ACTIVATION_LEAKY_RELU + 1, "each has a name in C");
  const auto name_of = [](ActivationKind kind) { return traits_of(kind).name; };
  return {named_enum_of<ActivationKind>("activation", given.kind, kActivationCount,
                                        "SYNCBN_ACTIVATION_", name_of),
          given.negative_slope};
}

inline Statistics statistics_of(std::int32_t given) {
  return enum_of("statistics", given, Statistics::kWelford,
                 "SYNCBN_STATISTICS_REPRODUCIBLE or SYNCBN_STATISTICS_WELFORD");
}

/// Runs what belongs to a call, with a number or -1; errors carry the layer, as those of the call
/// itself.
template <class Body>
void in_call(const std::string& layer, std::int64_t number, const char* direction,
             const Body& body) {
  try {
    body();
  } catch (Error& error) {
    if (!layer.empty()) {
      const std::string call = number >= 0 ? "call " + std::to_string(number) + ", " : "";
      error.set_layer(layer, layer + ", " + call + direction);
    }
    throw;
  }
}

inline Execution execution_of(syncbn_executor* given) {
  return given == nullptr ? Execution() : Execution(*given->of_cpp);
}

}  // namespace syncbn::c_api
