// SPDX-License-Identifier: Apache-2.0
#pragma once

// Times of one all-reduce, as the programs for the engines measure, print and write them.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <syncbn/communicator.hpp>
#include <syncbn/message.hpp>
#include <vector>

namespace syncbn::bench {

constexpr std::int64_t kExchangeChannels[] = {64, 512, 2048};
constexpr int kMostRanks = 64;

/// Of a float32 layer's message.
inline std::size_t exchange_words(std::int64_t channels) {
  return static_cast<std::size_t>(message_words(DType::kFloat32, channels));
}

/// Microseconds.
struct ExchangeTimes {
  double quartiles[3];
  double p99;
  double processor;  ///< this thread's mean time on a processor, waiting in a loop included
};

/// Microseconds that this thread has been on a processor.
inline double processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}

/// This rank's times; a tenth of the rounds first, to warm up.
inline ExchangeTimes measure_exchange(Communicator& communicator, std::size_t length, int rounds) {
  std::vector<std::int64_t> words(length, 1);
  std::vector<double> times;
  double processor = 0;
  for (int i = -rounds / 10; i < rounds; ++i) {
    if (i == 0) {
      processor = -processor_time();
    }
    const auto begin = std::chrono::steady_clock::now();
    communicator.all_reduce_sum(words);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    if (i >= 0) {
      times.push_back(time.count());
    }
  }
  processor += processor_time();
  std::sort(times.begin(), times.end());
  const auto at = [&](std::size_t percent) { return times[times.size() * percent / 100]; };
  return {{at(25), at(50), at(75)}, at(99), processor / rounds};
}

/// --rounds=, --json= and --ranks=, where a program makes its ranks; ends the program on others.
struct ExchangeOptions {
  ExchangeOptions(int count, char** arguments) {
    for (int i = 1; i < count; ++i) {
      const std::string argument = arguments[i];
      const std::string value = argument.substr(argument.find('=') + 1);
      if (argument.starts_with("--rounds=")) {
        rounds = static_cast<int>(std::strtol(value.c_str(), nullptr, 10));
      } else if (argument.starts_with("--ranks=")) {
        ranks = {static_cast<int>(std::strtol(value.c_str(), nullptr, 10))};
      } else if (argument.starts_with("--json=")) {
        json = value;
      } else {
        std::fprintf(stderr, "got %s, expected --rounds=, --ranks= or --json=\n", argument.c_str());
        std::exit(2);
      }
    }
    if (rounds < 1) {
      std::fprintf(stderr, "--rounds: got %d, expected at least 1\n", rounds);
      std::exit(2);
    }
    if (ranks[0] < 2 || ranks[0] > kMostRanks) {
      std::fprintf(stderr, "--ranks: got %d, expected 2 to %d\n", ranks[0], kMostRanks);
      std::exit(2);
    }
  }

  int rounds = 3000;
  std::vector<int> ranks = {2, 4};
  std::string json;
};

/// Prints a line for each exchange, and keeps it for the JSON.
class ExchangeRows {
 public:
  void print_heading(unsigned processors) {
    std::printf(
        "%u processors; microseconds, median [quartiles], 99th percentile, on a processor\n",
        processors);
    std::printf("ranks channels       KB  engine\n");
  }

  void add(const char* engine, int ranks, std::int64_t channels, const ExchangeTimes& times) {
    const std::size_t bytes = 8 * exchange_words(channels);
    const double* q = times.quartiles;
    std::printf("%5d %8d  %7.1f  %-14s %8.1f  [%.1f, %.1f]  %.1f  %.1f\n", ranks,
                static_cast<int>(channels), static_cast<double>(bytes) * 1e-3, engine, q[1], q[0],
                q[2], times.p99, times.processor);
    char row[256];
    std::snprintf(row, sizeof(row),
                  "%s\n {\"engine\": \"%s\", \"ranks\": %d, \"channels\": %d, \"bytes\": %zu, "
                  "\"microseconds\": [%.2f, %.2f, %.2f], \"p99\": %.2f, \"processor\": %.2f}",
                  rows_.empty() ? "" : ",", engine, ranks, static_cast<int>(channels), bytes, q[0],
                  q[1], q[2], times.p99, times.processor);
    rows_ += row;
  }

  /// Ends the program if the file cannot be written. path: may be empty.
  void write(const std::string& path) const {
    if (path.empty()) {
      return;
    }
    std::FILE* json = std::fopen(path.c_str(), "w");
    if (json == nullptr) {
      std::fprintf(stderr, "--json: cannot write %s\n", path.c_str());
      std::exit(2);
    }
    std::fprintf(json, "[%s\n]\n", rows_.c_str());
    std::fclose(json);
  }

 private:
  std::string rows_;
};

}  // namespace syncbn::bench
