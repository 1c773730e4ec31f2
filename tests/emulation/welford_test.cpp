// SPDX-License-Identifier: Apache-2.0
#include "step/passes.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "statistics/header.hpp"
#include "support.hpp"
#include "welford_bound.hpp"

// The welford mode on CUDA. Unlike the moments it promises accuracy, not the CPU's bits; its own
// bits repeat on any grid, which torch.nn.SyncBatchNorm's channels-last kernel does not promise.
namespace syncbn {
namespace {

constexpr double kEps = 1e-5;

Words message_of(const Tensor& x, const std::vector<std::uint8_t>& counts, std::uint64_t seed,
                 int multiprocessors) {
  const TensorView view = on_cuda(x.view());
  MaskView mask;
  if (!counts.empty()) {
    mask = {counts.data(), {view.sizes[0], view.sizes[2]}, Device::kCuda};
  }
  Words message(size(kHeaderWords + welford_words(view.dtype, view.sizes[1])), -1);
  emulation::settings() = {.seed = seed, .multiprocessors = multiprocessors};
  cuda::local_welford(view, mask, {5, nullptr, kEps}, message.data(), {});
  emulation::settings() = {};
  return message;
}

struct Moments {
  Doubles mean, var, rstd;
  explicit Moments(std::int64_t channels) : mean(size(channels)), var(mean), rstd(mean) {}
};

TEST(CudaWelford, WithinBoundAndTheSameOnAnyGrid) {
  Random random(31);
  for (int round = 0; round < 24; ++round) {
    const DType dtype = kDtypes[round % 4];
    const Memory memory = random.pick(kMemories);
    const std::int64_t channels = random.between(1, 20);
    const std::int64_t plane = random.pick(std::vector<std::int64_t>{1, 7, 300, 1100});
    std::vector<std::uint8_t> counts(random.one_in(2) ? size(4 * plane) : 0);
    for (std::uint8_t& byte : counts) {
      byte = random.one_in(3) ? 0 : 1;
    }
    Tensor x(dtype, {4, channels, plane}, memory);
    const Doubles values = testing::unit_values(random, dtype, 4 * channels * plane, 3);
    x.fill(values);
    const Words message = message_of(x, counts, random.bits(), 1);
    EXPECT_EQ(message_of(x, counts, random.bits(), 4), message);
    Words info(kInfoWords);
    Moments got(channels);
    cuda::merge_welford(message.data(), dtype, 1, got.mean.data(), got.var.data(), got.rstd.data(),
                        info.data(), channels, kEps, {});
    for (std::int64_t c = 0; c < channels; ++c) {
      Doubles kept;
      for (std::int64_t i = 0; i < 4 * plane; ++i) {
        if (counts.empty() || counts[size(i)] != 0) {
          kept.push_back(values[size((i / plane * channels + c) * plane + i % plane)]);
        }
      }
      EXPECT_EQ(info[0], static_cast<std::int64_t>(kept.size()));
      if (kept.size() < 2) {
        EXPECT_EQ(got.var[size(c)], 0.0);
        EXPECT_EQ(got.mean[size(c)], kept.empty() ? 0.0 : kept[0]);
        continue;
      }
      // Additions in a row: a thread's share of the elements, 5 + 7 merges.
      testing::expect_close({got.mean[size(c)], got.var[size(c)]}, testing::exact(kept),
                            static_cast<double>(4 * plane) / 32 + 1 + 12, dtype);
    }
  }
}

}  // namespace
}  // namespace syncbn
