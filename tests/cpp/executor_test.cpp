// SPDX-License-Identifier: Apache-2.0
#include "syncbn/executor.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support.hpp"
#include "syncbn/error.hpp"

namespace syncbn::testing {
namespace {

using Range = std::pair<std::int64_t, std::int64_t>;

/// The ranges that one parallel_for makes, in ascending order.
std::vector<Range> ranges_of(Executor& executor, std::int64_t begin, std::int64_t end,
                             std::int64_t grain) {
  std::mutex mutex;
  std::vector<Range> ranges;
  executor.parallel_for(begin, end, grain, [&](std::int64_t first, std::int64_t last) {
    const std::lock_guard lock(mutex);
    ranges.emplace_back(first, last);
  });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

/// Every item once; at most `concurrency` ranges, each of `grain` items where there are so many.
void expect_cover(const std::vector<Range>& ranges, std::int64_t begin, std::int64_t end,
                  const Executor& executor, std::int64_t grain = 1) {
  if (begin >= end) {
    ASSERT_TRUE(ranges.empty());
    return;
  }
  ASSERT_LE(ranges.size(), static_cast<std::size_t>(executor.concurrency()));
  std::int64_t next = begin;
  for (const auto& [first, last] : ranges) {
    ASSERT_EQ(first, next);
    ASSERT_LT(first, last);
    ASSERT_GE(last - first, std::min(end - begin, grain));
    next = last;
  }
  ASSERT_EQ(next, end);
}

TEST(ThreadPool, CoversEveryRangeOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.concurrency(), threads);
    for (std::int64_t size = 0; size <= 40; ++size) {
      for (const std::int64_t grain : {-1, 0, 1, 2, 3, 7, 16, 39, 40, 41, 1000}) {
        for (const std::int64_t begin : {0, -7, 1000}) {
          ASSERT_NO_FATAL_FAILURE(expect_cover(ranges_of(pool, begin, begin + size, grain), begin,
                                               begin + size, pool, grain))
              << threads << " threads, " << size << " items, grain " << grain;
        }
      }
    }
    const std::int64_t large = std::int64_t{1} << 40;
    expect_cover(ranges_of(pool, 0, large, 1), 0, large, pool);
    expect_cover(ranges_of(pool, 5, -5, 1), 5, -5, pool);
  }
}

TEST(ThreadPool, UsesItsThreads) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::vector<std::thread::id> ids;
  pool.parallel_for(0, 3, 1, [&](std::int64_t, std::int64_t) {
    const std::lock_guard lock(mutex);
    ids.push_back(std::this_thread::get_id());
  });
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(std::unique(ids.begin(), ids.end()) - ids.begin(), 3);
  EXPECT_NE(std::find(ids.begin(), ids.end(), std::this_thread::get_id()), ids.end());
}

TEST(ThreadPool, ExceptionsReachTheCallerAndThePoolStaysUsable) {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (std::int64_t bad = 0; bad < 4; ++bad) {
      const std::string text = thrown_text<std::runtime_error>([&] {
        pool.parallel_for(0, 4, 1, [&](std::int64_t begin, std::int64_t end) {
          if (begin <= bad && bad < end) {
            throw std::runtime_error("item " + std::to_string(bad));
          }
        });
      });
      EXPECT_EQ(text, "item " + std::to_string(bad));
      expect_cover(ranges_of(pool, 0, 100, 1), 0, 100, pool);
    }
    EXPECT_THROW(pool.parallel_for(0, 100, 1, [](std::int64_t, std::int64_t) { throw 7; }), int);
    expect_cover(ranges_of(pool, 0, 100, 1), 0, 100, pool);
  }
}

TEST(ThreadPool, AllOtherRangesAreDoneWhenOneThrows) {
  ThreadPool pool(4);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> running{0};
    std::atomic<int> done{0};
    EXPECT_THROW(pool.parallel_for(0, 4, 1,
                                   [&](std::int64_t begin, std::int64_t) {
                                     ++running;
                                     if (begin == 0) {
                                       throw std::runtime_error("first");
                                     }
                                     std::this_thread::yield();
                                     ++done;
                                   }),
                 std::runtime_error);
    // Nothing runs any more that could touch what the caller frees.
    EXPECT_EQ(running.load() - done.load(), 1);
  }
}

/// What a forked child ends with: its exit code, or -1 if it hangs or is ended by a signal.
template <class Body>
int exit_of_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    _exit(body());
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The child has none of the pool's threads.
TEST(ThreadPool, AForkedChildWorksAlone) {
  for (const int threads : {1, 2, 4}) {
    auto pool = std::make_unique<ThreadPool>(threads);
    ranges_of(*pool, 0, 100, 1);
    const int code = exit_of_child([&] {
      const std::vector<Range> all = ranges_of(*pool, 0, 100, 1);
      pool.reset();
      bool right = all == std::vector<Range>({{0, 100}});
#if !defined(__SANITIZE_THREAD__)  // which cannot have threads that a forked child starts
      ThreadPool fresh(threads);
      right = right && ranges_of(fresh, 0, 100, 1).size() == static_cast<std::size_t>(threads);
#endif
      return right ? 0 : 1;
    });
    EXPECT_EQ(code, 0) << threads << " threads";
    expect_cover(ranges_of(*pool, 0, 100, 1), 0, 100, *pool);
  }
}

// Its mutexes are held then, by threads that the child does not have.
TEST(ThreadPool, AChildForkedInTheMiddleOfAJobWorksAlone) {
  ThreadPool pool(3);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      ranges_of(pool, 0, 100, 1);
    }
  });
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(exit_of_child([&] {
                std::int64_t sum = 0;
                pool.parallel_for(
                    0, 100, 1, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
                pool.~ThreadPool();
                return sum == 100 ? 0 : 1;
              }),
              0);
  }
  stop = true;
  other.join();
}

TEST(SerialExecutor, RunsOnTheCallingThread) {
  Executor& serial = serial_executor();
  EXPECT_EQ(serial.concurrency(), 1);
  EXPECT_EQ(ranges_of(serial, 3, 10, 1), std::vector<Range>({{3, 10}}));
  EXPECT_TRUE(ranges_of(serial, 3, 3, 1).empty());
  serial.parallel_for(0, 5, 1, [&, here = std::this_thread::get_id()](std::int64_t, std::int64_t) {
    EXPECT_EQ(std::this_thread::get_id(), here);
  });
  EXPECT_THROW(serial.parallel_for(
                   0, 5, 1, [](std::int64_t, std::int64_t) { throw std::runtime_error("x"); }),
               std::runtime_error);
}

}  // namespace
}  // namespace syncbn::testing
