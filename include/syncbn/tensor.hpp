// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <ranges>
#include <span>
#include <type_traits>
#include <utility>

#include "syncbn/error.hpp"
#include "syncbn/export.h"

namespace syncbn {

/// The types of elements. Elements of bfloat16 and float16 are passed as their 16-bit patterns.
enum class DType : std::uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };
inline constexpr int kDtypeCount = 4;  ///< the number of element types

/// Where the memory of a tensor is.
enum class Device : std::uint8_t { kCpu, kCuda };

/// Throws InvalidArgument, which says that this number is no DType.
[[noreturn]] SYNCBN_API void refuse_dtype(DType dtype);

/// Returns "float16", "bfloat16", "float32" or "float64". Throws InvalidArgument for a
/// number that is no DType.
[[nodiscard]] constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  refuse_dtype(dtype);
}

/// Returns the bytes per element. Throws InvalidArgument for a number that is no DType.
[[nodiscard]] constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
  }
  refuse_dtype(dtype);
}

inline constexpr int kMaxDims = 12;  ///< the largest number of axes of a tensor

/// The sizes or the strides of a tensor. They are stored in the object, which allocates nothing. If
/// there are more than kMaxDims axes, it keeps the first kMaxDims values and the number of axes. So
/// a function that refuses the tensor can name it in its error.
class Extents {
 public:
  Extents() {}  // not "= default": otherwise a constant view would need an initializer
  Extents(std::initializer_list<std::int64_t> values) : Extents(values.begin(), values.end()) {}
  /// Copies the values of a span, a vector or an array.
  template <class Range>
    requires(!std::same_as<Range, Extents> &&
             std::convertible_to<const Range&, std::span<const std::int64_t>>)
  Extents(const Range& values)
      : Extents(std::span<const std::int64_t>(values).begin(),
                std::span<const std::int64_t>(values).end()) {}
  template <std::ranges::range Range>
    requires(!std::same_as<Range, Extents> &&
             !std::convertible_to<const Range&, std::span<const std::int64_t>>)
  Extents(const Range&) {
    static_assert(!std::ranges::range<Range>, "sizes and strides must be std::int64_t");
  }
  template <std::input_iterator Iterator>
  Extents(Iterator begin, Iterator end) {
    for (; begin != end; ++begin) {
      push_back(*begin);
    }
  }
  Extents(const Extents& other) noexcept { *this = other; }
  Extents& operator=(const Extents& other) noexcept {
    std::copy(other.begin(), other.end(), values_.begin());
    size_ = other.size_;
    return *this;
  }

  /// Returns the number of axes, which may exceed kMaxDims.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  std::int64_t& operator[](std::size_t axis) noexcept { return values_[axis]; }
  std::int64_t operator[](std::size_t axis) const noexcept { return values_[axis]; }
  [[nodiscard]] std::int64_t* begin() noexcept { return values_.data(); }
  [[nodiscard]] const std::int64_t* begin() const noexcept { return values_.data(); }
  [[nodiscard]] std::int64_t* end() noexcept { return begin() + kept(); }
  [[nodiscard]] const std::int64_t* end() const noexcept { return begin() + kept(); }
  void push_back(std::int64_t value) noexcept {
    if (size_ < values_.size()) {
      values_[size_] = value;
    }
    ++size_;
  }
  bool operator==(const Extents& other) const noexcept {
    return size_ == other.size_ && std::equal(begin(), end(), other.begin());
  }

 private:
  std::size_t kept() const noexcept { return std::min(size_, values_.size()); }
  std::size_t size_ = 0;
  std::array<std::int64_t, kMaxDims> values_;
};

namespace detail {
template <class T>
struct DtypeOf {};
template <>
struct DtypeOf<float> {
  static constexpr DType kValue = DType::kFloat32;
};
template <>
struct DtypeOf<double> {
  static constexpr DType kValue = DType::kFloat64;
};
// These types exist only in some compilers. std::float16_t and std::bfloat16_t are these types.
#if defined(__FLT16_MANT_DIG__) && \
    (defined(__clang__) || __GNUC__ >= 13 || (__GNUC__ == 12 && defined(__x86_64__)))
#define SYNCBN_HAS_FLOAT16 1
template <>
struct DtypeOf<_Float16> {
  static constexpr DType kValue = DType::kFloat16;
};
#endif
#if defined(__BFLT16_MANT_DIG__) || defined(__ARM_BF16_FORMAT_ALTERNATIVE) || \
    (defined(__clang__) && __clang_major__ >= 15 && defined(__SSE2__))
#define SYNCBN_HAS_BFLOAT16 1
template <>
struct DtypeOf<__bf16> {
  static constexpr DType kValue = DType::kBFloat16;
};
#endif
}  // namespace detail

