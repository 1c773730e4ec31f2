// Latency of one all-reduce between the ranks of a node: threads, and processes with shared memory.
//
// bench_exchange [rounds]     (default 3000; a tenth of them first, to warm up)
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <span>
#include <syncbn/communicator.hpp>
#include <syncbn/shared_memory.hpp>
#include <thread>
#include <vector>

namespace {

constexpr int kMaxRanks = 8;
/// The messages of 64, 512 and 2048 channels of float32, and 16 KiB.
constexpr std::size_t kLengths[] = {4 + 64 * 19, 2048, 4 + 512 * 19, 4 + 2048 * 19};

struct Times {
  double median;
  double p99;
};

Times measure(syncbn::Communicator& communicator, std::size_t length, int rounds) {
  std::vector<std::int64_t> words(length, 1);
  std::vector<double> times;
  for (int i = -rounds / 10; i < rounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    communicator.all_reduce_sum(words);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    if (i >= 0) {
      times.push_back(time.count());
    }
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() * 99 / 100]};
}

Times measure_threads(int ranks, std::size_t length, int rounds) {
  syncbn::ThreadGroup group(ranks);
  std::vector<std::thread> others;
  for (int r = 1; r < ranks; ++r) {
    others.emplace_back([&, r] { measure(group.rank(r), length, rounds); });
  }
  const Times times = measure(group.rank(0), length, rounds);
  for (std::thread& thread : others) {
    thread.join();
  }
  return times;
}

/// Memory that forked processes share, where they gather their offers.
struct Board {
  std::atomic<int> offered{0};
  std::byte offers[kMaxRanks][syncbn::SharedMemoryOffer::kBytes];
};

Times measure_process(int rank, int ranks, Board& board, std::size_t length, int rounds) {
  syncbn::SharedMemoryOffer offer(rank, ranks);
  std::memcpy(board.offers[rank], offer.bytes().data(), offer.kBytes);
  ++board.offered;
  while (board.offered.load() < ranks) {
    std::this_thread::yield();
  }
  const std::span<const std::byte> offers(board.offers[0],
                                          static_cast<std::size_t>(ranks) * offer.kBytes);
  const auto opened = syncbn::SharedMemoryGroup::open(std::move(offer), offers);
  if (opened.group == nullptr) {
    std::fprintf(stderr, "%s\n", opened.why.c_str());
    _exit(1);
  }
  return measure(*opened.group, length, rounds);
}

Times measure_processes(int ranks, std::size_t length, int rounds) {
  void* memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Board& board = *new (memory) Board;
  std::vector<pid_t> others;
  for (int r = 1; r < ranks; ++r) {
    others.push_back(fork());
    if (others.back() == 0) {
      measure_process(r, ranks, board, length, rounds);
      _exit(0);
    }
  }
  const Times times = measure_process(0, ranks, board, length, rounds);
  for (const pid_t other : others) {
    waitpid(other, nullptr, 0);
  }
  munmap(memory, sizeof(Board));
  return times;
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? static_cast<int>(std::strtol(arguments[1], nullptr, 10)) : 3000;
  if (rounds < 1) {
    std::fprintf(stderr, "rounds: got %s, expected at least 1\n", arguments[1]);
    return 2;
  }
  std::printf("%u processors; microseconds, median / 99th percentile\n",
              std::thread::hardware_concurrency());
  std::printf("ranks    words       KB  %20s  %20s\n", "threads", "shared memory");
  for (const int ranks : {2, 4}) {
    for (const std::size_t length : kLengths) {
      const Times threads = measure_threads(ranks, length, rounds);
      const Times processes = measure_processes(ranks, length, rounds);
      std::printf("%5d  %7zu  %7.1f  %9.1f / %8.1f  %9.1f / %8.1f\n", ranks, length,
                  static_cast<double>(length) * 8e-3, threads.median, threads.p99, processes.median,
                  processes.p99);
    }
  }
}
