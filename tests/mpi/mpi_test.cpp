// SPDX-License-Identifier: Apache-2.0
// Groups over MPI; every rank of mpiexec runs these tests in the same order.
#include <cstdio>
#include <limits>
#include <string_view>

#include "mpi_test.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/mpi.hpp"
#include "syncbn/mpi_c_api.h"

namespace syncbn {
namespace {

TEST(Mpi, KnowsItself) {
  const MpiCommunicator group = group_of_all();
  EXPECT_EQ(group.rank(), world_rank());
  EXPECT_EQ(group.size(), world_size());
}

TEST(Mpi, SumsWrapAroundExact) {
  MpiCommunicator group = group_of_all();
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
  MpiCommunicator group = group_of_all();
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
  MpiCommunicator group = group_of_all();
  const Step step(group, Statistics::kReproducible);
  Communicator& self = self_communicator();
  const Step whole(self, Statistics::kReproducible);
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
  MpiCommunicator group = group_of_all();
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
  if (argc > 1 && std::string_view(argv[1]) == "mpi") {
    syncbn::way = syncbn::Way::kMpi;
  } else if (argc > 1 && std::string_view(argv[1]) == "nodes") {
    syncbn::way = syncbn::Way::kNodes;
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
