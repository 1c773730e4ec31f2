// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "cuda/widen.cuh"
#include "emulator.hpp"
#include "properties.hpp"
#include "statistics/scalar.hpp"

// Elements as binary64 on devices with few units for it: the bits of a conversion.
namespace syncbn {
namespace {

class CudaWiden : public ::testing::Test {
 public:
  CudaWiden() { emulation::settings() = {.few_binary64_units = true}; }
  ~CudaWiden() override { emulation::settings() = {}; }
};

template <class T>
void expect_converted(T v) {
  const double wide = cuda::as_double(v);
  const double expected = to_double(v);
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(wide)) << to_float(v);
  } else {
    ASSERT_EQ(bit_copy<std::uint64_t>(wide), bit_copy<std::uint64_t>(expected)) << to_float(v);
  }
}

TEST_F(CudaWiden, AllNumbersOf16BitsExact) {
  for (std::uint32_t bits = 0; bits <= 0xffff && !HasFatalFailure(); ++bits) {
    expect_converted(Half{static_cast<std::uint16_t>(bits)});
    expect_converted(BFloat16{static_cast<std::uint16_t>(bits)});
  }
}

/// All signs and exponents, and of the fractions those with one bit, all bits below or above one,
/// and random ones.
TEST_F(CudaWiden, Float32Exact) {
  testing::Random random(1);
  for (std::uint32_t upper = 0; upper < 512 && !HasFatalFailure(); ++upper) {
    const auto expect_with = [&](std::uint64_t fraction) {
      expect_converted(
          bit_copy<float>(upper << 23 | (static_cast<std::uint32_t>(fraction) & 0x7fffffu)));
    };
    for (int bit = 0; bit <= 23; ++bit) {
      const std::uint32_t one = 1u << bit;  // of the last nothing is left
      expect_with(one);
      expect_with(one - 1);
      expect_with(~(one - 1));
    }
    for (int i = 0; i < 2000; ++i) {
      expect_with(random.bits());
    }
  }
}

}  // namespace
}  // namespace syncbn
