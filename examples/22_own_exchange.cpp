// SPDX-License-Identifier: Apache-2.0
// A framework that owns the exchange: a step has two doors, and between them the caller sums one
// message over its ranks. The ranks are parts of one array here, and a loop adds up their messages.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <syncbn/batch_norm.hpp>
#include <syncbn/step.hpp>
#include <vector>

namespace {

constexpr std::int64_t kChannels = 4;
constexpr syncbn::Activation kRelu = {.kind = syncbn::ActivationKind::kRelu};

/// One rank's layer: the framework owns all that outlives a call.
struct Rank {
  std::vector<float> x, residual, y, dy, dx, dresidual;
  std::vector<float> weight = {1, 2, -1, 0.5f}, bias = {0, 1, 2, -1};
  std::vector<std::uint8_t> signs;  // of the activation, after a residual alone
  std::vector<float> dweight = std::vector<float>(kChannels), dbias = dweight;
  std::vector<double> mean = std::vector<double>(kChannels), var = mean, rstd = mean;
  std::vector<double> coefficients = std::vector<double>(3 * kChannels);
  std::vector<std::int64_t> own;  // this rank's message of the backward
  std::int64_t info[2] = {};      // what the backward of this call reads
  std::int64_t call = 0;          // how often the layer was called, the same on all ranks

  void take(const std::vector<float>& all_x, const std::vector<float>& all_residual,
            const std::vector<float>& all_dy, std::int64_t begin, std::int64_t end) {
    x.assign(all_x.begin() + begin, all_x.begin() + end);
    residual.assign(all_residual.begin() + begin, all_residual.begin() + end);
    dy.assign(all_dy.begin() + begin, all_dy.begin() + end);
    y = dx = dresidual = std::vector<float>(x.size());
    signs.resize(static_cast<std::size_t>(syncbn::activation_mask_bytes(
        syncbn::TensorView(x, {std::ssize(x) / kChannels, kChannels}))));
  }

  syncbn::ForwardStep step() {
    const syncbn::Extents shape = {std::ssize(x) / kChannels, kChannels};
    syncbn::ForwardStep step;
    step.pass.x = {x, shape};
    step.pass.weight = {weight, {kChannels}};
    step.pass.bias = {bias, {kChannels}};
    step.pass.residual = {residual, shape};
    step.pass.activation = kRelu;
    step.pass.activation_mask = signs.data();
    step.pass.y = {y, shape};
    step.pass.mean = mean.data();
    step.pass.var = var.data();
    step.pass.rstd = rstd.data();
    step.layer = syncbn::layer_identity(1, kRelu, syncbn::Statistics::kReproducible,
                                        /*residual=*/true, /*weight=*/true, /*bias=*/true);
    step.call = &call;
    step.running.call = &call;  // finish raises it
    step.info = info;
    return step;
  }

  syncbn::BackwardStep back() {
    const syncbn::Extents shape = {std::ssize(x) / kChannels, kChannels};
    syncbn::BackwardStep step;
    step.pass.dy = {dy, shape};
    step.pass.x = {x, shape};
    step.pass.weight = {weight, {kChannels}};
    step.pass.through = {kRelu, {weight, {kChannels}}, {bias, {kChannels}}, signs.data()};
    step.pass.u = {dresidual, shape};
    step.pass.mean = mean.data();
    step.pass.rstd = rstd.data();
    step.pass.dx = {dx, shape};
    step.pass.dweight = {dweight, {kChannels}};
    step.pass.dbias = {dbias, {kChannels}};
    step.info = info;
    step.coefficients = coefficients.data();
    return step;
  }
};

/// A SUM all-reduce, one rank after the other.
void add(std::vector<std::int64_t>& sum, const std::vector<std::int64_t>& message) {
  std::transform(sum.begin(), sum.end(), message.begin(), sum.begin(), std::plus<>());
}

syncbn::Merged merged(const std::vector<std::int64_t>& sum) {
  return {.header = sum.data(), .words = sum.data() + syncbn::kHeaderWords, .ranks = 2};
}

std::vector<float> joined(std::vector<float> first, const std::vector<float>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

int main() {
  std::vector<float> x(100 * kChannels), residual(x.size()), dy(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * i % 97) * 0.37f;
    residual[i] = static_cast<float>(i * i % 83) * 0.05f - 2;
    dy[i] = static_cast<float>(i * i % 89) * 0.11f;
  }
  Rank ranks[2];
  const auto first = 30 * kChannels;  // values of rank 0
  ranks[0].take(x, residual, dy, 0, first);
  ranks[1].take(x, residual, dy, first, std::ssize(x));

  std::vector<std::int64_t> message(static_cast<std::size_t>(syncbn::forward_words(
      syncbn::Statistics::kReproducible, syncbn::DType::kFloat32, kChannels)));
  std::vector<std::int64_t> sum(message.size());
  for (Rank& rank : ranks) {
    syncbn::forward_begin(rank.step(), message.data(), syncbn::Execution());
    add(sum, message);
  }
  for (Rank& rank : ranks) {
    syncbn::forward_finish(rank.step(), merged(sum), syncbn::Execution());
  }

  std::vector<std::int64_t> sum_back(
      static_cast<std::size_t>(syncbn::message_words(syncbn::DType::kFloat32, kChannels)));
  for (Rank& rank : ranks) {
    rank.own.resize(sum_back.size());
    syncbn::backward_begin(rank.back(), rank.own.data(), nullptr, syncbn::Execution());
    add(sum_back, rank.own);
  }
  for (Rank& rank : ranks) {
    syncbn::backward_finish(rank.back(), rank.own.data(), merged(sum_back), syncbn::Execution());
  }

  Rank one;
  one.take(x, residual, dy, 0, std::ssize(x));
  syncbn::BatchNorm layer({.channels = kChannels, .activation = kRelu});
  syncbn::Saved saved;
  const syncbn::Extents shape = {100, kChannels};
  const syncbn::TensorView weight = {one.weight, {kChannels}}, bias = {one.bias, {kChannels}};
  layer.forward({.x = {x, shape},
                 .weight = weight,
                 .bias = bias,
                 .residual = {residual, shape},
                 .y = {one.y, shape}},
                saved);
  layer.backward({.dy = {dy, shape},
                  .x = {x, shape},
                  .weight = weight,
                  .bias = bias,
                  .dx = {one.dx, shape},
                  .dresidual = {one.dresidual, shape}},
                 saved);
  const bool same = joined(ranks[0].y, ranks[1].y) == one.y &&
                    joined(ranks[0].dx, ranks[1].dx) == one.dx &&
                    joined(ranks[0].dresidual, ranks[1].dresidual) == one.dresidual;
  std::printf("2 ranks and 1 rank: %s, call %lld\n", same ? "the same bits" : "different bits",
              static_cast<long long>(ranks[0].call));
  return same && ranks[0].call == 1 ? 0 : 1;
}
