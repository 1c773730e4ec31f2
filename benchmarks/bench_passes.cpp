// SPDX-License-Identifier: Apache-2.0
// Times each pass of one layer on one rank against the fastest copy of its input.
//
// bench_passes [--threads=1,2] [--seconds=1] [--json=FILE] SHAPE...
//
//   bench_passes $(cat benchmarks/shapes.txt)
//
// Everything takes turns within each round, so that other programs on the machine touch all of it:
// the copy, forward and backward in one call each, then the passes that they are made of, one after
// the other, with outputs in memory that is used again and in fresh memory. A time is divided by
// the copy's of the same round and the same kind of memory; medians and quartiles are over the
// rounds. The copy is memcpy or a loop of non-temporal stores, whichever had the lower median.
// Before they are timed, results are compared bit for bit with those of the plain loops. --seconds:
// for each shape, dtype, layout and number of threads, about.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layer_passes.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using syncbn::DType;
using syncbn::Executor;
using syncbn::bench::fail;
using syncbn::bench::LayerPasses;
using syncbn::bench::Pages;
using Clock = std::chrono::steady_clock;
using Times = std::vector<double>;  // microseconds, one per round

constexpr std::size_t kMinRounds = 5;
constexpr std::size_t kMaxRounds = 500;

struct Options {
  std::vector<int> threads = {1, 2};
  double seconds = 1.0;
  std::string json;
  std::map<std::string, syncbn::bench::Shape> sizes;  ///< of each shape
  std::vector<std::string> shapes;
};

#if defined(__x86_64__)
/// 32 bytes at a time; both pointers at multiples of 32.
__attribute__((target("avx"))) void stream_copy(std::byte* to, const std::byte* from,
                                                std::size_t bytes) {
  std::size_t i = 0;
  for (; i + 128 <= bytes; i += 128) {
    for (std::size_t j = i; j < i + 128; j += 32) {
      const __m256i value = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + j));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + j), value);
    }
  }
  std::memcpy(to + i, from + i, bytes - i);
  _mm_sfence();
}
bool can_stream() { return __builtin_cpu_supports("avx"); }
#else
void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
bool can_stream() { return false; }
#endif

void copy(const Pages& to, const Pages& from, bool stream, Executor& executor) {
  constexpr std::size_t kBlock = 4096;
  const std::size_t blocks = (from.bytes() + kBlock - 1) / kBlock;
  executor.parallel_for(
      0, static_cast<std::int64_t>(blocks), 4, [&](std::int64_t begin, std::int64_t end) {
        const std::size_t first = static_cast<std::size_t>(begin) * kBlock;
        const std::size_t last = std::min(from.bytes(), static_cast<std::size_t>(end) * kBlock);
        auto* target = static_cast<std::byte*>(to.data()) + first;
        const auto* source = static_cast<const std::byte*>(from.data()) + first;
        if (stream) {
          stream_copy(target, source, last - first);
        } else {
          std::memcpy(target, source, last - first);
        }
      });
}

