// Latency of one all-reduce between the ranks of a node: threads, and processes with shared memory.
//
// bench_exchange [--rounds=3000] [--json=FILE]     (a tenth of the rounds first, to warm up)
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
#include <string>
#include <syncbn/communicator.hpp>
#include <syncbn/passes.hpp>
#include <syncbn/shared_memory.hpp>
#include <thread>
#include <vector>

namespace {

constexpr int kMaxRanks = 8;
constexpr std::int64_t kChannels[] = {64, 512, 2048};

struct Times {
  double quartiles[3];
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
  const auto at = [&](std::size_t percent) { return times[times.size() * percent / 100]; };
  return {{at(25), at(50), at(75)}, at(99)};
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
  int rounds = 3000;
  std::string path;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument.starts_with("--rounds=")) {
      rounds = static_cast<int>(std::strtol(value.c_str(), nullptr, 10));
    } else if (argument.starts_with("--json=")) {
      path = value;
    } else {
      std::fprintf(stderr, "got %s, expected --rounds= or --json=\n", argument.c_str());
      return 2;
    }
  }
  if (rounds < 1) {
    std::fprintf(stderr, "--rounds: got %d, expected at least 1\n", rounds);
    return 2;
  }
  std::string rows;
  std::printf("%u processors; microseconds, median [quartiles], 99th percentile\n",
              std::thread::hardware_concurrency());
  std::printf("ranks channels       KB  engine\n");
  for (const int ranks : {2, 4}) {
    for (const std::int64_t channels : kChannels) {
      const auto length =
          static_cast<std::size_t>(syncbn::message_words(syncbn::DType::kFloat32, channels));
      for (const bool processes : {false, true}) {
        const Times t = (processes ? measure_processes : measure_threads)(ranks, length, rounds);
        const char* engine = processes ? "shared memory" : "threads";
        const double* q = t.quartiles;
        std::printf("%5d %8d  %7.1f  %-14s %8.1f  [%.1f, %.1f]  %.1f\n", ranks,
                    static_cast<int>(channels), static_cast<double>(length) * 8e-3, engine, q[1],
                    q[0], q[2], t.p99);
        char row[256];
        std::snprintf(row, sizeof(row),
                      "%s\n {\"engine\": \"%s\", \"ranks\": %d, \"channels\": %d, \"bytes\": %zu, "
                      "\"microseconds\": [%.2f, %.2f, %.2f], \"p99\": %.2f}",
                      rows.empty() ? "" : ",", engine, ranks, static_cast<int>(channels),
                      8 * length, q[0], q[1], q[2], t.p99);
        rows += row;
      }
    }
  }
  if (!path.empty()) {
    std::FILE* json = std::fopen(path.c_str(), "w");
    if (json == nullptr) {
      std::fprintf(stderr, "--json: cannot write %s\n", path.c_str());
      return 2;
    }
    std::fprintf(json, "[%s\n]\n", rows.c_str());
    std::fclose(json);
  }
}
