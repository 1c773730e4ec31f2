// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "bytes.hpp"
#include "syncbn/c_api.h"

// Tensors of the C interface from a fuzzer's bytes, and the rules that syncbn/c_api.h and
// syncbn/step.hpp state for them, written a second time. Where a call must be refused all memory
// is such that an access ends the program; where it must be accepted, memory is as large as needed
// and not a byte larger.
namespace syncbn::fuzz {

constexpr std::int64_t kMostElements = 1 << 14;  // more are left to other tests
constexpr std::int64_t kMostExtent = 1 << 16;
constexpr std::int32_t kMostAxes = 12;

/// An address at which nothing may be read or written.
inline void* forbidden() {
  static char* const kPage =
      static_cast<char*>(mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  return kPage + (1 << 19);
}

inline std::int64_t odd_number(Bytes& bytes) {
  constexpr std::int64_t kNumbers[] = {-1,
                                       0,
                                       std::int64_t{1} << 20,
                                       std::int64_t{1} << 31,
                                       (std::int64_t{1} << 31) + 1,
                                       std::int64_t{1} << 36,
                                       (std::int64_t{1} << 36) + 1,
                                       std::int64_t{1} << 62,
                                       std::numeric_limits<std::int64_t>::max(),
                                       std::numeric_limits<std::int64_t>::min()};
  const std::int64_t at = bytes.below(12);
  return at < 10 ? kNumbers[at] : bytes.take<std::int64_t>();
}

inline std::int32_t enumeration(Bytes& bytes, std::int64_t members) {
  const auto member = static_cast<std::int32_t>(bytes.below(members));
  return bytes.seldom() ? bytes.take<std::int32_t>() : member;
}
inline bool is_member(std::int32_t value, std::int32_t members) {
  return value >= 0 && value < members;
}

/// A syncbn_tensor, or NULL.
class Argument {
 public:
  bool given = true;
  std::int32_t dtype = 0;
  std::int32_t device = 0;
  std::int32_t ndim = 0;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  bool row_major = true;
  bool no_sizes = false;
  bool no_data = false;

  /// x: 2 to 6 axes of 0 to 5 elements, mostly.
  static Argument samples(Bytes& bytes) {
    Argument a;
    a.dtype = enumeration(bytes, 4);
    a.ndim = static_cast<std::int32_t>(2 + bytes.below(5));
    for (std::int32_t i = 0; i < a.ndim; ++i) {
      const auto size = bytes.take<std::uint8_t>();
      a.sizes.push_back(size >= 250 ? odd_number(bytes) : (size + 2) % 6);
    }
    a.choose_strides(bytes);
    a.spoil(bytes);
    return a;
  }
  /// Like x, but for its strides.
  static Argument like(Bytes& bytes, const Argument& x) {
    Argument a = x;
    a.given = true;
    a.no_sizes = a.no_data = false;
    a.choose_strides(bytes);
    a.spoil(bytes);
    return a;
  }
  static Argument per_channel(Bytes& bytes, std::int64_t channels) {
    Argument a;
    a.given = bytes.below(3) != 0;
    a.dtype = enumeration(bytes, 4);
    a.ndim = 1;
    a.sizes = {channels};
    a.choose_strides(bytes);
    a.spoil(bytes);
    return a;
  }
  static Argument maybe(Bytes& bytes, Argument a) {
    a.given = a.given && bytes.below(2) != 0;
    return a;
  }

  std::int64_t channels() const { return sizes.size() > 1 ? sizes[1] : 0; }
  bool has_no_elements() const { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }
  /// NULL, or a tensor that stands for it.
  bool absent() const { return !given || (no_data && ndim == 0 && well_formed()); }
  /// Can be read as a tensor at all.
  bool well_formed() const {
    return !given || (is_member(dtype, 4) && is_member(device, 2) && ndim >= 0 &&
                      ndim <= kMostAxes && !(no_sizes && ndim > 0));
  }
  bool has_storage() const {
    return given && well_formed() &&
           std::all_of(sizes.begin(), sizes.end(), [](std::int64_t s) { return s >= 0; }) &&
           (!no_data || has_no_elements());
  }
  bool good_samples() const {
    if (!has_storage() || device != 0 || ndim < 2 || sizes[1] > std::int64_t{1} << 31) {
      return false;
    }
    if (sizes[0] == 0 || std::find(sizes.begin() + 2, sizes.end(), 0) != sizes.end()) {
      return true;
    }
    unsigned __int128 count = 1;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      count *= i == 1 ? 1 : static_cast<std::uint64_t>(sizes[i]);
      if (count > std::uint64_t{1} << 36) {
        return false;
      }
    }
    return true;
  }
  bool good_like(const Argument& x) const {
    return has_storage() && sizes == x.sizes && dtype == x.dtype && device == x.device;
  }
  bool good_per_channel(std::int64_t count) const {
    return well_formed() &&
           (absent() || (has_storage() && ndim == 1 && sizes[0] == count && device == 0));
  }

  /// Its entries have places of their own, so that it can be written.
  bool good_output() const {
    if (absent() || row_major || has_no_elements()) {
      return true;
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] > 1 && strides[i] == 0) {
        return false;
      }
    }
    return true;
  }

  /// Accepted, but too large for a fuzzer.
  bool large() const {
    if (absent() || !has_storage()) {  // or not looked at
      return false;
    }
    __int128 elements = 1;  // without channels: a mask's
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      elements *= i == 1 ? 1 : std::min(sizes[i], kMostElements + 1);
      elements = std::min<__int128>(elements, kMostElements + 1);
    }
    elements = std::find(sizes.begin(), sizes.end(), 0) == sizes.begin() + 1
                   ? elements
                   : elements * (sizes.size() > 1 ? sizes[1] : 1);
    if (elements > kMostElements || channels() > kMostElements) {
      return true;
    }
    if (has_no_elements()) {
      return false;
    }
    std::int64_t low = 0;
    std::int64_t high = 0;
    return !extent(low, high);
  }

  /// The tensor; `accepted`: with memory of its own.
  const syncbn_tensor* make(bool accepted) {
    if (!given) {
      return nullptr;
    }
    void* data = no_data ? nullptr : forbidden();
    std::int64_t low = 0;
    std::int64_t high = 0;
    if (accepted && !no_data && !has_no_elements() && ndim > 0 && extent(low, high)) {
      const std::int64_t width = dtype == SYNCBN_DTYPE_FLOAT64   ? 8
                                 : dtype == SYNCBN_DTYPE_FLOAT32 ? 4
                                                                 : 2;
      memory_.reset(new char[static_cast<std::size_t>((high - low + 1) * width)]);
      std::fill_n(memory_.get(), (high - low + 1) * width, 0x3c);
      data = memory_.get() - low * width;
    }
    tensor_ = {data,
               dtype,
               device,
               ndim,
               no_sizes ? nullptr : sizes.data(),
               row_major ? nullptr : strides.data()};
    return &tensor_;
  }

 private:
  void choose_strides(Bytes& bytes) {
    const std::int64_t kind = bytes.below(4);
    row_major = kind == 0;
    strides.assign(sizes.size(), 1);
    std::uint64_t step = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
      // Row-major, channels-last, or anything.
      strides[i] = kind == 3   ? bytes.take<std::int8_t>()
                   : kind == 1 ? static_cast<std::int64_t>(step)
                   : i == 1
                       ? 1
                       : static_cast<std::int64_t>(
                             step * (sizes.size() > 1 ? static_cast<std::uint64_t>(sizes[1]) : 1));
      step *= kind == 2 && i == 1 ? 1 : static_cast<std::uint64_t>(sizes[i]);
      if (kind == 3 && strides[i] == -128) {
        strides[i] = odd_number(bytes);
      }
    }
  }
  void spoil(Bytes& bytes) {
    if (!bytes.seldom()) {
      return;
    }
    switch (bytes.below(7)) {
      case 0:
        no_data = true;
        break;
      case 1:
        no_sizes = true;
        break;
      case 2:
        device = bytes.take<std::int32_t>();
        break;
      case 3:
        device = 1;
        break;
      case 4:
        dtype = bytes.take<std::uint8_t>() - 8;
        break;
      case 5:  // another number of axes, with sizes and strides to read
        ndim = bytes.take<std::uint8_t>() - 16;
        sizes.resize(static_cast<std::size_t>(std::clamp(ndim, 0, 64)), 1);
        strides.resize(sizes.size(), 1);
        break;
      default:
        if (!sizes.empty()) {
          sizes[static_cast<std::size_t>(bytes.below(64)) % sizes.size()] = odd_number(bytes);
        }
    }
  }
  /// First and last element beside the one at `data`; false if they are far away.
  bool extent(std::int64_t& low, std::int64_t& high) const {
    std::int64_t step = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
      const __int128 steps = static_cast<__int128>(sizes[i]) - 1;  // below 0: never looked at
      const __int128 reach = steps * (row_major ? step : strides[i]);
      if (steps < 0 || reach > kMostExtent || reach < -kMostExtent) {
        return false;
      }
      (reach < 0 ? low : high) += static_cast<std::int64_t>(reach);
      step *= sizes[i];
    }
    return high - low < kMostExtent;
  }

  std::shared_ptr<char[]> memory_;  // shared by copies, which are made before it is
  syncbn_tensor tensor_{};
};

