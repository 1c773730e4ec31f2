// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory and ranks of a device, for tests that run on a GPU and, over the emulated kernels of
// tests/emulation, on a CPU: device_cuda.cpp and device_emulated.cpp are the two sides.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"
#include "syncbn/cuda_communicator.hpp"

namespace syncbn::testing {

/// False where tests are to be skipped: "needs a GPU".
bool have_device();

/// How many random cases a test tries.
int device_cases();

void* device_allocate(std::size_t bytes);
void device_free(void* memory);
void copy_to_device(void* to, const void* from, std::size_t bytes);
/// Waits for everything that was enqueued.
void copy_from_device(void* to, const void* from, std::size_t bytes);

/// A rank's turn on the device: the emulator runs one kernel at a time.
class DeviceTurn {
 public:
  DeviceTurn();
  ~DeviceTurn();
  DeviceTurn(const DeviceTurn&) = delete;
  DeviceTurn& operator=(const DeviceTurn&) = delete;
};

/// A rank of `host` whose messages lie on the device; used within a DeviceTurn.
std::unique_ptr<cuda::Communicator> device_communicator(Communicator& host);

/// count values on the device.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(const std::vector<T>& values) : count_(values.size()) {
    memory_.reset(device_allocate(count_ * sizeof(T)));
    copy_to_device(memory_.get(), values.data(), count_ * sizeof(T));
  }
  explicit DeviceArray(std::int64_t count, T value = T())
      : DeviceArray(std::vector<T>(static_cast<std::size_t>(count), value)) {}
  T* data() const { return static_cast<T*>(memory_.get()); }
  std::vector<T> values() const {
    std::vector<T> out(count_);
    copy_from_device(out.data(), memory_.get(), count_ * sizeof(T));
    return out;
  }

 private:
  struct Free {
    void operator()(void* memory) const { device_free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t count_ = 0;
};

/// A tensor's copy on the device, with the same strides and gaps.
class DeviceTensor {
 public:
  DeviceTensor() = default;  ///< absent
  explicit DeviceTensor(const Tensor& tensor)
      : there_(true), tensor_(tensor), memory_(tensor.storage()) {}
  MutableTensorView view() {
    if (!there_) {
      return {};
    }
    MutableTensorView view = tensor_.view();
    if (view.data != nullptr) {
      view.data =
          memory_.data() + (static_cast<const std::byte*>(view.data) - tensor_.storage().data());
    }
    view.device = Device::kCuda;
    return view;
  }
  /// What is on the device now.
  Tensor fetch() const {
    Tensor out = tensor_;
    const std::vector<std::byte> bytes = memory_.values();
    std::copy(bytes.begin(), bytes.end(), const_cast<std::byte*>(out.storage().data()));
    return out;
  }

 private:
  bool there_ = false;
  Tensor tensor_;
  DeviceArray<std::byte> memory_;
};

}  // namespace syncbn::testing

#define SYNCBN_NEEDS_DEVICE()              \
  if (!::syncbn::testing::have_device()) { \
    GTEST_SKIP() << "needs a GPU";         \
  }                                        \
  static_assert(true)
