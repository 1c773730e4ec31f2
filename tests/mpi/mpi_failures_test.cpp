// SPDX-License-Identifier: Apache-2.0
// What goes wrong in a group over MPI is an error on every rank. In these places
// torch.nn.SyncBatchNorm has no MPI of its own: with PyTorch's MPI backend a rank that differs or
// does not come hangs the others, without a time limit.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "mpi_test.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/mpi.hpp"

namespace syncbn {
namespace {

TEST(Mpi, OtherLengthsAreAnErrorOnEveryRankAndTheGroupGoesOn) {
  MpiCommunicator group = group_of_all();
  const int last = group.size() - 1;
  std::vector<std::int64_t> words(group.rank() == last ? 3 : 2, 7);
  const auto before = words;
  const std::string text = thrown_text<DivergenceError>([&] { group.all_reduce_sum(words); });
  const std::string odd = "rank " + std::to_string(last);
  EXPECT_TRUE(contains(text, odd + " brought 24") ||  // the odd rank itself, in memory
              contains(text, odd + " of " + std::to_string(group.size()) + " brought 24"))
      << text;
  EXPECT_EQ(words, before);
  expect_usable(group);
}

TEST(Mpi, ThoseThatDifferFromRank0AreNamed) {
  MpiCommunicator group = group_of_all();
  for (int a = 0; a < group.size(); ++a) {
    for (int b = a; b < group.size(); ++b) {
      const auto differs = [&](int r) { return r == a || r == b; };
      std::vector<int> expected;
      for (int r = 0; r < group.size(); ++r) {
        if (differs(r) != differs(0)) {
          expected.push_back(r);
        }
      }
      if (expected.empty()) {  // two ranks, which both differ
        continue;
      }
      std::vector<std::int64_t> words(differs(group.rank()) ? 3 : 2);
      try {
        group.all_reduce_sum(words);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const DivergenceError& error) {
        if (way == Way::kNodes) {  // a node says first where its own ranks differ from each other
          EXPECT_FALSE(error.ranks().empty()) << error.what();
        } else {
          EXPECT_EQ(error.ranks(), expected) << error.what();
        }
      }
    }
  }
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
  MpiCommunicator group = group_of_all();
  thrown_text<DivergenceError>([&] { forward(group, group.rank() == 0 ? "stem" : "head", true); });
  expect_usable(group);
}

TEST(Mpi, ARefusedArgumentReachesEveryRankAndTheGroupGoesOn) {
  MpiCommunicator group = group_of_all();
  for (const std::vector<int>& refusing :
       std::vector<std::vector<int>>{{0}, {1}, {1}, {0}, {0, 1}, {1}, {group.size() - 1}}) {
    const bool refuses = std::count(refusing.begin(), refusing.end(), group.rank()) > 0;
    for (int twice = 0; twice < 2; ++twice) {
      if (refuses) {
        thrown_text<InvalidArgument>([&] { forward(group, "stem", false); });
      } else {
        const std::string text = thrown_text<PeerLost>([&] { forward(group, "stem", true); });
        const bool named = std::any_of(refusing.begin(), refusing.end(), [&](int r) {
          return contains(text,
                          "rank " + std::to_string(r) +
                              " refused its call: stem, call 0, forward, 1 channels, float32: "
                              "y: got");
        });
        EXPECT_TRUE(named) << text;
      }
    }
    expect_usable(group);
  }
}

TEST(Mpi, ARefusalIsNotHiddenByAnAbandon) {
  for (const int refusing : {0, 1}) {
    MpiCommunicator group = group_of_all();
    if (group.rank() == refusing) {
      group.refuse("its argument");
      group.abandon("it ends");
    } else {
      const std::string text = thrown_text<PeerLost>([&] { forward(group, "stem", true); });
      EXPECT_TRUE(contains(text, "refused its call: its argument")) << text;
    }
    expect_broken(group, "rank " + std::to_string(refusing) + " ");
  }
}

TEST(Mpi, ARankThatUnwindsTellsTheOthers) {
  for (const int unwinding : {0, 1}) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    try {
      MpiCommunicator group = group_of_all();
      if (rank == unwinding) {
        throw std::runtime_error("no data");
      }
      const std::string text = thrown_text<PeerLost>([&] { forward(group, "stem", true); });
      EXPECT_TRUE(contains(text, "an exception ended the scope of its end of the group")) << text;
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "no data");
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

TEST(Mpi, ResetMakesABrokenGroupANewOne) {
  MpiCommunicator group = group_of_all();
  BatchNorm layer({.channels = 1, .name = "kept"}, group);
  Saved saved;
  const float x[] = {1, 2};
  float y[] = {0, 0};
  const BatchNorm::Forward arguments{.x = {x, {2, 1}}, .y = {y, {2, 1}}};
  for (const int leaving : {0, 1}) {
    layer.forward(arguments, saved);
    EXPECT_EQ(layer.calls(), 1U);
    if (group.rank() == leaving) {
      group.abandon("enough");
    }
    thrown_text<PeerLost>([&] { layer.forward(arguments, saved); });
    group.reset();
  }
  expect_usable(group);
}

TEST(Mpi, ARankThatComesLateIsNamedOnEveryRank) {
  for (const int late : {0, world_size() - 1}) {
    MpiCommunicator group = group_of_all(kShort);
    std::vector<std::int64_t> words = {1};
    const auto exchange = [&] { group.all_reduce_sum(words); };
    const auto start = std::chrono::steady_clock::now();
    std::string text;
    if (group.rank() == late) {
      std::this_thread::sleep_for(6 * kShort);
      text = way == Way::kMpi ? thrown_text<ExchangeTimeout>(exchange)
                              : thrown_text<PeerLost>(exchange);  // its node has given up
    } else {
      try {
        exchange();
      } catch (const ExchangeTimeout& error) {
        text = error.what();
        EXPECT_EQ(error.ranks(), std::vector<int>{late});
      }
      // Half a limit for the others' answers. Between nodes the limit is twice as long. The cores
      // are those of other tests, too.
      const int halves = way == Way::kNodes ? 6 : 3;
      EXPECT_LT(std::chrono::steady_clock::now() - start,
                halves * kShort / 2 + std::chrono::seconds(2));
    }
    EXPECT_TRUE(contains(text, "rank " + std::to_string(late) + " did not come to the exchange "))
        << text;
    EXPECT_EQ(words[0], 1);
    expect_broken(group, "did not come");
    MPI_Barrier(MPI_COMM_WORLD);  // the caller's communicator still works
  }
}

TEST(Mpi, ALongPauseOfAllRanksIsNoTimeout) {
  MpiCommunicator group = group_of_all(milliseconds(200));
  std::this_thread::sleep_for(milliseconds(500));
  MPI_Barrier(MPI_COMM_WORLD);
  expect_usable(group);
}

TEST(Mpi, AnotherThreadIsRefusedAtThisLevel) {
  MpiCommunicator group = group_of_all();
  std::string text;
  std::thread([&] {
    std::vector<std::int64_t> words = {1};
    text = thrown_text<InvalidArgument>([&] { group.all_reduce_sum(words); });
  }).join();
  EXPECT_TRUE(contains(text, "thread: got one that did not initialize MPI")) << text;
  expect_usable(group);
}

/// Of one rank, in each kind of exchange. In memory the others hear of it at once.
TEST(Mpi, AnotherThreadOfOneRankIsRefusedInMemoryToo) {
  if (way != Way::kMemory) {
    return;  // there they wait for the time limit, as that rank cannot tell them over MPI
  }
  MpiCommunicator group = group_of_all();
  std::vector<std::int64_t> words = {1};
  const std::vector<std::function<void()>> exchanges = {
      [&] { group.all_reduce_sum(words); },
      [&] {
        group.parts()->open(words, words);
        group.parts()->publish(1);
        while (!group.parts()->wait(1, kShort)) {
        }
      },
      [&] { forward(group, "stem", true); },
  };
  for (const auto& exchange : exchanges) {
    const bool odd = group.rank() == 1;
    std::string text;
    if (odd) {
      std::thread([&] { text = thrown_text<InvalidArgument>(exchange); }).join();
    } else {
      text = thrown_text<PeerLost>(exchange);
    }
    EXPECT_TRUE(contains(text, "thread: got one that did not initialize MPI")) << text;
    EXPECT_TRUE(odd || contains(text, "rank 1 refused its call")) << text;
    expect_usable(group);
  }
  std::thread([&] {
    const auto made = [] { MpiCommunicator another(MPI_COMM_SELF); };
    EXPECT_TRUE(contains(thrown_text<InvalidArgument>(made), "thread: got one that did not"));
  }).join();
}

TEST(Mpi, BadArguments) {
  EXPECT_TRUE(
      contains(thrown_text<InvalidArgument>([] { MpiCommunicator(world(), milliseconds(0)); }),
               "timeout: got 0 ms, expected 1 ms to 2^36 ms"));
  EXPECT_TRUE(
      contains(thrown_text<InvalidArgument>([] { MpiCommunicator(world(), milliseconds::max()); }),
               "timeout: got 9223372036854775807 ms, expected 1 ms to 2^36 ms"));
  for (const MPI_Comm none : {MPI_COMM_NULL, MPI_Comm{}}) {
    EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] { MpiCommunicator group(none); }),
                         "communicator: got MPI_COMM_NULL"));
    EXPECT_TRUE(contains(
        thrown_text<InvalidArgument>([&] { MpiCommunicator group(world(), kShort, none); }),
        "node: got MPI_COMM_NULL"));
  }
}

/// In a run of its own (mpi.dead): mpiexec must be told to leave the other ranks alone, and no rank
/// can go on with MPI afterwards, not even to MPI_Finalize.
TEST(Mpi, DISABLED_ADeadRankIsNamed) {
  MpiCommunicator group = group_of_all(kShort);
  expect_usable(group);
  const int dead = group.size() - 1;
  if (group.rank() == dead) {
    std::_Exit(0);
  }
  std::vector<std::int64_t> words = {1};
  const std::string named = "rank " + std::to_string(dead);
  if (way == Way::kMpi) {
    const std::string text = thrown_text<ExchangeTimeout>([&] { group.all_reduce_sum(words); });
    EXPECT_TRUE(contains(text, named + " did not come to the exchange")) << text;
  } else {  // its node sees it at once
    const std::string text = thrown_text<PeerLost>([&] { group.all_reduce_sum(words); });
    EXPECT_TRUE(contains(text, named + " is gone: its process")) << text;
  }
  EXPECT_EQ(words[0], 1);
  std::fprintf(stderr, "rank %d: %s\n", group.rank(),
               HasFailure() ? "failed" : "named the dead rank");
  std::_Exit(HasFailure() ? 1 : 0);
}

}  // namespace
}  // namespace syncbn
