// SPDX-License-Identifier: Apache-2.0
// Programs that must not compile, a line each: the compiler's error is the sentence behind "says".
// tests/rules/wrong_views.py compares.
#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "syncbn/batch_norm.hpp"

namespace {

using Arguments = syncbn::BatchNorm::Forward;
const std::vector<float> constants(4);
std::vector<float> floats(4);
std::vector<int> integers(4);
std::vector<bool> bits(4);
std::deque<float> pieces(4);
std::array<std::uint8_t, 4> bytes{};

template <class T>
struct Mdspan {
  using value_type = std::remove_const_t<T>;
  T* data;
  static constexpr std::size_t rank() { return 1; }
  T* data_handle() const { return data; }
  int extent(std::size_t) const { return 1; }
  int stride(std::size_t) const { return 1; }
};

void right() {
  [[maybe_unused]] const Arguments f = {
      .x = {constants, {2, 2}}, .mask = {bytes, {2, 2}}, .y = {floats, {2, 2}}};
}

// clang-format off
void wrong() {
  (void)Arguments{.x = {std::vector<float>(4), {2, 2}}};  // says: a view of a temporary
  (void)Arguments{.mask = {std::vector<std::uint8_t>(4), {2, 2}}};  // says: a view of a temporary
  (void)Arguments{.y = {constants, {2, 2}}};  // says: an output must not be const
  (void)Arguments{.y = Mdspan<const double>{}};  // says: an output must not be const
  (void)Arguments{.y = {constants.data(), syncbn::DType::kFloat32, {2, 2}}};  // says: an output must not be const
  (void)Arguments{.x = {integers, {2, 2}}};  // says: elements must be float
  (void)Arguments{.x = Mdspan<long>{}};  // says: elements must be float
  (void)Arguments{.x = {pieces, {2, 2}}};  // says: a view needs contiguous elements
  (void)Arguments{.mask = {bits, {2, 2}}};  // says: a view needs contiguous elements
  (void)Arguments{.mask = {floats, {2, 2}}};  // says: a mask must be of std::uint8_t
  (void)Arguments{.x = floats};  // says: give the sizes
  (void)Arguments{.mask = bytes};  // says: give the sizes
  (void)Arguments{.x = {floats.data(), {2, 2}}};  // says: a pointer does not say how many
  (void)Arguments{.x = {floats, integers}};  // says: sizes and strides must be std::int64_t
}
// clang-format on

}  // namespace
