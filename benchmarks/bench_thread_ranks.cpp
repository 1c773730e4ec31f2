// SPDX-License-Identifier: Apache-2.0
// One layer of two ranks that are threads, against the same two threads that do not exchange.
//
// bench_thread_ranks [--seconds=1] [--json=FILE] SHAPE...
//
// Each rank has the whole shape, float32 and contiguous, and writes to memory that is used again.
// Both begin at a barrier; a round's time ends with the slower one, and the ratio is that of the
// same round. --seconds: for each shape, about.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <syncbn/batch_norm.hpp>
#include <syncbn/communicator.hpp>
#include <thread>
#include <vector>

#include "layer_passes.hpp"

namespace {

using syncbn::DType;
using syncbn::bench::fail;
using syncbn::bench::Pages;
using syncbn::bench::Shape;
using Clock = std::chrono::steady_clock;
using Times = std::vector<double>;  // microseconds, one per round

constexpr int kRanks = 2;
constexpr std::size_t kMinRounds = 5;

struct Quartiles {
  explicit Quartiles(Times times) {
    std::sort(times.begin(), times.end());
    for (std::size_t i = 0; i < 3; ++i) {
      at[i] = times[(times.size() - 1) * (i + 1) / 4];
    }
  }
  double at[3];
};

/// One rank's tensors.
class Rank {
 public:
  explicit Rank(const Shape& shape)
      : shape_(shape), size_(bytes_of(shape)), x_(size_), dy_(size_), y_(size_), dx_(size_) {
    for (const Pages* pages : {&x_, &dy_, &y_, &dx_}) {
      auto* values = static_cast<float*>(pages->data());
      for (std::size_t i = 0; i < size_ / sizeof(float); ++i) {
        values[i] = static_cast<float>(i * i % 97) * 0.37f - 12.0f;
      }
    }
  }

  void forward(syncbn::BatchNorm& layer) { layer.forward({.x = view(x_), .y = view(y_)}, saved_); }
  void backward(syncbn::BatchNorm& layer) {
    layer.backward({.dy = view(dy_), .x = view(x_), .dx = view(dx_)}, saved_);
  }

 private:
  static std::size_t bytes_of(const Shape& shape) {
    std::size_t bytes = sizeof(float);
    for (const std::int64_t size : shape) {
      bytes *= static_cast<std::size_t>(size);
    }
    return bytes;
  }
  syncbn::MutableTensorView view(const Pages& pages) const {
    return {pages.data(), DType::kFloat32, shape_};
  }

  Shape shape_;
  std::size_t size_;
  Pages x_, dy_, y_, dx_;
  syncbn::Saved saved_;
};

/// All rounds of one shape, by direction and whether they exchange: until the slower one is done.
class Measurement {
 public:
  Measurement(const Shape& shape, double seconds) : group_(kRanks) {
    const auto until = Clock::now() + std::chrono::microseconds(std::llround(1e6 * seconds));
    std::thread other([&] { run(shape, 1, until); });
    run(shape, 0, until);
    other.join();
  }

  std::map<std::string, Times> times;

 private:
  void run(const Shape& shape, int r, Clock::time_point until) {
    Rank rank(shape);
    const syncbn::BatchNorm::Options options{.channels = shape[1], .name = "layer"};
    syncbn::Communicator& self = syncbn::self_communicator();
    syncbn::BatchNorm of_ranks(options, group_.rank(r)), alone(options, self);
    for (std::size_t round = 0; !done_; ++round) {
      for (const bool together : {false, true}) {
        syncbn::BatchNorm& layer = together ? of_ranks : alone;
        const char* of = together ? "ranks" : "alone";
        time(r, round, std::string("forward ") + of, [&] { rank.forward(layer); });
        time(r, round, std::string("backward ") + of, [&] { rank.backward(layer); });
      }
      meet();
      if (r == 0) {
        done_ = round >= kMinRounds && Clock::now() > until;
      }
      meet();
    }
  }

  /// Both threads go on together. Who waits stays awake: a thread that is woken begins late, and
  /// perhaps on the core of the one that woke it.
  void meet() {
    const std::size_t all = (arrived_.fetch_add(1) / kRanks + 1) * kRanks;
    while (arrived_.load() < all) {
      std::this_thread::yield();
    }
  }

  template <class Work>
  void time(int r, std::size_t round, const std::string& name, const Work& work) {
    meet();
    begin_[r] = Clock::now();
    work();
    end_[r] = Clock::now();
    meet();
    if (r == 0 && round > 0) {  // the first touches the memory
      const std::chrono::duration<double, std::micro> took =
          std::max(end_[0], end_[1]) - std::min(begin_[0], begin_[1]);
      times[name].push_back(took.count());
    }
  }

  syncbn::ThreadGroup group_;
  std::atomic<std::size_t> arrived_{0};
  Clock::time_point begin_[kRanks];
  Clock::time_point end_[kRanks];
  bool done_ = false;
};

}  // namespace

int main(int count, char** arguments) {
  double seconds = 1;
  std::string path;
  std::string rows;
  std::vector<std::string> shapes;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument.starts_with("--seconds=")) {
      seconds = std::strtod(value.c_str(), nullptr);
    } else if (argument.starts_with("--json=")) {
      path = value;
    } else if (argument.starts_with("--")) {
      fail("got " + argument + ", expected --seconds=, --json= or a shape");
    } else {
      shapes.push_back(argument);
    }
  }
  if (shapes.empty()) {
    fail("shapes: got none, expected for example 8x64x56x56");
  }
  std::printf("2 ranks as threads and 2 threads alone: microseconds, ratio [quartiles]\n");
  for (const std::string& text : shapes) {
    const Measurement found(syncbn::bench::parse_shape(text), seconds);
    for (const std::string direction : {"forward", "backward"}) {
      const Times& alone = found.times.at(direction + " alone");
      const Times& ranks = found.times.at(direction + " ranks");
      Times ratios;
      for (std::size_t i = 0; i < alone.size(); ++i) {
        ratios.push_back(ranks[i] / alone[i]);
      }
      const Quartiles a(alone), b(ranks), q(ratios);
      std::printf("%-14s %-9s alone %9.1f  ranks %9.1f  %5.2f [%.2f, %.2f]\n", text.c_str(),
                  direction.c_str(), a.at[1], b.at[1], q.at[1], q.at[0], q.at[2]);
      char row[384];
      std::snprintf(row, sizeof(row),
                    "%s\n {\"shape\": \"%s\", \"direction\": \"%s\", \"alone\": [%.2f, %.2f, "
                    "%.2f], \"ranks\": [%.2f, %.2f, %.2f], \"ratio\": [%.4f, %.4f, %.4f], "
                    "\"rounds\": %zu}",
                    rows.empty() ? "" : ",", text.c_str(), direction.c_str(), a.at[0], a.at[1],
                    a.at[2], b.at[0], b.at[1], b.at[2], q.at[0], q.at[1], q.at[2], alone.size());
      rows += row;
    }
  }
  if (!path.empty()) {
    std::FILE* json = std::fopen(path.c_str(), "w");
    if (json == nullptr) {
      fail("--json: cannot write " + path);
    }
    std::fprintf(json, "[%s\n]\n", rows.c_str());
    std::fclose(json);
  }
}
