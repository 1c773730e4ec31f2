// SPDX-License-Identifier: Apache-2.0
#include "syncbn/tensor.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

namespace syncbn::testing {
namespace {

std::vector<std::int64_t> values_of(const Extents& extents) {
  return {extents.begin(), extents.end()};
}

TEST(Extents, AreMadeOfListsAndRanges) {
  const std::vector<std::int64_t> three = {4, 0, -6};
  const std::array<std::int64_t, 3> array = {4, 0, -6};
  for (const Extents& extents : {Extents{4, 0, -6}, Extents(three), Extents(array),
                                 Extents(std::span(three)), Extents(three.begin(), three.end())}) {
    EXPECT_EQ(values_of(extents), three);
    EXPECT_EQ(extents.size(), 3U);
    EXPECT_EQ(extents, Extents(three));
  }
  EXPECT_TRUE(Extents().empty());
  EXPECT_NE(Extents({1}), Extents({1, 1}));
  EXPECT_NE(Extents({1}), Extents({2}));
}

// Views go by value, a forward's seven of them.
static_assert(sizeof(TensorView) <= 248 && sizeof(MaskView) <= 136);
static_assert(sizeof(BatchNorm::Forward) <= 2000);

// A growing vector of what has a view moves it then, and the data that it points to with it.
static_assert(std::is_nothrow_move_constructible_v<TensorView>);

TEST(TensorView, IsMadeOfASpan) {
  std::vector<double> values(6);
  const MutableTensorView view{std::span(values), {2, 3}};
  EXPECT_EQ(view.data, values.data());
  EXPECT_EQ(view.dtype, DType::kFloat64);
  EXPECT_EQ(values_of(view.sizes), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(values_of(view.strides), (std::vector<std::int64_t>{3, 1}));
  const float constants[2] = {1, 2};
  EXPECT_EQ(TensorView(std::span(constants), {2}).dtype, DType::kFloat32);
  EXPECT_FALSE(TensorView(std::span<float>(), {0, 3}).absent());
  EXPECT_EQ(view.elements, 6);
  EXPECT_EQ(TensorView(view).elements, 6);
  EXPECT_EQ(
      thrown_text<InvalidArgument>([&] { activation_mask_bytes({std::span(constants), {2, 2}}); }),
      "x: got 2 elements, expected those of shape (2, 2)");
}

// A step of its own averages as a layer does.
TEST(Step, HasTheDefaultsOfALayer) {
  EXPECT_EQ(Running().momentum, BatchNorm::Options().momentum);
  EXPECT_EQ(ForwardPass().eps, BatchNorm::Options().eps);
}

TEST(Step, ABackwardWithoutInfoComparesNothing) {
  const Extents sizes = {4, 2};
  const std::vector<float> x = {1, 2, 4, 3, 0, 5, 2, 7}, dy = {1, -1, 2, 0, 3, 1, 0, 2};
  const std::vector<double> mean = {2, 3}, rstd = {1, 0.5};
  const std::array<std::int64_t, kInfoWords> info = {4, 5};
  std::vector<float> expected;
  for (const std::int64_t* of : {info.data(), static_cast<const std::int64_t*>(nullptr)}) {
    std::vector<float> dx(8);
    std::vector<double> coefficients(6);
    std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(kDtypeOf<float>, 2)));
    const BackwardStep step{.pass = {.dy = {dy, sizes},
                                     .x = {x, sizes},
                                     .mean = mean.data(),
                                     .rstd = rstd.data(),
                                     .dx = {dx, sizes}},
                            .info = of,
                            .coefficients = coefficients.data()};
    backward_begin(step, message.data(), nullptr, {});
    backward_finish(step, nullptr, {message.data(), message.data() + kHeaderWords}, {});
    EXPECT_TRUE(expected.empty() || dx == expected);
    expected = dx;
  }
}

TEST(MaskView, IsMadeOfBytesAndBools) {
  const std::vector<std::uint8_t> bytes = {1, 0, 1, 1};
  const std::array<bool, 4> bools = {true, false, true, true};
  const std::vector<float> x = {1, 64, 3, 5};
  const TensorView view(x, {4, 1});
  for (const MaskView& mask : {MaskView(bytes, {4}), MaskView(bools, {4})}) {
    BatchNorm layer({.channels = 1}, self_communicator());
    Saved saved;
    std::vector<float> y(4);
    layer.forward({.x = view, .mask = mask, .y = {y, {4, 1}}}, saved);
    EXPECT_EQ(saved.mean()[0], 3);
  }
}

/// Elements of a 16-bit type are those of the DType of its name.
template <class T>
void expect_made_of(DType dtype) {
  std::vector<T> x(6), y(6);
  const T expected[6] = {-1, 1, 1, -1, -1, 1};
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<T>(i < 2 ? -2.0F : 2.0F) * expected[i];
  }
  EXPECT_EQ(MutableTensorView(y, {3, 2}).dtype, dtype);
  EXPECT_EQ(TensorView(std::as_const(x), {3, 2}).elements, 6);
  EXPECT_EQ(sizeof(T), size_of(dtype));
  const Tensor same(dtype, {3, 2}, {2, -2, 2, -2, -2, 2});
  const void* const given = x.data();
  EXPECT_EQ(std::memcmp(given, same.view().data, 12), 0);
}

TEST(TensorView, IsMadeOf16BitTypes) {
#ifdef SYNCBN_HAS_FLOAT16
  expect_made_of<_Float16>(DType::kFloat16);
#endif
#ifdef SYNCBN_HAS_BFLOAT16
  expect_made_of<__bf16>(DType::kBFloat16);
#endif
#if defined(__x86_64__) && !defined(SYNCBN_HAS_FLOAT16) && __GNUC__ >= 12 && !defined(__clang__)
  FAIL() << "GCC has _Float16 here";
#endif
}

/// The part of std::mdspan's interface that views need.
template <class T>
struct Mdspan {
  using value_type = std::remove_const_t<T>;
  T* data;
  static constexpr std::size_t rank() { return 2; }
  T* data_handle() const { return data; }
  int extent(std::size_t axis) const { return axis == 0 ? 2 : 3; }
  int stride(std::size_t axis) const { return axis == 0 ? 1 : 2; }
};

TEST(TensorView, IsMadeOfAnMdspan) {
  float values[6] = {};
  const MutableTensorView view = Mdspan<float>{values};
  EXPECT_EQ(view.data, values);
  EXPECT_EQ(view.dtype, DType::kFloat32);
  EXPECT_EQ(values_of(view.sizes), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(values_of(view.strides), (std::vector<std::int64_t>{1, 2}));
  EXPECT_TRUE((std::is_convertible_v<Mdspan<const double>, TensorView>));
}

}  // namespace
}  // namespace syncbn::testing