/// A syncbn_mask for x, or NULL.
class Mask {
 public:
  Mask(Bytes& bytes, const Argument& x) : given_(bytes.below(3) == 1), sizes_(x.sizes) {
    if (sizes_.size() > 1) {
      sizes_.erase(sizes_.begin() + 1);
    }
    ndim_ = static_cast<std::int32_t>(sizes_.size());
    byte_ = bytes.take<std::uint8_t>();
    if (bytes.seldom()) {
      switch (bytes.below(4)) {
        case 0:
          no_data_ = true;
          break;
        case 1:
          device_ = bytes.take<std::uint8_t>() - 8;
          break;
        case 2:
          sizes_.assign(sizes_.size(), odd_number(bytes));
          break;
        default:
          no_sizes_ = true;
      }
    }
  }
  bool good(const Argument& x) const {
    if (!given_) {
      return true;
    }
    std::vector<std::int64_t> expected = x.sizes;
    expected.erase(expected.begin() + 1);
    const bool none = std::find(expected.begin(), expected.end(), 0) != expected.end();
    return !no_sizes_ && sizes_ == expected && device_ == 0 && (!no_data_ || none);
  }
  const syncbn_mask* make(bool accepted) {
    if (!given_) {
      return nullptr;
    }
    const void* data = no_data_ ? nullptr : forbidden();
    if (accepted && !no_data_) {
      std::size_t size = 1;
      for (const std::int64_t s : sizes_) {
        size *= static_cast<std::size_t>(s);
      }
      memory_.reset(new std::uint8_t[size]);
      for (std::size_t i = 0; i < size; ++i) {
        memory_[i] = static_cast<std::uint8_t>(byte_ >> i % 8 & 1);
      }
      data = memory_.get();
    }
    mask_ = {static_cast<const std::uint8_t*>(data), device_, ndim_,
             no_sizes_ ? nullptr : sizes_.data()};
    return &mask_;
  }

 private:
  bool given_;
  std::vector<std::int64_t> sizes_;
  std::int32_t ndim_ = 0;
  std::int32_t device_ = 0;
  std::uint8_t byte_ = 0;
  bool no_data_ = false;
  bool no_sizes_ = false;
  std::unique_ptr<std::uint8_t[]> memory_;
  syncbn_mask mask_{};
};

}  // namespace syncbn::fuzz