/// The C++ types of elements: float, double and, if the compiler has them, _Float16 and __bf16.
/// C++23 calls the last two std::float16_t and std::bfloat16_t.
template <class T>
concept Element = requires { detail::DtypeOf<T>::kValue; };
template <Element T>
inline constexpr DType kDtypeOf = detail::DtypeOf<T>::kValue;

namespace detail {
template <class T>
concept StridedMdspan = requires(const T& span) {
  { T::rank() } -> std::convertible_to<std::size_t>;
  { span.data_handle() } -> std::convertible_to<const typename T::value_type*>;
  { span.extent(0) } -> std::convertible_to<std::int64_t>;
  { span.stride(0) } -> std::convertible_to<std::int64_t>;
};
}  // namespace detail

/// A std::mdspan of such elements, with strides, or a class with the same interface.
template <class T>
concept ElementMdspan = Element<typename T::value_type> && detail::StridedMdspan<T>;

namespace detail {
template <class Range>
concept KeptRange = std::ranges::contiguous_range<Range> && std::ranges::borrowed_range<Range>;
template <class Range>
using PointerInto = std::add_pointer_t<std::ranges::range_reference_t<Range&>>;
template <class Range, class Void>
concept RangeOfElements = KeptRange<Range> && Element<std::ranges::range_value_t<Range>> &&
                          std::convertible_to<PointerInto<Range>, Void*>;
template <class Range>
concept RangeOfBytes =
    KeptRange<Range> && (std::same_as<std::ranges::range_value_t<Range>, std::uint8_t> ||
                         std::same_as<std::ranges::range_value_t<Range>, bool>);

// What a compiler says of a view that cannot be made. Without these functions, which constructors
// for wrong arguments call, it only says that it could not convert.
template <class T, bool kWritable>
constexpr void explain_elements() {
  static_assert(Element<std::remove_const_t<T>>,
                "elements must be float, double, _Float16 or __bf16; for the 16-bit patterns of "
                "others give {data, dtype, sizes}");
  static_assert(!kWritable || !std::is_const_v<T>, "an output must not be const");
}
template <class Range>
constexpr void explain_range() {
  static_assert(std::ranges::contiguous_range<Range>,
                "a view needs contiguous elements, and std::vector<bool> packs them into bits");
  static_assert(!std::ranges::contiguous_range<Range> || std::ranges::borrowed_range<Range>,
                "a view of a temporary: keep its elements in a variable");
}
template <class Range>
constexpr void explain_sizes() {
  static_assert(!std::ranges::range<Range>, "give the sizes: {x, {n, c}}");
}
}  // namespace detail

