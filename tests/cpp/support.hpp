// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the tests share: random numbers, tensors in several layouts, ranks as threads.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "random.hpp"
#include "statistics/dtype.hpp"
#include "statistics/scalar.hpp"
#include "syncbn/diagnosis.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn::testing {

/// The type of a dtype's elements.
template <DType kDtype>
using ElementOf = std::tuple_element_t<static_cast<std::size_t>(kDtype),
                                       std::tuple<Half, BFloat16, float, double>>;

inline constexpr DType kDtypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                                    DType::kFloat64};

inline double read_element(DType dtype, const std::byte* from) {
  return dispatch_dtype(dtype, [&](auto type) {
    std::memcpy(&type, from, sizeof(type));
    return to_double(type);
  });
}

inline void write_element(DType dtype, std::byte* to, double value) {
  dispatch_dtype(dtype, [&](auto type) {
    from_double(value, type);
    std::memcpy(to, &type, sizeof(type));
  });
}

/// value rounded to dtype.
inline double round_to(DType dtype, double value) {
  std::byte element[8];
  write_element(dtype, element, value);
  return read_element(dtype, element);
}

/// How a tensor (N, C, spatial...) lies in memory.
enum class Memory {
  kPlanes,       ///< NCHW
  kRows,         ///< channels-last
  kPlanesSlice,  ///< channels cut out of a wider NCHW tensor
  kRowsSlice,
  kOdd,  ///< every third element, samples innermost: no axes can be merged
};
inline const std::vector<Memory> kMemories = {Memory::kPlanes, Memory::kRows, Memory::kPlanesSlice,
                                              Memory::kRowsSlice, Memory::kOdd};

/// A tensor that ends where its allocation ends; what lies between its elements is all ones (NaN).
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::vector<std::int64_t> sizes, Memory memory = Memory::kPlanes,
         std::int64_t offset = 0)
      : dtype_(dtype), sizes_(std::move(sizes)), strides_(sizes_.size()), base_(offset) {
    const std::size_t axes = sizes_.size();
    std::vector<std::size_t> order;  // axes, innermost first
    for (std::size_t i = axes; i-- > 0;) {
      order.push_back(i);
    }
    if (memory == Memory::kRows || memory == Memory::kRowsSlice) {
      order.erase(order.end() - 2);
      order.insert(order.begin(), 1);
    } else if (memory == Memory::kOdd) {
      order.assign(axes, 0);
      for (std::size_t i = 1; i < axes; ++i) {
        order[i] = i == axes - 1 ? 1 : i + 1;
      }
    }
    const bool slice = memory == Memory::kPlanesSlice || memory == Memory::kRowsSlice;
    std::int64_t step = memory == Memory::kOdd ? 3 : 1;
    std::int64_t end = 1;
    for (const std::size_t axis : order) {
      strides_[axis] = step;
      step *= sizes_[axis] + (slice && axis == 1 ? 3 : 0);
      end += (sizes_[axis] - 1) * strides_[axis];
    }
    base_ += slice ? 2 * strides_[1] : 0;
    if (numel() > 0) {
      storage_.assign(static_cast<std::size_t>(base_ + end) * size_of(dtype), std::byte{0xff});
    }
  }
  /// A contiguous tensor with these values.
  Tensor(DType dtype, std::vector<std::int64_t> sizes, const std::vector<double>& values)
      : Tensor(dtype, std::move(sizes)) {
    fill(values);
  }

  std::int64_t numel() const { return view().numel(); }
  /// Element i in row-major logical order.
  double get(std::int64_t i) const { return read_element(dtype_, storage_.data() + position(i)); }
  void set(std::int64_t i, double value) {
    write_element(dtype_, storage_.data() + position(i), value);
  }
  void fill(const std::vector<double>& values) {
    dispatch_dtype(dtype_, [&](auto type) {
      for_each_position([&](std::size_t i, std::size_t at) {
        from_double(values[i], type);
        std::memcpy(storage_.data() + at, &type, sizeof(type));
      });
    });
  }
  std::vector<double> values() const {
    std::vector<double> out(static_cast<std::size_t>(numel()));
    dispatch_dtype(dtype_, [&](auto type) {
      for_each_position([&](std::size_t i, std::size_t at) {
        std::memcpy(&type, storage_.data() + at, sizeof(type));
        out[i] = to_double(type);
      });
    });
    return out;
  }
  TensorView view() const { return {data(), dtype_, sizes_, strides_}; }
  MutableTensorView view() { return {const_cast<std::byte*>(data()), dtype_, sizes_, strides_}; }
  const std::vector<std::byte>& storage() const { return storage_; }
  /// Nothing was written between the elements.
  bool gaps_untouched() const {
    std::vector<std::byte> copy = storage_;
    for_each_position(
        [&](std::size_t, std::size_t at) { std::memset(copy.data() + at, 0xff, size_of(dtype_)); });
    return copy == std::vector<std::byte>(storage_.size(), std::byte{0xff});
  }

 private:
  const std::byte* data() const {
    return storage_.empty() ? nullptr
                            : storage_.data() + static_cast<std::size_t>(base_) * size_of(dtype_);
  }
  std::size_t position(std::int64_t i) const {
    std::int64_t offset = base_;
    for (std::size_t axis = sizes_.size(); axis-- > 0;) {
      offset += i % sizes_[axis] * strides_[axis];
      i /= sizes_[axis];
    }
    return static_cast<std::size_t>(offset) * size_of(dtype_);
  }
  /// Calls body(i, position(i)) for all elements.
  template <class Body>
  void for_each_position(const Body& body) const {
    const auto last = sizes_.size() - 1;
    const auto count = static_cast<std::size_t>(numel());
    for (std::size_t i = 0; i < count;) {
      std::size_t at = position(static_cast<std::int64_t>(i));
      for (std::int64_t k = 0; k < sizes_[last]; ++k, ++i) {
        body(i, at);
        at += static_cast<std::size_t>(strides_[last]) * size_of(dtype_);
      }
    }
  }

  DType dtype_ = DType::kFloat32;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  std::int64_t base_ = 0;
  std::vector<std::byte> storage_;
};

