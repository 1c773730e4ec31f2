// SPDX-License-Identifier: Apache-2.0
// Groups over MPI; every rank of mpiexec runs these tests in the same order. In these places
// torch.nn.SyncBatchNorm has no MPI of its own: with PyTorch's MPI backend a rank that differs or
// does not come hangs the others, without a time limit.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "syncbn/batch_norm.hpp"
#include "syncbn/error.hpp"
#include "syncbn/mpi.hpp"
#include "syncbn/mpi_c_api.h"

namespace syncbn {
namespace {

using std::chrono::milliseconds;

/// Far above what ranks that come at the same time need on a busy machine.
constexpr milliseconds kShort(600);

MPI_Comm world() { return MPI_COMM_WORLD; }

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// The text of the exception of type E that body throws; "" and a failure without one.
template <class E, class Body>
std::string thrown(const Body& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void expect_usable(Communicator& group) {
  std::vector<std::int64_t> words = {1, group.rank()};
  group.all_reduce_sum(words);
  EXPECT_EQ(words[0], group.size());
  EXPECT_EQ(words[1], group.size() * (group.size() - 1) / 2);
}

void expect_broken(Communicator& group, const std::string& part) {
  std::vector<std::int64_t> words = {1};
  const std::string text = thrown<PeerLost>([&] { group.all_reduce_sum(words); });
  EXPECT_TRUE(contains(text, part)) << text;
  EXPECT_EQ(words[0], 1);
}

TEST(Mpi, KnowsItself) {
  const MpiCommunicator group(world());
  EXPECT_EQ(group.rank(), world_rank());
  EXPECT_EQ(group.size(), world_size());
}

TEST(Mpi, SumsWrapAroundExact) {
  MpiCommunicator group(world());
  for (const std::size_t length : {0u, 1u, 19u, 1000u, 100'000u}) {
    const auto word = [](std::size_t i, int r) {
      return i == 0 ? static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())
                    : (i + 1) * 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(r + 1);
    };
    std::vector<std::int64_t> words;
    std::vector<std::int64_t> expected;
    for (std::size_t i = 0; i < length; ++i) {
      words.push_back(static_cast<std::int64_t>(word(i, group.rank())));
      std::uint64_t sum = 0;
      for (int r = 0; r < group.size(); ++r) {
        sum += word(i, r);
      }
      expected.push_back(static_cast<std::int64_t>(sum));
    }
    group.all_reduce_sum(words);
    ASSERT_EQ(words, expected);
  }
}

TEST(Mpi, GathersInRankOrderExact) {
  MpiCommunicator group(world());
  for (const std::size_t length : {0u, 1u, 7u, 100'000u}) {
    const std::vector<std::byte> mine(length, static_cast<std::byte>(group.rank() + 1));
    std::vector<std::byte> all(length * static_cast<std::size_t>(group.size()));
    group.all_gather(mine, all);
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(all[i], static_cast<std::byte>(i / length + 1));
    }
  }
}

/// A step of this rank's part of a batch; over all ranks of `group` it is always the same batch.
struct Step {
  static constexpr std::int64_t kSamples = 11;
  static constexpr std::int64_t kChannels = 3;
  static constexpr std::int64_t kPlane = 20;
  static constexpr std::int64_t kSample = kChannels * kPlane;

  Step(Communicator& group, Statistics statistics) {
    // Uneven parts; rank 1 has none.
    std::vector<std::int64_t> bounds = {0};
    for (int r = 0; r < group.size(); ++r) {
      const std::int64_t rest = kSamples - bounds.back();
      bounds.push_back(bounds.back() + (r == group.size() - 1 ? rest : r == 1 ? 0 : rest / 2));
    }
    if (group.size() == 2) {
      bounds = {0, 4, kSamples};
    }
    first = bounds[static_cast<std::size_t>(group.rank())];
    last = bounds[static_cast<std::size_t>(group.rank()) + 1];
    std::vector<float> x(static_cast<std::size_t>(kSamples * kSample));
    std::vector<float> dy(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(i * i % 977) * 0.013f - 5.0f;
      dy[i] = static_cast<float>(i * i * i % 991) * 0.007f - 3.0f;
    }
    const std::vector<std::int64_t> shape = {last - first, kChannels, kPlane};
    const auto view = [&](std::vector<float>& of, std::int64_t at) {
      return MutableTensorView(of.data() + at * kSample, DType::kFloat32, shape);
    };
    const auto parameter = [&](std::vector<float>& of) {
      return MutableTensorView(of.data(), DType::kFloat32, {kChannels});
    };
    y.resize(static_cast<std::size_t>((last - first) * kSample));
    dx.resize(y.size());
    BatchNorm layer({.channels = kChannels, .name = "layer", .statistics = statistics}, group);
    layer.forward({.x = view(x, first),
                   .y = view(y, 0),
                   .running_mean = parameter(running_mean),
                   .running_var = parameter(running_var)},
                  saved);
    layer.backward({.dy = view(dy, first),
                    .x = view(x, first),
                    .dx = view(dx, 0),
                    .dweight = parameter(dweight),
                    .dbias = parameter(dbias),
                    .affine = AffineGradients::kGlobal},
                   saved);
    mean.assign(saved.mean().begin(), saved.mean().end());
    rstd.assign(saved.rstd().begin(), saved.rstd().end());
  }

  std::int64_t first = 0;
  std::int64_t last = 0;
  std::vector<float> y, dx;
  std::vector<float> running_mean = {0, 0, 0}, running_var = {1, 1, 1};
  std::vector<float> dweight = {0, 0, 0}, dbias = {0, 0, 0};
  std::vector<double> mean, rstd;
  Saved saved;
};

TEST(Mpi, LayerHasTheBitsOfOneRankExact) {
  MpiCommunicator group(world());
  const Step step(group, Statistics::kReproducible);
  const auto self = self_communicator();
  const Step whole(*self, Statistics::kReproducible);
  const auto part = [&](const std::vector<float>& of) {
    return std::vector<float>(of.begin() + step.first * Step::kSample,
                              of.begin() + step.last * Step::kSample);
  };
  EXPECT_EQ(step.mean, whole.mean);
  EXPECT_EQ(step.rstd, whole.rstd);
  EXPECT_EQ(step.saved.count(), whole.saved.count());
  EXPECT_EQ(step.y, part(whole.y));
  EXPECT_EQ(step.dx, part(whole.dx));
  EXPECT_EQ(step.running_mean, whole.running_mean);
  EXPECT_EQ(step.running_var, whole.running_var);
  EXPECT_EQ(step.dweight, whole.dweight);
  EXPECT_EQ(step.dbias, whole.dbias);
}

TEST(Mpi, WelfordIsTheSameOnEveryRankExact) {
  MpiCommunicator group(world());
  const Step step(group, Statistics::kWelford);
  std::vector<double> of_rank_0 = step.mean;
  MPI_Bcast(of_rank_0.data(), static_cast<int>(of_rank_0.size()), MPI_DOUBLE, 0, MPI_COMM_WORLD);
  EXPECT_EQ(step.mean, of_rank_0);
  EXPECT_EQ(step.saved.count(), Step::kSamples * Step::kPlane);
}

TEST(Mpi, APartOfTheWorldIsAGroup) {
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank() % 2, 0, &half);
  {
    MpiCommunicator group(half);
    MPI_Comm_free(&half);  // the group has a duplicate
    EXPECT_EQ(group.size(), (world_size() + 1 - world_rank() % 2) / 2);
    expect_usable(group);
  }
}

TEST(Mpi, AGroupForC) {
  syncbn_group* group = nullptr;
  EXPECT_EQ(syncbn_mpi_group_create(MPI_Comm_c2f(MPI_COMM_WORLD), 60000, nullptr),
            SYNCBN_INVALID_ARGUMENT);
  EXPECT_EQ(syncbn_mpi_group_create(MPI_Comm_c2f(MPI_COMM_NULL), 60000, &group),
            SYNCBN_INVALID_ARGUMENT);
  EXPECT_TRUE(contains(syncbn_last_error(), "communicator: got MPI_COMM_NULL"));
  ASSERT_EQ(syncbn_mpi_group_create(MPI_Comm_c2f(MPI_COMM_WORLD), 60000, &group), SYNCBN_OK);
  const syncbn_communicator* end = syncbn_group_rank(group, world_rank());
  ASSERT_NE(end, nullptr);
  std::int64_t words[] = {1, 5};
  EXPECT_EQ(end->all_reduce_sum(end->user_data, words, 2), SYNCBN_OK);
  EXPECT_EQ(words[0], world_size());
  EXPECT_EQ(words[1], 5 * world_size());
  syncbn_group_destroy(group);
}

TEST(Mpi, OtherLengthsAreAnErrorOnEveryRankAndTheGroupGoesOn) {
  MpiCommunicator group(world());
  const int last = group.size() - 1;
  std::vector<std::int64_t> words(group.rank() == last ? 3 : 2, 7);
  const auto before = words;
  std::string text = thrown<DivergenceError>([&] { group.all_reduce_sum(words); });
  EXPECT_TRUE(contains(
      text, "brought 16 bytes to the exchange, rank " + std::to_string(last) + " brought 24"))
      << text;
  EXPECT_EQ(words, before);
  expect_usable(group);

  text = thrown<DivergenceError>([&] {
    if (group.rank() == last) {
      std::vector<std::byte> all(16 * static_cast<std::size_t>(group.size()));
      group.all_gather(std::vector<std::byte>(16), all);
    } else {
      std::vector<std::int64_t> two(2);
      group.all_reduce_sum(two);
    }
  });
  EXPECT_TRUE(contains(text, "to another kind of exchange")) << text;
  expect_usable(group);
}

/// A forward whose y is right or not on this rank.
void forward(Communicator& group, const char* name, bool good) {
  const float x[] = {1, 2};
  float y[] = {-7, -7};
  BatchNorm layer({.channels = 1, .name = name}, group);
  Saved saved;
  try {
    layer.forward({.x = {x, {2, 1}}, .y = {y, good ? Extents{2, 1} : Extents{2}}}, saved);
  } catch (...) {
    EXPECT_EQ(y[0], -7);
    throw;
  }
}

TEST(Mpi, OtherLayersAreAnErrorOnEveryRank) {
  MpiCommunicator group(world());
  thrown<DivergenceError>([&] { forward(group, group.rank() == 0 ? "stem" : "head", true); });
  expect_usable(group);
}

TEST(Mpi, ARefusedArgumentReachesEveryRank) {
  for (const int refusing : {0, 1}) {
    MpiCommunicator group(world());
    if (group.rank() == refusing) {
      thrown<InvalidArgument>([&] { forward(group, "stem", false); });
    } else {
      const std::string text = thrown<PeerLost>([&] { forward(group, "stem", true); });
      EXPECT_TRUE(
          contains(text, "rank " + std::to_string(refusing) +
                             " left the group: stem, call 0, forward, 1 channels, float32: y: got"))
          << text;
    }
    expect_broken(group, "rank " + std::to_string(refusing) + " left the group");
  }
}

TEST(Mpi, ARankThatComesLateIsNamedOnEveryRank) {
  MpiCommunicator group(world(), kShort);
  const int late = group.size() - 1;
  if (group.rank() == late) {
    std::this_thread::sleep_for(2 * kShort);
  }
  std::vector<std::int64_t> words = {1};
  const std::string text = thrown<ExchangeTimeout>([&] { group.all_reduce_sum(words); });
  EXPECT_TRUE(contains(
      text, "rank " + std::to_string(late) + " did not come to the exchange within 600 ms"))
      << text;
  EXPECT_EQ(words[0], 1);
  expect_broken(group, "did not come");
  MPI_Barrier(MPI_COMM_WORLD);  // the caller's communicator still works
}

TEST(Mpi, ALateRank0IsNamed) {
  MpiCommunicator group(world(), kShort);
  std::vector<std::int64_t> words = {1};
  if (group.rank() == 0) {
    std::this_thread::sleep_for(3 * kShort);
    const std::string text = thrown<PeerLost>([&] { group.all_reduce_sum(words); });
    EXPECT_TRUE(contains(text, "left the group: rank 0 did not come")) << text;
  } else {
    const std::string text = thrown<ExchangeTimeout>([&] { group.all_reduce_sum(words); });
    EXPECT_TRUE(contains(text, "rank 0 did not come to the exchange within 600 ms")) << text;
  }
  expect_broken(group, "did not come");
}

TEST(Mpi, ALongPauseOfAllRanksIsNoTimeout) {
  MpiCommunicator group(world(), milliseconds(200));
  std::this_thread::sleep_for(milliseconds(500));
  MPI_Barrier(MPI_COMM_WORLD);
  expect_usable(group);
}

TEST(Mpi, AnotherThreadIsRefusedAtThisLevel) {
  MpiCommunicator group(world());
  std::string text;
  std::thread([&] {
    std::vector<std::int64_t> words = {1};
    text = thrown<InvalidArgument>([&] { group.all_reduce_sum(words); });
  }).join();
  EXPECT_TRUE(contains(text, "thread: got one that did not initialize MPI")) << text;
  expect_usable(group);
}

TEST(Mpi, BadArguments) {
  EXPECT_TRUE(contains(thrown<InvalidArgument>([] { MpiCommunicator(world(), milliseconds(0)); }),
                       "timeout: got 0 ms, expected at least 1 ms"));
  EXPECT_TRUE(contains(thrown<InvalidArgument>([] { MpiCommunicator(MPI_COMM_NULL); }),
                       "communicator: got MPI_COMM_NULL"));
  MpiCommunicator group(world());
  std::vector<std::byte> small(1);
  const std::string text =
      thrown<InvalidArgument>([&] { group.all_gather(std::vector<std::byte>(3), small); });
  EXPECT_TRUE(contains(text, "out: got 1 bytes, expected")) << text;
  expect_broken(group, "left the group: out: got 1 bytes");
}

/// In a run of its own (mpi.dead): mpiexec must be told to leave the other ranks alone, and no rank
/// can go on with MPI afterwards, not even to MPI_Finalize.
TEST(Mpi, DISABLED_ADeadRankIsNamed) {
  MpiCommunicator group(world(), kShort);
  expect_usable(group);
  const int dead = group.size() - 1;
  if (group.rank() == dead) {
    std::_Exit(0);
  }
  std::vector<std::int64_t> words = {1};
  const std::string text = thrown<ExchangeTimeout>([&] { group.all_reduce_sum(words); });
  EXPECT_TRUE(contains(text, "rank " + std::to_string(dead) + " did not come to the exchange"))
      << text;
  expect_broken(group, "did not come");
  std::fprintf(stderr, "rank %d: %s\n", group.rank(),
               HasFailure() ? "failed" : "named the dead rank");
  std::_Exit(HasFailure() ? 1 : 0);
}

/// What ranks other than 0 print.
class FailuresOnly final : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed()) {
      std::fprintf(stderr, "rank %d: %s:%d: %s\n", world_rank(), result.file_name(),
                   result.line_number(), result.summary());
    }
  }
};

}  // namespace
}  // namespace syncbn

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  bool refused = false;
  try {
    syncbn::MpiCommunicator early(syncbn::MpiHandle{0});
  } catch (const syncbn::InvalidArgument&) {  // MPI is not initialized
    refused = true;
  }
  if (!refused) {
    return 1;
  }
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  if (syncbn::world_rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new syncbn::FailuresOnly);
  }
  const int result = RUN_ALL_TESTS();
  MPI_Finalize();
  return result;
}