template <class Function>
double microseconds(const Function& function) {
  const auto begin = Clock::now();
  function();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

/// which: 1, 2 or 3.
double quartile(Times times, std::size_t which) {
  std::sort(times.begin(), times.end());
  return times[(which * (times.size() - 1) + 2) / 4];
}

/// What is timed in reused and in fresh memory, by name; copies as "memcpy" and "stream".
using Measured = std::map<std::string, Times>;

/// One round; pages() makes memory for an output, which is not timed: what the system takes for
/// handing out addresses does not count, faults do.
void run_round(LayerPasses& layer, Executor& executor, Measured& out, bool keep,
               const auto& pages) {
  const auto time = [&](const char* name, const auto& work) {
    const double took = microseconds(work);
    if (keep) {
      out[name].push_back(took);
    }
  };
  for (const bool stream : {false, true}) {
    if (!stream || can_stream()) {
      const auto to = pages();
      time(stream ? "stream" : "memcpy", [&] { copy(*to, layer.x_memory(), stream, executor); });
    }
  }
  {
    const auto y = pages();
    time("forward", [&] { layer.layer_forward(y->data(), executor); });
    const auto dx = pages();
    time("backward", [&] { layer.layer_backward(dx->data(), executor); });
  }
  const auto y = pages();
  layer.forward(y->data(), executor, time);
  const auto dx = pages();
  layer.backward(dx->data(), executor, time);
}

/// What is measured, and how often.
struct Case {
  std::string shape;
  const char* dtype;
  const char* layout;
  int threads;
  std::size_t rounds;
};

struct Result {
  std::string pass;
  std::string memory;
  double bytes;
  double time[3];   ///< lower quartile, median, upper quartile, in microseconds
  double ratio[3];  ///< of time to the copy's
  double gigabytes_per_second() const { return bytes / time[1] * 1e-3; }
};

void add_results(const LayerPasses& layer, const Measured& measured, const std::string& memory,
                 std::vector<Result>& results) {
  const auto stream = measured.find("stream");
  const bool use_stream =
      stream != measured.end() && quartile(stream->second, 2) < quartile(measured.at("memcpy"), 2);
  const Times& ruler = use_stream ? stream->second : measured.at("memcpy");
  const auto add = [&](const std::string& pass, const std::string& key, std::size_t bytes) {
    const Times& times = measured.at(key);
    Times ratios(times.size());
    std::transform(times.begin(), times.end(), ruler.begin(), ratios.begin(), std::divides<>());
    Result result{pass, memory, static_cast<double>(bytes), {}, {}};
    for (std::size_t q = 0; q < 3; ++q) {
      result.time[q] = quartile(times, q + 1);
      result.ratio[q] = quartile(ratios, q + 1);
    }
    results.push_back(result);
  };
  add(use_stream ? "copy (non-temporal)" : "copy (memcpy)", use_stream ? "stream" : "memcpy",
      2 * layer.bytes());
  for (const auto& passes :
       {std::vector<std::string>{"forward", "local_moments", "finalize_moments", "normalize"},
        {"backward", "local_gradients", "finalize_gradients", "input_gradient"}}) {
    std::size_t all = 0;
    for (std::size_t i = 1; i < passes.size(); ++i) {
      all += layer.moved(passes[i]);
      add(passes[i], passes[i], layer.moved(passes[i]));
    }
    add(passes[0], passes[0], all);
  }
}

std::vector<Result> measure(LayerPasses& layer, Executor& executor, double seconds,
                            std::size_t& rounds) {
  layer.check(executor);
  auto reused = std::make_shared<Pages>(layer.bytes());
  Measured in_reused;
  Measured in_fresh;
  const auto begin = Clock::now();
  const auto round = [&](bool keep) {
    run_round(layer, executor, in_reused, keep, [&] { return reused; });
    run_round(layer, executor, in_fresh, keep,
              [&] { return std::make_shared<Pages>(layer.bytes()); });
  };
  round(false);
  for (rounds = 0; rounds < kMaxRounds; ++rounds) {
    const std::chrono::duration<double> spent = Clock::now() - begin;
    if (rounds >= kMinRounds && spent.count() > seconds) {
      break;
    }
    round(true);
  }
  std::vector<Result> results;
  add_results(layer, in_reused, "reused", results);
  add_results(layer, in_fresh, "fresh", results);
  return results;
}

void print(const Case& where, const std::vector<Result>& results) {
  std::printf("\n%s %s %s, threads: %d, rounds: %zu\n", where.shape.c_str(), where.dtype,
              where.layout, where.threads, where.rounds);
  std::printf("%-20s %-7s %11s  %-23s %7s  %s\n", "pass", "memory", "microsec.", "[quartiles]",
              "GB/s", "times the copy [quartiles]");
  for (const Result& r : results) {
    std::printf("%-20s %-7s %11.1f  [%9.1f, %9.1f]  %7.1f  %6.2f [%.2f, %.2f]\n", r.pass.c_str(),
                r.memory.c_str(), r.time[1], r.time[0], r.time[2], r.gigabytes_per_second(),
                r.ratio[1], r.ratio[0], r.ratio[2]);
  }
  std::fflush(stdout);
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument.starts_with("--threads=")) {
      options.threads.clear();
      for (const char* at = value.c_str(); *at != '\0';) {
        char* end = nullptr;
        options.threads.push_back(static_cast<int>(std::strtol(at, &end, 10)));
        if (end == at || options.threads.back() < 1) {
          fail("--threads: got " + value + ", expected numbers from 1 on, like 1,2");
        }
        at = *end == ',' ? end + 1 : end;
      }
    } else if (argument.starts_with("--seconds=")) {
      options.seconds = std::strtod(value.c_str(), nullptr);
    } else if (argument.starts_with("--json=")) {
      options.json = value;
    } else if (argument.starts_with('-')) {
      fail("got " + argument + ", expected --threads=, --seconds=, --json= or a shape");
    } else {
      options.shapes.push_back(argument);
      options.sizes[argument] = syncbn::bench::parse_shape(argument);
    }
  }
  if (options.shapes.empty()) {
    fail("shapes: got none, expected for example 8x64x56x56, or $(cat benchmarks/shapes.txt)");
  }
  return options;
}

