// SPDX-License-Identifier: Apache-2.0
// Latency of one all-reduce between the ranks of a node: threads, and processes with shared memory.
//
// bench_exchange [--rounds=3000] [--ranks=N] [--json=FILE]   (a tenth of the rounds first, to warm
// up)
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <span>
#include <syncbn/communicator.hpp>
#include <syncbn/shared_memory.hpp>
#include <thread>
#include <vector>

#include "exchange_times.hpp"

namespace {

using Times = syncbn::bench::ExchangeTimes;
using syncbn::bench::kMostRanks;
using syncbn::bench::measure_exchange;

Times measure_threads(int ranks, std::size_t length, int rounds) {
  syncbn::ThreadGroup group(ranks);
  std::vector<std::thread> others;
  for (int r = 1; r < ranks; ++r) {
    others.emplace_back([&, r] { measure_exchange(group.rank(r), length, rounds); });
  }
  const Times times = measure_exchange(group.rank(0), length, rounds);
  for (std::thread& thread : others) {
    thread.join();
  }
  return times;
}

/// Memory that forked processes share, where they gather their offers.
struct Board {
  std::atomic<int> offered{0};
  std::byte offers[kMostRanks][syncbn::SharedMemoryOffer::kBytes];
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
  return measure_exchange(*opened.group, length, rounds);
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
  const syncbn::bench::ExchangeOptions options(count, arguments);
  syncbn::bench::ExchangeRows rows;
  rows.print_heading(std::thread::hardware_concurrency());
  for (const int ranks : options.ranks) {
    for (const std::int64_t channels : syncbn::bench::kExchangeChannels) {
      const std::size_t length = syncbn::bench::exchange_words(channels);
      rows.add("threads", ranks, channels, measure_threads(ranks, length, options.rounds));
      rows.add("shared memory", ranks, channels, measure_processes(ranks, length, options.rounds));
    }
  }
  rows.write(options.json);
}
