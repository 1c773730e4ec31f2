// SPDX-License-Identifier: Apache-2.0
#include "syncbn/cuda_peers.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "emulator.hpp"
#include "peer_ranks.hpp"
#include "syncbn/error.hpp"

// The exchange on devices: K ranks whose kernels run together, over memory that is as weak as PTX
// allows, have the bits of one rank, and a rank that is missing or differs is no more than NaN.
namespace syncbn::testing {
namespace {

using Momentum = std::optional<double>;

class CudaPeers : public ::testing::Test {
 protected:
  void TearDown() override { emulation::settings() = {}; }
};

void seed(std::uint64_t number) { emulation::settings() = {.seed = number, .multiprocessors = 2}; }

bool all_nan(const Doubles& values) {
  return same_bits(values, Doubles(values.size(), std::numeric_limits<double>::quiet_NaN()));
}
bool is_nan(const RankStep& step) {
  return all_nan(step.mean) && all_nan(step.var) && all_nan(step.rstd) && step.info == Words{-1, 0};
}
bool gradients_are_nan(const RankStep& step) {
  return all_nan(step.coefficients) && all_nan(step.dweight.values()) &&
         all_nan(step.dbias.values());
}
/// After a call whose outputs are NaN.
PeerLayer failed(PeerLayer layer) {
  ++layer.call;
  layer.count = -1;
  return layer;
}
bool unmarked(const Peers& peers) {
  for (const Words& mark : peers.mark) {
    if (mark != Words(mark.size())) {
      return false;
    }
  }
  return true;
}

/// A rank's samples: uneven, and often none.
std::vector<std::int64_t> dealt(Random& random, int ranks) {
  std::vector<std::int64_t> out;
  for (int r = 0; r < ranks; ++r) {
    out.push_back(random.one_in(3) ? 0 : random.between(1, 4));
  }
  return out;
}

/// Each batch forward and backward, on all ranks at once.
void run_steps(Peers& peers, std::vector<PeerBatch>& batches, std::vector<PeerLayer>& layers,
               Momentum momentum) {
  emulation::run_devices(static_cast<unsigned>(peers.agreed.ranks), [&](unsigned r) {
    for (PeerBatch& batch : batches) {
      batch.ranks[r].launch_forward(peers.group(static_cast<int>(r)), layers[r], momentum);
      batch.ranks[r].launch_backward(peers.group(static_cast<int>(r)));
    }
  });
}

void expect_bits_of_one_rank(const std::vector<PeerBatch>& batches,
                             const std::vector<PeerLayer>& layers, PeerLayer expected,
                             Momentum momentum) {
  for (const PeerBatch& batch : batches) {
    for (std::size_t r = 0; r < layers.size(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      EXPECT_TRUE(batch.ranks[r].same_statistics(batch.one));
      EXPECT_TRUE(
          batch.ranks[r].same_gradients(batch.ranks[r].share ? batch.shares[r] : batch.one));
    }
    batch.update(expected, momentum);
  }
  for (std::size_t r = 0; r < layers.size(); ++r) {
    EXPECT_TRUE(layers[r] == expected) << "running statistics of rank " << r;
  }
}

TEST_F(CudaPeers, BitsOfOneRank) {
  Random random(1);
  for (const int ranks : {1, 2, 3, 8}) {
    for (const DType dtype : kDtypes) {
      const std::int64_t channels = random.between(1, ranks == 8 ? 20 : 70);
      const int blocks = static_cast<int>(random.between(1, ranks == 8 ? 2 : 4));
      // From one channel at a time to all of them.
      const std::int64_t slot_words =
          random.one_in(2)
              ? cuda::kLeastSlotWords
              : cuda::kLeastSlotWords + random.between(1, channels) * words_per_channel(dtype);
      const Momentum momentum = random.one_in(2) ? Momentum() : kPeerMomentum;
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + name(dtype) + ", " +
                   std::to_string(channels) + " channels, " + std::to_string(blocks) + " blocks");
      Peers peers(ranks, blocks, slot_words);
      std::vector<PeerBatch> batches;
      for (std::uint64_t call = 0; call < 2; ++call) {
        batches.emplace_back(random, dtype, channels, dealt(random, ranks), call, random.one_in(2));
      }
      const PeerLayer before(DType::kFloat32, channels);
      std::vector<PeerLayer> layers(at(ranks), before);
      seed(random.bits());
      cuda::load_peer_exchange(dtype, blocks);
      const std::uint64_t unloaded = emulation::counts().launches_of_unloaded;
      run_steps(peers, batches, layers, momentum);
      EXPECT_EQ(emulation::counts().launches_of_unloaded, unloaded);
      expect_bits_of_one_rank(batches, layers, before, momentum);
      EXPECT_TRUE(unmarked(peers));
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST_F(CudaPeers, ManyEpochsOfLayersOfOtherWidths) {
  Random random(2);
  for (std::uint64_t round = 1; round <= 4; ++round) {
    Peers peers(3, 2, cuda::kLeastSlotWords);
    std::vector<PeerBatch> batches;
    for (std::uint64_t call = 0; call < 8; ++call) {
      batches.emplace_back(random, random.pick(std::vector(kDtypes, kDtypes + 4)),
                           random.between(1, 12), dealt(random, 3), call, false);
    }
    seed(round);
    emulation::run_devices(3, [&](unsigned r) {
      for (PeerBatch& batch : batches) {
        cuda::exchange_moments(
            batch.ranks[r].forward.data(), batch.one.dtype, peers.group(static_cast<int>(r)),
            batch.ranks[r].mean.data(), batch.ranks[r].var.data(), batch.ranks[r].rstd.data(),
            batch.ranks[r].info.data(), batch.one.channels, kPeerEps, {}, kPeerMomentum, {});
        batch.ranks[r].launch_backward(peers.group(static_cast<int>(r)));
      }
    });
    for (const PeerBatch& batch : batches) {
      for (const RankStep& rank : batch.ranks) {
        ASSERT_TRUE(rank.same_statistics(batch.one));
        ASSERT_TRUE(rank.same_gradients(batch.one));
      }
    }
  }
}

/// One layer's forward on the ranks that come.
class Failing {
 public:
  Failing(int ranks, std::int64_t channels, const Peers& agreed)
      : peers(agreed.agreed.ranks, agreed.agreed.blocks, agreed.agreed.slot_words,
              agreed.agreed.timeout),
        random_(9),
        before(DType::kFloat32, channels),
        batch(random_, DType::kFloat32, channels, std::vector<std::int64_t>(at(ranks), 2), 1,
              false),
        layers(at(ranks), before) {}

  void run(const std::vector<unsigned>& coming) {
    emulation::run_devices(static_cast<unsigned>(layers.size()), [&](unsigned r) {
      for (const unsigned one : coming) {
        if (one == r) {
          cuda::PeerGroup group = peers.group(static_cast<int>(r));
          group.timeout = timeout_of.empty() ? group.timeout : timeout_of[r];
          batch.ranks[r].launch_forward(group, layers[r], kPeerMomentum);
        }
      }
    });
  }

  Peers peers;

 private:
  Random random_;

 public:
  const PeerLayer before;
  PeerBatch batch;
  std::vector<PeerLayer> layers;
  std::vector<std::int64_t> timeout_of;
};

TEST_F(CudaPeers, AMissingRankEndsInTimeAndIsNamed) {
  for (std::uint64_t number = 1; number <= 4; ++number) {
    // Rank 0 alone looks at the time; the others end because it tells them.
    Failing it(4, 21, Peers(4, 3, 200));
    constexpr std::int64_t kLimit = 400'000'000;
    it.timeout_of = {kLimit, kForEver, kForEver, kForEver};
    seed(number);
    emulation::settings().step_nanoseconds = 1000;
    const std::int64_t begin = emulation::nanoseconds();
    it.run({0, 1, 3});
    EXPECT_LT(emulation::nanoseconds() - begin, 5 * kLimit);
    for (const std::size_t r : {0u, 1u, 3u}) {
      EXPECT_TRUE(is_nan(it.batch.ranks[r])) << r;
      EXPECT_TRUE(it.layers[r] == failed(it.before)) << r;
      EXPECT_EQ(it.peers.mark[r][cuda::kMarkGaveUp], 1) << "rank 0 gave up first";
    }
    Words missing(at(cuda::kPeerMarkWords));
    missing[cuda::kMarkGaveUp] = 1;
    missing[cuda::kMarkMissing + 2] = 1;
    EXPECT_EQ(it.peers.mark[0], missing) << "rank 2 in epoch 1";

    // The ranks have to meet anew: nobody waits, the one that was late neither.
    seed(number + 10);
    it.timeout_of.clear();
    const Words sent = it.peers.memory[1];
    it.run({0, 1, 2, 3});
    for (std::size_t r = 0; r < 4; ++r) {
      EXPECT_TRUE(is_nan(it.batch.ranks[r])) << r;
      EXPECT_EQ(it.layers[r].batches, it.before.batches);
    }
    for (std::int64_t flag = 0; flag < cuda::kAbortWord; ++flag) {
      if (flag % cuda::kMostPeers != 2) {
        EXPECT_EQ(it.peers.memory[1][at(flag)], sent[at(flag)]) << "who failed sends no more";
      }
    }
  }
}

TEST_F(CudaPeers, AKilledRankLeavesWholeResultsOrNone) {
  Random random(8);
  int whole_calls = 0;
  int failed_calls = 0;
  for (std::uint64_t number = 1; number <= 12; ++number) {
    SCOPED_TRACE(number);
    Peers peers(3, 2, cuda::kLeastSlotWords, 400'000'000);
    std::vector<PeerBatch> batches;
    for (std::uint64_t call = 0; call < 3; ++call) {  // three rounds each
      batches.emplace_back(random, DType::kFloat32, 20, std::vector<std::int64_t>{2, 1, 3}, call,
                           false);
    }
    const PeerLayer before(DType::kFloat32, 20);
    std::vector<PeerLayer> layers(3, before);
    seed(number);
    emulation::settings().step_nanoseconds = 1000;
    emulation::settings().killed = 2;
    emulation::settings().killed_after = random.below(number % 2 == 0 ? 8000 : 300000);
    emulation::run_devices(3, [&](unsigned r) {
      for (PeerBatch& batch : batches) {
        batch.ranks[r].launch_forward(peers.group(static_cast<int>(r)), layers[r], kPeerMomentum);
      }
    });
    for (std::size_t r = 0; r < 2; ++r) {
      PeerLayer expected = before;
      bool has_failed = false;
      for (const PeerBatch& batch : batches) {
        has_failed = has_failed || batch.ranks[r].info[0] < 0;
        if (has_failed) {
          EXPECT_TRUE(is_nan(batch.ranks[r])) << r;
          expected = failed(expected);
        } else {
          EXPECT_TRUE(batch.ranks[r].same_statistics(batch.one)) << r;
          batch.update(expected, kPeerMomentum);
        }
        ++(has_failed ? failed_calls : whole_calls);
      }
      EXPECT_TRUE(layers[r] == expected) << r;
      EXPECT_EQ(peers.mark[r][cuda::kMarkGaveUp] != 0, has_failed) << r;
    }
  }
  EXPECT_GT(whole_calls, 5);
  EXPECT_GT(failed_calls, 5);
}

TEST_F(CudaPeers, AnAbortEndsAllThatWait) {
  Failing it(3, 40, Peers(3, 2, 300));
  constexpr std::int64_t kCode = 1000;
  it.peers.abort(kCode);
  seed(3);
  it.run({0, 2});
  for (const std::size_t r : {0u, 2u}) {
    EXPECT_TRUE(is_nan(it.batch.ranks[r])) << r;
    EXPECT_TRUE(it.layers[r] == failed(it.before)) << r;
    Words mark(at(cuda::kPeerMarkWords));
    mark[cuda::kMarkGaveUp] = kCode;
    EXPECT_EQ(it.peers.mark[r], mark);
  }
}

TEST_F(CudaPeers, CallsThatDifferAreNanAndTheNextOneIsRight) {
  Random random(4);
  const std::int64_t channels = 14;
  for (int difference = 0; difference < 6; ++difference) {
    SCOPED_TRACE(difference);
    Peers peers(3, 2, cuda::kLeastSlotWords);  // one channel of float64 in a round
    const std::vector<std::int64_t> samples = {2, 1, 3};
    PeerBatch first(random, DType::kFloat32, channels, samples, 1, false);
    PeerBatch next(random, DType::kFloat32, channels, samples, 2, false);
    const PeerLayer before(DType::kFloat32, channels);
    std::vector<PeerLayer> layers(3, before);
    PeerBatch wide(random, DType::kFloat32, channels + 9, samples, 1, false);
    PeerBatch other_dtype(random, DType::kFloat64, channels, samples, 1, false);
    RankStep* of_last = &first.ranks[2];
    PeerLayer layer_of_last = before;
    switch (difference) {
      case 0:  // another call
        of_last->forward = next.ranks[2].forward;
        break;
      case 1:  // another number of channels, with their own fingerprint or by a collision
      case 2:
        of_last = &wide.ranks[2];
        layer_of_last = PeerLayer(DType::kFloat32, channels + 9);
        if (difference == 2) {
          std::copy_n(first.ranks[2].forward.begin(), kHeaderWords, of_last->forward.begin());
        }
        break;
      case 3:
        of_last = &other_dtype.ranks[2];
        break;
      case 4:  // a rank without samples cannot know the dtype, but has to
        of_last = &other_dtype.ranks[2];
        of_last->forward.assign(of_last->forward.size(), 0);
        std::copy_n(first.ranks[2].forward.begin(), 3, of_last->forward.begin());
        of_last->forward[kHeaderCount] = 0;
        break;
      default:  // a rank that refuses its input, and has no more than a header
        rejection_header(1, of_last->forward.data());
        of_last->channels = 0;
        break;
    }
    seed(random.bits());
    emulation::run_devices(3, [&](unsigned r) {
      const cuda::PeerGroup group = peers.group(static_cast<int>(r));
      RankStep& step = r == 2 ? *of_last : first.ranks[r];
      step.launch_forward(group, r == 2 ? layer_of_last : layers[r], kPeerMomentum);
      if (r == 2) {
        layers[2] = failed(before);
        next.ranks[2].launch_forward(group, layers[2], kPeerMomentum);
      } else {
        next.ranks[r].launch_forward(group, layers[r], kPeerMomentum);
      }
    });
    of_last->channels = difference == 5 ? channels : of_last->channels;
    for (std::size_t r = 0; r < 3; ++r) {
      const RankStep& step = r == 2 ? *of_last : first.ranks[r];
      EXPECT_TRUE(r == 2 && difference == 5 ? step.info == (Words{-1, 0}) : is_nan(step)) << r;
      EXPECT_TRUE(next.ranks[r].same_statistics(next.one));
      PeerLayer expected = failed(before);
      next.update(expected, kPeerMomentum);
      EXPECT_TRUE(layers[r] == expected) << r;
    }
    EXPECT_TRUE(unmarked(peers)) << "not an exchange that failed";
  }
}

TEST_F(CudaPeers, ABackwardOfAnotherForwardIsNan) {
  Random random(6);
  Peers peers(2, 2, cuda::kLeastSlotWords);
  PeerBatch batch(random, DType::kFloat32, 17, {3, 2}, 1, true);
  PeerBatch next(random, DType::kFloat32, 17, {3, 2}, 2, true);
  for (PeerBatch* one : {&batch, &next}) {
    for (RankStep& rank : one->ranks) {
      rank.info = one->one.info;
      rank.mean = one->one.mean;
      rank.rstd = one->one.rstd;
    }
  }
  batch.ranks[1].info[0] += 1;  // on this rank alone
  seed(5);
  emulation::run_devices(2, [&](unsigned r) {
    batch.ranks[r].launch_backward(peers.group(static_cast<int>(r)));
    next.ranks[r].launch_backward(peers.group(static_cast<int>(r)));
  });
  EXPECT_TRUE(batch.ranks[0].same_gradients(batch.shares[0]));
  EXPECT_TRUE(gradients_are_nan(batch.ranks[1]));
  EXPECT_TRUE(next.ranks[0].same_gradients(next.shares[0]));
  EXPECT_TRUE(next.ranks[1].same_gradients(next.shares[1]));
}

TEST_F(CudaPeers, WrongGroupsAreRefused) {
  Random random(7);
  PeerBatch batch(random, DType::kFloat32, 3, {1, 1}, 1, false);
  PeerLayer layer(DType::kFloat32, 3);
  Peers peers(2, 2, 100);
  const auto error_of = [&](auto change) {
    cuda::PeerGroup group = peers.group(1);
    change(group);
    try {
      batch.ranks[1].launch_forward(group, layer, kPeerMomentum);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using Group = cuda::PeerGroup;
  EXPECT_EQ(error_of([](Group& g) { g.ranks = 17; }), "group.ranks: got 17, expected 1 to 16");
  EXPECT_EQ(error_of([](Group& g) { g.rank = 2; }), "group.rank: got 2, expected 0 to 1");
  EXPECT_EQ(error_of([](Group& g) { g.blocks = 9; }), "group.blocks: got 9, expected 1 to 8");
  EXPECT_EQ(error_of([](Group& g) { g.slot_words = 95; }),
            "group.slot_words: got 95, expected 96 or more");
  EXPECT_EQ(error_of([](Group& g) { g.timeout = 0; }),
            "group.timeout: got 0, expected nanoseconds, more than 0");
  EXPECT_EQ(error_of([](Group& g) { g.memory[0] = nullptr; }),
            "group: got null, expected memory of each rank, a state and a mark");
}

}  // namespace
}  // namespace syncbn::testing
