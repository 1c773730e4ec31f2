// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "emulator.hpp"
#include "peer_ranks.hpp"
#include "syncbn/cuda_peers.hpp"

// The exchange on devices that sums a message and leaves the rest to others: beside ranks that
// finalize in the same kernel, and with what they make of it.
namespace syncbn::testing {
namespace {

class CudaPeerSums : public ::testing::Test {
 protected:
  void TearDown() override { emulation::settings() = {}; }
};

/// The words of all ranks' messages behind the header, forward or backward, summed.
Words total(const PeerBatch& batch, Words RankStep::* message) {
  Words out;
  for (const RankStep& rank : batch.ranks) {
    const Words& words = rank.*message;
    out.resize(words.size() - kHeaderWords);
    std::transform(out.begin(), out.end(), words.begin() + kHeaderWords, out.begin(),
                   std::plus<>());
  }
  return out;
}

/// The rest of a forward, from a message that was exchanged.
void finalize_forward(RankStep& step, int ranks) {
  cuda::finalize_moments(step.forward.data(), step.dtype, ranks, step.mean.data(), step.var.data(),
                         step.rstd.data(), step.info.data(), step.channels, kPeerEps, {});
}

TEST_F(CudaPeerSums, AreThoseOfRanksThatFinalizeAtOnce) {
  Random random(11);
  for (const int ranks : {1, 3}) {
    for (const DType dtype : kDtypes) {
      const std::int64_t channels = random.between(1, 40);
      const int blocks = static_cast<int>(random.between(1, 3));
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + name(dtype) + ", " +
                   std::to_string(channels) + " channels, " + std::to_string(blocks) + " blocks");
      Peers peers(ranks, blocks,
                  cuda::kLeastSlotWords + random.between(0, 12) * words_per_channel(dtype));
      const std::vector<std::int64_t> samples = {2, 0, 3};
      PeerBatch batch(random, dtype, channels, {samples.begin(), samples.begin() + ranks}, 1,
                      false);
      std::vector<PeerLayer> layers(at(ranks), PeerLayer(DType::kFloat32, channels));
      emulation::settings() = {.seed = random.bits(), .multiprocessors = 1};
      const std::array directions = {&RankStep::forward, &RankStep::backward};
      const std::array expected = {total(batch, directions[0]), total(batch, directions[1])};
      cuda::load_peer_exchange(dtype);
      const std::uint64_t unloaded = emulation::counts().launches_of_unloaded;
      emulation::run_devices(static_cast<unsigned>(ranks), [&](unsigned r) {
        const cuda::PeerGroup group = peers.group(static_cast<int>(r));
        RankStep& step = batch.ranks[r];
        if (r == 1) {
          step.launch_forward(group, layers[r], kPeerMomentum);
          step.launch_backward(group);
        } else {
          cuda::exchange_sums(step.forward.data(), dtype, group, channels, {});
          cuda::exchange_sums(step.backward.data(), dtype, group, channels, {});
        }
      });
      EXPECT_EQ(emulation::counts().launches_of_unloaded, unloaded);
      for (std::size_t r = 0; r < at(ranks); ++r) {
        SCOPED_TRACE(r);
        RankStep& step = batch.ranks[r];
        if (r != 1) {
          for (std::size_t i = 0; i < 2; ++i) {
            const Words& got = step.*directions[i];
            EXPECT_EQ(Words(got.begin() + kHeaderWords, got.end()), expected[i]);
            const MessageInfo info = read_header(got.data(), ranks);
            EXPECT_TRUE(usable(info));
            EXPECT_EQ(info.count, batch.one.info[0]);
          }
          finalize_forward(step, ranks);
        }
        EXPECT_TRUE(step.same_statistics(batch.one));
      }
    }
  }
}

TEST_F(CudaPeerSums, OfCallsThatDifferAreRefused) {
  Random random(12);
  const std::vector<std::int64_t> samples = {2, 1};
  for (const bool missing : {false, true}) {
    SCOPED_TRACE(missing);
    Peers peers(2, 2, cuda::kLeastSlotWords, 400'000'000);
    PeerBatch batch(random, DType::kFloat32, 9, samples, 1, false);
    PeerBatch next(random, DType::kFloat32, 9, samples, 2, false);
    emulation::settings() = {.seed = random.bits(), .multiprocessors = 1};
    emulation::settings().step_nanoseconds = 1000;
    emulation::run_devices(2, [&](unsigned r) {
      const cuda::PeerGroup group = peers.group(static_cast<int>(r));
      if (r == 0 || !missing) {
        RankStep& step = r == 0 ? batch.ranks[0] : next.ranks[1];
        cuda::exchange_sums(step.forward.data(), step.dtype, group, step.channels, {});
      }
    });
    RankStep& step = batch.ranks[0];
    EXPECT_FALSE(usable(read_header(step.forward.data(), 2)));
    finalize_forward(step, 2);
    EXPECT_EQ(step.info, (Words{-1, 0}));
    EXPECT_TRUE(same_bits(step.mean, Doubles(9, std::numeric_limits<double>::quiet_NaN())));
    EXPECT_EQ(peers.mark[0][cuda::kMarkMissing + 1], missing ? 1 : 0);
  }
}

}  // namespace
}  // namespace syncbn::testing
