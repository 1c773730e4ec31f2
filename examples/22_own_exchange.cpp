// SPDX-License-Identifier: Apache-2.0
// A framework that owns the exchange: a step has two doors, and between them the caller sums one
// message over its ranks. The ranks are parts of one array here, and a loop adds up their messages.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <syncbn/batch_norm.hpp>
#include <syncbn/step.hpp>
#include <vector>

namespace {

constexpr std::int64_t kChannels = 4;

/// One rank's layer: the framework owns all that outlives a call.
struct Rank {
  std::vector<float> x, y;
  std::vector<double> mean = std::vector<double>(kChannels), var = mean, rstd = mean;
  std::int64_t info[2] = {};  // what the backward of this call reads
  std::int64_t call = 0;      // how often the layer was called, the same on all ranks

  syncbn::ForwardStep step() {
    const syncbn::Extents shape = {std::ssize(x) / kChannels, kChannels};
    syncbn::ForwardStep step;
    step.pass.x = {x, shape};
    step.pass.y = {y, shape};
    step.pass.mean = mean.data();
    step.pass.var = var.data();
    step.pass.rstd = rstd.data();
    step.layer = syncbn::layer_identity(1, {}, syncbn::Statistics::kReproducible, false);
    step.call = &call;
    step.running.call = &call;  // finish raises it
    step.info = info;
    return step;
  }
};

}  // namespace

int main() {
  std::vector<float> x(100 * kChannels), y_of_one(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * i % 97) * 0.37f;
  }
  Rank ranks[2];
  ranks[0].x.assign(x.begin(), x.begin() + 30 * kChannels);
  ranks[1].x.assign(x.begin() + 30 * kChannels, x.end());

  const auto words = static_cast<std::size_t>(
      syncbn::forward_words(syncbn::Statistics::kReproducible, syncbn::DType::kFloat32, kChannels));
  std::vector<std::int64_t> message(words), sum(words);
  for (Rank& rank : ranks) {
    rank.y.resize(rank.x.size());
    syncbn::forward_begin(rank.step(), message.data(), syncbn::Execution());
    std::transform(sum.begin(), sum.end(), message.begin(), sum.begin(), std::plus<>());
  }
  const syncbn::Merged merged = {
      .header = sum.data(), .words = sum.data() + syncbn::kHeaderWords, .ranks = 2};
  for (Rank& rank : ranks) {
    syncbn::forward_finish(rank.step(), merged, syncbn::Execution());
  }

  syncbn::BatchNorm layer({.channels = kChannels});
  syncbn::Saved saved;
  layer.forward({.x = {x, {100, kChannels}}, .y = {y_of_one, {100, kChannels}}}, saved);
  std::vector<float> y = ranks[0].y;
  y.insert(y.end(), ranks[1].y.begin(), ranks[1].y.end());
  const bool same = std::memcmp(y.data(), y_of_one.data(), y.size() * sizeof(float)) == 0;
  std::printf("2 ranks and 1 rank: %s, call %lld\n", same ? "the same bits" : "different bits",
              static_cast<long long>(ranks[0].call));
  return same && ranks[0].call == 1 ? 0 : 1;
}