void write_json(std::FILE* file, const Case& where, const std::vector<Result>& results,
                bool& first) {
  for (const Result& r : results) {
    std::fprintf(file,
                 "%s\n  {\"shape\": \"%s\", \"dtype\": \"%s\", \"layout\": \"%s\", "
                 "\"threads\": %d, \"rounds\": %zu, \"pass\": \"%s\", \"memory\": \"%s\", "
                 "\"bytes\": %.0f, \"microseconds\": [%.3f, %.3f, %.3f], "
                 "\"gigabytes_per_second\": %.3f, \"times_copy\": [%.4f, %.4f, %.4f]}",
                 first ? "" : ",", where.shape.c_str(), where.dtype, where.layout, where.threads,
                 where.rounds, r.pass.c_str(), r.memory.c_str(), r.bytes, r.time[0], r.time[1],
                 r.time[2], r.gigabytes_per_second(), r.ratio[0], r.ratio[1], r.ratio[2]);
    first = false;
  }
}

}  // namespace

int main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  std::FILE* json = options.json.empty() ? nullptr : std::fopen(options.json.c_str(), "w");
  if (json == nullptr && !options.json.empty()) {
    fail("--json: cannot write " + options.json);
  }
  std::printf("%s, %s\n", SYNCBN_BUILD, syncbn::cpu_instruction_set());
  if (json != nullptr) {
    std::fprintf(json, "{\"build\": \"%s\", \"instruction_set\": \"%s\", \"passes\": [",
                 SYNCBN_BUILD, syncbn::cpu_instruction_set());
  }
  bool first = true;
  for (const std::string& shape : options.shapes) {
    const auto& sizes = options.sizes.at(shape);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool channels_last : {false, true}) {
        if (channels_last && sizes.size() == 2) {
          continue;  // the same layout
        }
        LayerPasses layer(sizes, dtype, channels_last);
        for (const int threads : options.threads) {
          syncbn::ThreadPool pool(threads);
          Executor& executor = threads == 1 ? syncbn::serial_executor() : pool;
          Case where{shape, syncbn::name(dtype), channels_last ? "channels-last" : "contiguous",
                     threads, 0};
          const auto results = measure(layer, executor, options.seconds, where.rounds);
          print(where, results);
          if (json != nullptr) {
            write_json(json, where, results, first);
          }
        }
      }
    }
  }
  if (json != nullptr) {
    std::fputs("\n]}\n", json);
    std::fclose(json);
  }
}
