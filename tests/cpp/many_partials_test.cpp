// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"

// Any number of partials in a channel, in every vector code.
namespace syncbn::testing {
namespace {

struct Moments {
  std::vector<double> mean, var, rstd;
};

Moments moments_of(const TensorView& x, double eps, Executor& executor) {
  const std::int64_t channels = x.sizes[1];
  const std::vector<double> none(static_cast<std::size_t>(channels), -1);
  Moments out{none, none, none};
  std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(x.dtype, channels)));
  local_moments(x, {}, message.data(), 1, executor);
  const MessageInfo info = read_header(message.data(), 1);
  EXPECT_EQ(info.count, x.sizes[0]);
  finalize_moments(info, message.data() + kHeaderWords, out.mean.data(), out.var.data(),
                   out.rstd.data(), channels, eps, executor);
  return out;
}

/// mean and var of `samples` samples v, or v and -v in turn.
void expect_exact_moments(DType dtype, double v, std::int64_t samples, bool alternate,
                          Executor& executor) {
  std::vector<double> values(static_cast<std::size_t>(samples), v);
  for (std::size_t i = 1; alternate && i < values.size(); i += 2) {
    values[i] = -v;
  }
  const Tensor x(dtype, {samples, 1}, values);
  const Moments got = moments_of(x.view(), 1.0, executor);
  // D = (N v)^2 in units of 2^-34, v being a multiple of 2^-17 below 2^7.
  const auto n = static_cast<double>(samples);
  const auto nv = static_cast<unsigned __int128>(n * v * 0x1p17);
  const auto d = static_cast<double>(nv * nv);  // rounded to 53 bits, ties to even
  EXPECT_EQ(got.mean[0], alternate ? 0.0 : v);
  EXPECT_EQ(got.var[0], alternate ? d / n / n * 0x1p-34 : 0.0);
}

// Local accumulators must take any number of partials (docs/numerics.md, "How it is tested"). The
// square of the second value fills the lower limb of a window (its last 11 of 48 bits are 1017).
TEST(ManyPartials, DoNotOverflowExact) {
  ThreadPool pool(2);
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      for (const float v : {127.99999f, 0x1.fffd6ap6f}) {
        for (const bool alternate : {false, true}) {
          SCOPED_TRACE(level + ", " + name(dtype));
          const double value = round_to(dtype, static_cast<double>(v));
          expect_exact_moments(dtype, value, 5000, alternate, pool);
          expect_exact_moments(dtype, value, 300000, alternate, pool);
          expect_exact_moments(dtype, value, 300000, alternate, serial_executor());
        }
      }
    }
  }
}

// A broadcast sample: 1.6 million partials per channel without memory for them.
TEST(ManyPartials, OfStrideZeroExact) {
  ThreadPool pool(2);
  const std::vector<double> values = {0x1.fffffep0, -0x1.8p-60, 3};
  const Tensor x(DType::kFloat32, {3}, values);
  constexpr std::int64_t kSamples = 1600000;
  const TensorView view(x.view().data, DType::kFloat32, {kSamples, 3}, {0, 1});
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    const Moments got = moments_of(view, 0.25, pool);
    EXPECT_EQ(got.mean, values) << level;
    EXPECT_EQ(got.var, std::vector<double>(3)) << level;
    EXPECT_EQ(got.rstd, std::vector<double>(3, 2.0)) << level;
  }
}

}  // namespace
}  // namespace syncbn::testing
