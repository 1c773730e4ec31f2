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
#include "statistics/dtype.hpp"
#include "statistics/slots.hpp"
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

/// Words behind a header with every digit but the top ones carried, which makes equal sums equal.
Words carried(Words words, DType dtype) {
  const Format format = format_of(dtype);
  for (std::size_t c = 0; c < words.size(); c += at(format.words())) {
    std::int64_t* digits = words.data() + c;
    for (const int count : {format.first.digits, format.second.digits}) {
      for (int i = 0; i + 1 < count; ++i) {
        digits[i + 1] += digits[i] >> kDigitBits;
        digits[i] &= kDigitMask;
      }
      digits += count;
    }
  }
  return words;
}
Words behind_header(const Words& message, DType dtype) {
  return carried(Words(message.begin() + kHeaderWords, message.end()), dtype);
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
      emulation::settings() = {.seed = random.bits(), .multiprocessors = 2};
      const std::array directions = {&RankStep::forward, &RankStep::backward};
      const std::array expected = {total(batch, directions[0]), total(batch, directions[1])};
      cuda::load_peer_exchange(dtype, blocks);
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
            EXPECT_EQ(behind_header(got, dtype), carried(expected[i], dtype));
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

/// A sum of any size and sign, often with few digits, or with digits that only repeat the sign.
void write_sum(Random& random, std::int64_t* digits, int count) {
  const auto digit = [&] {
    const std::int64_t any = random.between(0, kDigitMask);
    return random.pick<std::int64_t>({0, 1, kDigitMask - 1, kDigitMask, any, any});
  };
  const std::int64_t begin = random.between(0, count);
  const std::int64_t end = std::min<std::int64_t>(count, begin + random.between(0, 9));
  const bool negative = random.one_in(2);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t sign = !negative ? 0 : i == count - 1 ? -1 : kDigitMask;
    digits[i] = i < begin       ? 0
                : i >= end      ? sign
                : i < count - 1 ? digit()
                                : digit() - kDigitMask / 2;
  }
}

TEST_F(CudaPeerSums, AreRightWhateverDigitsAreInUse) {
  Random random(13);
  for (int round = 0; round < 12; ++round) {
    for (const DType dtype : kDtypes) {
      const Format format = format_of(dtype);
      const std::int64_t channels = random.between(1, 30);
      const int ranks = static_cast<int>(random.pick<std::int64_t>({2, 3, 6}));
      SCOPED_TRACE(std::to_string(round) + ", " + name(dtype) + ", " + std::to_string(ranks));
      Peers peers(ranks, 2,
                  cuda::kLeastSlotWords + random.between(0, 12) * words_per_channel(dtype));
      PeerBatch batch(random, dtype, channels, std::vector<std::int64_t>(at(ranks), 1), 1, false);
      for (RankStep& rank : batch.ranks) {
        for (std::int64_t c = 0; c < channels; ++c) {
          std::int64_t* const words = rank.forward.data() + kHeaderWords + c * format.words();
          write_sum(random, words, format.first.digits);
          write_sum(random, words + format.first.digits, format.second.digits);
          words[format.words() - 1] = random.one_in(9) ? kFirstNan : 0;
        }
      }
      const Words expected = carried(total(batch, &RankStep::forward), dtype);
      emulation::settings() = {.seed = random.bits(), .multiprocessors = 2};
      emulation::run_devices(static_cast<unsigned>(ranks), [&](unsigned r) {
        cuda::exchange_sums(batch.ranks[r].forward.data(), dtype, peers.group(static_cast<int>(r)),
                            channels, {});
      });
      for (const RankStep& rank : batch.ranks) {
        ASSERT_EQ(behind_header(rank.forward, dtype), expected);
      }
    }
  }
}

TEST_F(CudaPeerSums, OfUsualDataTravelInEightWordsAChannel) {
  Random random(14);
  constexpr std::int64_t kChannels = 6;
  for (const auto& [dtype, expected] : {std::pair(DType::kFloat32, 8),
                                        {DType::kBFloat16, 8},
                                        {DType::kFloat16, 6},
                                        {DType::kFloat64, 16}}) {
    SCOPED_TRACE(name(dtype));
    Tensor x(dtype, {4, kChannels, 50});
    Doubles values(at(4 * kChannels * 50));
    for (double& value : values) {  // of both signs, and means of both
      value = static_cast<double>(random.between(-3000, 4000)) / 1024.0 + 0.25;
    }
    x.fill(values);
    Peers peers(2, 1, cuda::kLeastSlotWords + kChannels * (1 + words_per_channel(dtype)));
    Words message(at(message_words(dtype, kChannels)));
    local_moments(x.view(), {}, message.data(), 5, serial_executor());
    std::vector<Words> messages(2, message);
    emulation::settings() = {.seed = 1, .multiprocessors = 2};
    emulation::run_devices(2, [&](unsigned r) {
      cuda::exchange_sums(messages[r].data(), dtype, peers.group(static_cast<int>(r)), kChannels,
                          {});
    });
    // Nothing was sent to the rest of each channel's place.
    const std::int64_t place = expected == 6 ? 6 : 1 + words_per_channel(dtype);
    const std::int64_t* const slot =
        peers.memory[0].data() + cuda::kSlotsBegin + 3 * peers.agreed.slot_words + 1 + kHeaderWords;
    for (std::int64_t c = 0; c < kChannels; ++c) {
      EXPECT_TRUE(std::any_of(slot + c * place, slot + c * place + expected,
                              [](std::int64_t word) { return word != 0; }));
      EXPECT_TRUE(std::all_of(slot + c * place + expected, slot + (c + 1) * place,
                              [](std::int64_t word) { return word == 0; }));
    }
  }
}

TEST_F(CudaPeerSums, NeedADeviceThatRunsAllBlocksAtOnce) {
  emulation::settings() = {.multiprocessors = 3};  // of two blocks each
  cuda::load_peer_exchange(DType::kFloat32, 6);
  EXPECT_EQ(thrown_text<Unavailable>([] { cuda::load_peer_exchange(DType::kFloat32, 7); }),
            "an exchange of 7 blocks does not fit the device, which runs 6 of them at once");
}

TEST_F(CudaPeerSums, OfCallsThatDifferAreRefused) {
  Random random(12);
  const std::vector<std::int64_t> samples = {2, 1};
  for (const bool missing : {false, true}) {
    SCOPED_TRACE(missing);
    Peers peers(2, 2, cuda::kLeastSlotWords, 400'000'000);
    PeerBatch batch(random, DType::kFloat32, 9, samples, 1, false);
    PeerBatch next(random, DType::kFloat32, 9, samples, 2, false);
    emulation::settings() = {.seed = random.bits(), .multiprocessors = 2};
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