/// Copies that outlive their span.
inline std::vector<double> values(std::span<const double> of) { return {of.begin(), of.end()}; }

/// Equal bits; any NaN equals any NaN (their payloads are not specified).
inline bool same_bits(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) ||
         bit_copy<std::uint64_t>(a) == bit_copy<std::uint64_t>(b);
}

inline ::testing::AssertionResult same_bits(std::span<const double> actual,
                                            std::span<const double> expected) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure() << actual.size() << " values, not " << expected.size();
  }
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!same_bits(actual[i], expected[i])) {
      return ::testing::AssertionFailure() << "value " << i << std::hexfloat << " is " << actual[i]
                                           << ", expected " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}
inline ::testing::AssertionResult same_bits(std::span<const double> actual,
                                            std::initializer_list<double> expected) {
  return same_bits(actual, std::span(expected.begin(), expected.size()));
}

/// Samples with exponents over 60 binades (30 for float16), each with its negative, or half of
/// that, in another sample. Plain binary64 sums of them depend on the order.
inline std::vector<double> rough_values(Random& random, DType dtype, std::int64_t samples,
                                        std::int64_t per_sample) {
  std::vector<double> values(static_cast<std::size_t>(samples * per_sample));
  const std::size_t half = static_cast<std::size_t>(samples / 2 * per_sample);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const int exponent = static_cast<int>(dtype == DType::kFloat16 ? random.between(-15, 15)
                                                                   : random.between(-30, 30));
    const double fresh = std::ldexp(random.signed_unit(), exponent);
    const bool partner = i >= half && i < 2 * half;
    values[i] =
        round_to(dtype, partner ? -values[i - half] * (random.one_in(10) ? 0.5 : 1) : fresh);
  }
  return values;
}

/// Numbers of (middle - width, middle + width).
inline std::vector<double> unit_values(Random& random, DType dtype, std::int64_t count,
                                       double middle = 0, double width = 1) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) {
    value = round_to(dtype, middle + width * random.signed_unit());
  }
  return values;
}

/// The vector codes that this build and processor have.
inline std::vector<std::string> available_levels() {
  const std::string before = cpu_instruction_set();
  std::vector<std::string> levels;
  for (const char* level : {"reference", "avx2", "avx512", "avx512_bf16", "neon"}) {
    if (force_cpu_instruction_set(level)) {
      levels.emplace_back(level);
    }
  }
  force_cpu_instruction_set(before.c_str());
  return levels;
}

/// Uses one vector code while in scope.
class LevelScope {
 public:
  explicit LevelScope(const std::string& level) : before_(cpu_instruction_set()) {
    EXPECT_TRUE(force_cpu_instruction_set(level.c_str()));
  }
  ~LevelScope() { force_cpu_instruction_set(before_.c_str()); }
  LevelScope(const LevelScope&) = delete;
  LevelScope& operator=(const LevelScope&) = delete;

 private:
  std::string before_;
};

/// Runs body(rank) on a thread per rank; returns what each threw, or null.
inline std::vector<std::exception_ptr> run_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) {
        errors[static_cast<std::size_t>(r)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

/// The text of `error` if it is an `Expected`; anything else fails the test.
template <class Expected>
std::string text_of(const std::exception_ptr& error) {
  if (error == nullptr) {
    ADD_FAILURE() << "nothing was thrown";
    return "";
  }
  try {
    std::rethrow_exception(error);
  } catch (const Expected& expected) {
    return expected.what();
  } catch (const std::exception& other) {
    ADD_FAILURE() << "another type was thrown: " << other.what();
  }
  return "";
}

/// The text of what function throws, an `Expected`.
template <class Expected, class Function>
std::string thrown_text(const Function& function) {
  try {
    function();
  } catch (...) {
    return text_of<Expected>(std::current_exception());
  }
  return text_of<Expected>(nullptr);
}

inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

}  // namespace syncbn::testing