/// A view of a tensor, whose memory it does not own: a pointer to element (0, ..., 0), the sizes,
/// and the strides in elements. A view with data == nullptr and no sizes means "absent" (no weight,
/// no bias).
template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::kFloat32;
  Extents sizes;
  Extents strides;
  Device device = Device::kCpu;
  /// The number of elements of the range, if the view was made from a range. A call refuses the
  /// view if its sizes give another number.
  std::optional<std::size_t> elements;

  BasicTensorView() = default;

  /// Makes a view of a contiguous (row-major) tensor.
  BasicTensorView(Void* tensor_data, DType tensor_dtype, const Extents& tensor_sizes)
      : data(tensor_data), dtype(tensor_dtype), sizes(tensor_sizes), strides(tensor_sizes) {
    std::uint64_t step = 1;  // unsigned: sizes are not checked yet
    for (std::int64_t* stride = strides.end(); stride-- != strides.begin();) {
      const auto size = static_cast<std::uint64_t>(*stride);
      *stride = static_cast<std::int64_t>(step);
      step *= size;
    }
  }

  BasicTensorView(Void* tensor_data, DType tensor_dtype, const Extents& tensor_sizes,
                  const Extents& tensor_strides, Device tensor_device = Device::kCpu)
      : data(tensor_data),
        dtype(tensor_dtype),
        sizes(tensor_sizes),
        strides(tensor_strides),
        device(tensor_device) {}

  /// Makes a view of a contiguous tensor from all elements of a span, a vector or an array.
  template <detail::RangeOfElements<Void> Range>
  BasicTensorView(Range&& values, const Extents& tensor_sizes)
      : BasicTensorView(std::ranges::data(values), kDtypeOf<std::ranges::range_value_t<Range>>,
                        tensor_sizes) {
    elements = std::ranges::size(values);
  }

  /// Makes a view of the same elements as an mdspan.
  template <ElementMdspan Mdspan>
    requires(std::convertible_to<decltype(std::declval<const Mdspan&>().data_handle()), Void*>)
  BasicTensorView(const Mdspan& values)
      : data(values.data_handle()), dtype(kDtypeOf<typename Mdspan::value_type>) {
    for (std::size_t axis = 0; axis < Mdspan::rank(); ++axis) {
      sizes.push_back(static_cast<std::int64_t>(values.extent(axis)));
      strides.push_back(static_cast<std::int64_t>(values.stride(axis)));
    }
  }

  // The constructors for wrong arguments: each is an error with a sentence.
  template <std::ranges::range Range>
    requires(!detail::RangeOfElements<Range, Void>)
  BasicTensorView(Range&&, const Extents&) {
    detail::explain_range<Range>();
    detail::explain_elements<std::remove_reference_t<std::ranges::range_reference_t<Range&>>,
                             !std::is_const_v<Void>>();
  }
  template <std::ranges::range Range>
    requires(Element<std::ranges::range_value_t<Range>> && !detail::StridedMdspan<Range>)
  BasicTensorView(const Range&) {
    detail::explain_sizes<Range>();
  }
  template <detail::StridedMdspan Mdspan>
    requires(!ElementMdspan<Mdspan> ||
             !std::convertible_to<decltype(std::declval<const Mdspan&>().data_handle()), Void*>)
  BasicTensorView(const Mdspan& values) {
    detail::explain_elements<std::remove_pointer_t<decltype(values.data_handle())>,
                             !std::is_const_v<Void>>();
  }
  template <class Pointer>
    requires(std::is_pointer_v<Pointer>)
  BasicTensorView(const Pointer&, const Extents&) {
    static_assert(!std::is_pointer_v<Pointer>,
                  "a pointer does not say how many elements there are: give a std::span, or "
                  "{data, dtype, sizes}");
  }
  template <class T>
    requires(std::is_const_v<T> && !std::is_const_v<Void>)
  BasicTensorView(T*, DType, const Extents&, const Extents& = {}, Device = Device::kCpu) {
    static_assert(!std::is_const_v<T>, "an output must not be const");
  }

  /// Converts a writable view to a read-only view.
  operator BasicTensorView<const void>() const {
    BasicTensorView<const void> view(data, dtype, sizes, strides, device);
    view.elements = elements;
    return view;
  }

  [[nodiscard]] bool absent() const noexcept { return data == nullptr && sizes.empty(); }

  [[nodiscard]] std::int64_t numel() const noexcept {
    std::int64_t n = 1;
    for (const std::int64_t s : sizes) {
      n *= s;
    }
    return n;
  }
};

using TensorView = BasicTensorView<const void>;
using MutableTensorView = BasicTensorView<void>;

/// Says which elements of a tensor (N, C, spatial...) count. The mask has contiguous bytes of shape
/// (N, spatial...), which all channels share. A byte is 0 if its element does not count. A view
/// with data == nullptr and no sizes means "absent": all elements count. An activation mask is
/// something else.
struct MaskView {
  const std::uint8_t* data = nullptr;
  Extents sizes;
  Device device = Device::kCpu;
  std::optional<std::size_t> elements;  ///< as in BasicTensorView

  MaskView() = default;
  MaskView(const std::uint8_t* mask_data, const Extents& mask_sizes,
           Device mask_device = Device::kCpu)
      : data(mask_data), sizes(mask_sizes), device(mask_device) {}

  /// Makes a mask from all elements of a span, an array or a vector of std::uint8_t, or of a span
  /// or an array of bool.
  template <detail::RangeOfBytes Range>
  MaskView(Range&& values, const Extents& mask_sizes)
      : MaskView(reinterpret_cast<const std::uint8_t*>(std::ranges::data(values)), mask_sizes) {
    static_assert(sizeof(bool) == 1);
    elements = std::ranges::size(values);
  }

  // The constructors for wrong arguments, as in BasicTensorView.
  template <std::ranges::range Range>
    requires(!detail::RangeOfBytes<Range>)
  MaskView(Range&&, const Extents&) {
    detail::explain_range<Range>();
    static_assert(std::same_as<std::ranges::range_value_t<Range>, std::uint8_t> ||
                      std::same_as<std::ranges::range_value_t<Range>, bool>,
                  "a mask must be of std::uint8_t or bool");
  }
  template <std::ranges::range Range>
  MaskView(const Range&) {
    detail::explain_sizes<Range>();
  }

  [[nodiscard]] bool absent() const noexcept { return data == nullptr && sizes.empty(); }
};

}  // namespace syncbn
