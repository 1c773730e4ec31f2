// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/cpu_passes.hpp"
#include "cpu/finalize.hpp"
#include "cpu/kernels.hpp"
#include "cpu/packed.hpp"
#include "statistics/activation.hpp"
#include "statistics/dtype.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "tensors/channel_values.hpp"

// A dtype and an activation that nobody knows: each place that depends on them refuses them, and
// takes them for no other one. What happens to an enumeration that grows: tests/rules.
namespace syncbn::testing {
namespace {

constexpr auto kMadeUpDtype = static_cast<DType>(kDtypeCount);
constexpr auto kMadeUpActivation = static_cast<ActivationKind>(kActivationCount);

template <class T>
concept HasTraits = requires { ElementTraits<T>::kFraction; };
static_assert(HasTraits<Half> && HasTraits<double> && !HasTraits<int>);

void expect_refused(const char* what, const std::vector<std::function<void()>>& places) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    EXPECT_TRUE(contains(thrown_text<InvalidArgument>(places[i]), what)) << "place " << i;
  }
}

/// A view of a dtype that no check has seen.
SampleView samples_of(DType dtype, const float* data) {
  SampleView view(TensorView(data, DType::kFloat32, {1, 1, 2}));
  view.dtype = dtype;
  return view;
}

TEST(Kinds, EveryPlaceRefusesAMadeUpDtype) {
  const std::vector<float> data{1.0f, 2.0f};
  std::vector<std::int64_t> words(200);
  double number = 0;
  const SampleView x = samples_of(kMadeUpDtype, data.data());
  Executor& executor = serial_executor();
  const std::vector<std::function<void()>> places{
      [&] { (void)size_of(kMadeUpDtype); },
      [&] { (void)name(kMadeUpDtype); },
      [&] { words_per_channel(kMadeUpDtype); },
      [&] { welford_words(kMadeUpDtype, 1); },
      [&] { format_of(kMadeUpDtype); },
      [&] { is_vectorized(kMadeUpDtype); },
      [&] { channel_value(TensorView(data.data(), kMadeUpDtype, {2}), 0); },
      [&] { set_channel_value(MutableTensorView(&number, kMadeUpDtype, {1}), 0, 1.0); },
      [&] { cpu::moment_sums(x, words.data(), executor); },
      [&] { cpu::reference::gradient_sums(x, x, nullptr, words.data(), {}, executor); },
      [&] { cpu::welford_records(x, words.data(), executor); },
      [&] {
        const std::int64_t* from = words.data();
        cpu::finalize(kMadeUpDtype, from, 0, 1, {1, 0, &number, &number, &number});
      },
  };
  expect_refused("dtype", places);
}

TEST(Kinds, VectorKernelsRefuseWhatTheyHaveNoCodeFor) {
  const cpu::Kernels* kernels = cpu::active_kernels();
  if (kernels == nullptr) {
    GTEST_SKIP() << "no vector kernels here";
  }
  for (const DType dtype : {DType::kFloat64, kMadeUpDtype}) {
    cpu::Windows windows(kSingleFormat, 1);
    const cpu::WindowArrays arrays = windows.arrays();
    const cpu::ElementPass pass = cpu::ElementPass::kNormalize;
    expect_refused("dtype", {[&] { kernels->sum_planes(dtype, {}, windows, arrays); },
                             [&] { kernels->sum_rows(dtype, {}, windows, arrays); },
                             [&] { kernels->map_planes(dtype, pass, {}); },
                             [&] { kernels->map_rows(dtype, pass, {}); }});
  }
}

TEST(Kinds, EveryPlaceRefusesAMadeUpActivation) {
  const Activation made_up{kMadeUpActivation};
  const std::vector<float> data{1.0f, 2.0f};
  std::vector<float> out(2);
  const double one = 1;
  const SampleView x = samples_of(DType::kFloat32, data.data());
  const SampleView y = samples_of(DType::kFloat32, out.data());
  const cpu::NormalizeConstants constants{&one, &one, &one, &one};
  Executor& executor = serial_executor();
  const std::vector<std::function<void()>> places{
      [&] { traits_of(kMadeUpActivation); },
      [&] { AppliedActivation{made_up}; },
      [&] { layer_identity(1, made_up, Statistics::kReproducible, false); },
      [&] { cpu::activation_constants(made_up); },
      [&] { cpu::normalize(x, nullptr, y, nullptr, constants, made_up, executor); },
      [&] { cpu::reference::normalize(x, nullptr, y, nullptr, constants, made_up, executor); },
  };
  expect_refused("activation: got number 3, expected none, relu or leaky_relu", places);
}

TEST(Levels, NamesAndChoice) {
  const std::string before = cpu_instruction_set();
  EXPECT_FALSE(force_cpu_instruction_set("sse9"));
  EXPECT_EQ(cpu_instruction_set(), before);
  EXPECT_EQ(available_levels().front(), "reference");
  EXPECT_EQ(available_levels().back(), before) << "the best one is the default";
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    EXPECT_EQ(cpu_instruction_set(), level);
  }
  EXPECT_EQ(cpu_instruction_set(), before);
}

}  // namespace
}  // namespace syncbn::testing
