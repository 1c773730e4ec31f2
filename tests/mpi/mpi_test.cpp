// SPDX-License-Identifier: Apache-2.0
// Groups over MPI; every rank of mpiexec runs these tests in the same order.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "mpi_test.hpp"
#include "placed_rank.hpp"
#include "properties.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/mpi.hpp"
#include "syncbn/mpi_c_api.h"

namespace syncbn {

/// What tests' tensors need of the core, which its library does not export.
void refuse_dtype(DType) { std::abort(); }

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

/// A step of this rank's part of a batch, which is always the same: the results, and whose they
/// are.
struct Part {
  testing::Random random{7};
  testing::Step step{random, DType::kFloat32, {11, 3, 20}};
  std::vector<std::int64_t> samples;
  testing::Outcome out{step, 1};

  Part(Communicator& group, Statistics statistics) {
    step.options.name = "layer";
    step.options.statistics = statistics;
    for (std::int64_t n = 0; n < 11; ++n) {  // uneven parts; of more than two ranks one has none
      const std::int64_t owner = group.size() > 2 && n % group.size() == 1 ? 0 : n % group.size();
      if (owner == group.rank()) {
        samples.push_back(n);
      }
    }
    testing::Rank rank(step, samples, {});
    BatchNorm layer(step.options, group);
    Saved saved;
    rank.forward(layer, saved, serial_executor());
    rank.backward(layer, saved, rank.x_view(), serial_executor());
    testing::put_back(rank.y.values(), samples, out.y);
    out.take(rank, 0, samples,
             {testing::values(saved.mean()), testing::values(saved.var()),
              testing::values(saved.rstd()), saved.count()});
  }
};

TEST(Mpi, LayerHasTheBitsOfOneRankExact) {
  MpiCommunicator group = group_of_all();
  const Part part(group, Statistics::kReproducible);
  Part whole(self_communicator(), Statistics::kReproducible);
  for (auto values : {&testing::Outcome::y, &testing::Outcome::dx}) {
    std::vector<double> own((whole.out.*values).size());
    testing::put_back(testing::parts_of(whole.out.*values, part.samples, part.step.per_sample()),
                      part.samples, own);
    whole.out.*values = own;
  }
  expect_same(part.out, whole.out);
}

TEST(Mpi, WelfordIsTheSameOnEveryRankExact) {
  MpiCommunicator group = group_of_all();
  const testing::Outcome::Known known = Part(group, Statistics::kWelford).out.ranks[0];
  std::vector<double> of_rank_0 = known.mean;
  MPI_Bcast(of_rank_0.data(), static_cast<int>(of_rank_0.size()), MPI_DOUBLE, 0, MPI_COMM_WORLD);
  EXPECT_EQ(known.mean, of_rank_0);
  EXPECT_EQ(known.count, 11 * 20);
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
            SYNCBN_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(syncbn_mpi_group_create(MPI_Comm_c2f(MPI_COMM_NULL), 60000, &group),
            SYNCBN_STATUS_INVALID_ARGUMENT);
  EXPECT_TRUE(contains(syncbn_last_error(), "communicator: got MPI_COMM_NULL"));
  ASSERT_EQ(syncbn_mpi_group_create(MPI_Comm_c2f(MPI_COMM_WORLD), 60000, &group), SYNCBN_STATUS_OK);
  const syncbn_communicator* end = syncbn_group_rank(group, world_rank());
  ASSERT_NE(end, nullptr);
  for (int resets = 0; resets < 2; ++resets) {
    std::int64_t words[] = {1, 5};
    EXPECT_EQ(end->all_reduce_sum(end->user_data, words, 2), SYNCBN_STATUS_OK);
    EXPECT_EQ(words[0], world_size());
    EXPECT_EQ(words[1], 5 * world_size());
    EXPECT_EQ(syncbn_group_reset(group), SYNCBN_STATUS_OK);
  }
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

/// Ends the program unless it is refused; a test's failure would be forgotten here.
template <class Body>
void expect_not_running(const Body& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    if (contains(error.what(), "communicator: got one while MPI is not running, expected one")) {
      return;
    }
  }
  std::_Exit(1);
}

/// Before MPI_Init and after MPI_Finalize, where most calls of MPI end the job.
void expect_no_group() {
  expect_not_running([] { MpiCommunicator group(MpiHandle{0}); });
  expect_not_running([] { MpiCommunicator group(MPI_COMM_WORLD); });
  expect_not_running([] { MpiCommunicator group(MPI_COMM_WORLD, kShort, MPI_COMM_SELF); });
  expect_not_running([] { MpiCommunicator group(MPI_COMM_NULL); });
}

void expect_no_exchange(MpiCommunicator& group) {
  std::vector<std::int64_t> words = {1};
  expect_not_running([&] { group.all_reduce_sum(words); });
  expect_not_running([&] { group.reset(); });
  if (SumInParts* const parts = group.parts()) {
    expect_not_running([&] { parts->open(words, words); });
  }
  group.refuse("its argument");
  group.abandon("it ends");
}

}  // namespace
}  // namespace syncbn

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  syncbn::expect_no_group();
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
  syncbn::MpiCommunicator group = syncbn::group_of_all();
  MPI_Finalize();
  syncbn::expect_no_group();
  syncbn::expect_no_exchange(group);
  return result;
}
