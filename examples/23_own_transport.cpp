// SPDX-License-Identifier: Apache-2.0
// A communicator over a framework's all-reduce. Ranks that bring another message, refused their
// call or left are an error on every rank. The framework is three threads here.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <syncbn/batch_norm.hpp>
#include <syncbn/framed_exchange.hpp>
#include <thread>
#include <vector>

namespace {

constexpr int kRanks = 3;
constexpr std::int64_t kChannels = 4;

/// The framework's own: sums words over all ranks, which bring equally many.
class AllReduce {
 public:
  void operator()(int rank, std::span<std::int64_t> words) {
    given_[rank] = words;
    everybody_.arrive_and_wait();
    std::vector<std::int64_t> sum(words.size());
    for (const auto& of_rank : given_) {
      for (std::size_t i = 0; i < sum.size(); ++i) {
        // As unsigned: sums are modulo 2^64, and signed overflow is undefined.
        sum[i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(sum[i]) +
                                           static_cast<std::uint64_t>(of_rank[i]));
      }
    }
    everybody_.arrive_and_wait();
    std::copy(sum.begin(), sum.end(), words.begin());
  }

 private:
  std::span<std::int64_t> given_[kRanks];
  std::barrier<> everybody_{kRanks};
};

/// One rank's end of the framework's group.
class OwnGroup final : public syncbn::FramedExchange {
 public:
  OwnGroup(AllReduce& sum, int rank) : FramedExchange(rank, kRanks), sum_(sum) {}

 private:
  void begin_sum(std::span<std::int64_t> words) override { sum_(rank(), words); }
  void wait_for_sum() override {}  // begin_sum has waited
  AllReduce& sum_;
};

constexpr std::int64_t kSamples[kRanks] = {10, 0, 90};  // of each rank

/// A forward over the rank's samples of x, the first of which is `first`; the error's kind, or "".
std::string forward(syncbn::BatchNorm& layer, std::vector<float>& x, std::int64_t first,
                    std::int64_t samples, std::int64_t channels, std::vector<float>& y) {
  const syncbn::Extents shape = {samples, channels};
  syncbn::Saved saved;
  try {
    layer.forward({.x = {x.data() + first * kChannels, syncbn::DType::kFloat32, shape},
                   .y = {y.data() + first * kChannels, syncbn::DType::kFloat32, shape}},
                  saved);
    return "";
  } catch (const syncbn::InvalidArgument&) {
    return "refused";
  } catch (const syncbn::DivergenceError& error) {
    return "differs " + std::to_string(error.ranks().empty() ? -1 : error.ranks()[0]);
  } catch (const syncbn::PeerLost& error) {
    return "lost " + std::to_string(error.ranks().empty() ? -1 : error.ranks()[0]);
  }
}

}  // namespace

int main() {
  std::vector<float> x(100 * kChannels), y(x.size()), y_of_one(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * i % 97) * 0.37f;
  }
  AllReduce sum;
  std::vector<std::string> seen[kRanks];
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      OwnGroup group(sum, r);
      syncbn::BatchNorm layer({.channels = kChannels, .name = "bn"}, group);
      const std::int64_t first = r < 2 ? r * kSamples[0] : kSamples[0] + kSamples[1];
      const auto call = [&](std::int64_t channels) {
        seen[r].push_back(forward(layer, x, first, kSamples[r], channels, y));
      };
      call(r == 1 ? kChannels - 1 : kChannels);  // rank 1's argument is refused
      call(kChannels);                           // and the group goes on
      if (r == 2) {
        std::vector<float> narrow(std::size(x));
        syncbn::BatchNorm other({.channels = 1, .name = "other"}, group);
        seen[r].push_back(forward(other, narrow, 0, 1, 1, narrow));
      } else {
        call(kChannels);  // rank 2 calls another layer
      }
      if (r == 2) {
        group.abandon("its own error");
      } else {
        call(kChannels);
      }
      call(kChannels);  // the group is broken
      OwnGroup again(sum, r);
      layer = syncbn::BatchNorm({.channels = kChannels, .name = "bn"}, again);
      call(kChannels);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  syncbn::BatchNorm layer({.channels = kChannels});
  const bool alone = forward(layer, x, 0, 100, kChannels, y_of_one).empty();
  using Seen = std::vector<std::string>;
  const bool right = alone && seen[0] == Seen{"lost 1", "", "differs 2", "lost 2", "lost -1", ""} &&
                     seen[1] == Seen{"refused", "", "differs 2", "lost 2", "lost -1", ""} &&
                     seen[2] == Seen{"lost 1", "", "differs 2", "lost -1", ""};
  std::printf("3 ranks and 1 rank: %s, the errors that were expected: %s\n",
              y == y_of_one ? "the same bits" : "different bits", right ? "yes" : "no");
  return y == y_of_one && right ? 0 : 1;
}
