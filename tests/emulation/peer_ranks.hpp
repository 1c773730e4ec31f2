// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "emulator.hpp"
#include "on_cuda.hpp"
#include "statistics/header.hpp"
#include "support.hpp"
#include "syncbn/cuda_peers.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/passes.hpp"

// Ranks whose devices exchange, each with its memory, and steps of a layer, forward and backward.
namespace syncbn::testing {

using Words = std::vector<std::int64_t>;
using Doubles = std::vector<double>;

constexpr double kPeerEps = 1e-5;
constexpr double kPeerMomentum = 0.1;
constexpr std::int64_t kForEver = std::int64_t{1} << 60;

inline std::size_t at(std::int64_t n) { return static_cast<std::size_t>(n); }

/// What ranks agree on, and their memory.
struct Peers {
  cuda::PeerGroup agreed;
  std::vector<Words> memory, state, mark;

  Peers(int ranks, int blocks, std::int64_t slot_words, std::int64_t timeout = kForEver) {
    agreed.ranks = ranks;
    agreed.blocks = blocks;
    agreed.slot_words = slot_words;
    agreed.timeout = timeout;
    memory.assign(at(ranks), Words(at(agreed.memory_words())));
    state.assign(at(ranks), Words(at(cuda::kPeerStateWords)));
    mark.assign(at(ranks), Words(at(cuda::kPeerMarkWords)));
    for (int r = 0; r < ranks; ++r) {
      agreed.memory[r] = memory[at(r)].data();
    }
  }
  cuda::PeerGroup group(int rank) {
    cuda::PeerGroup out = agreed;
    out.rank = rank;
    out.state = state[at(rank)].data();
    out.mark = mark[at(rank)].data();
    return out;
  }
  /// As a rank's host does that leaves: all its peers' words.
  void abort(std::int64_t code) {
    for (Words& words : memory) {
      words[at(cuda::kAbortWord)] = code;
    }
  }
};

/// A rank's layer.
struct PeerLayer {
  Tensor running_mean, running_var;
  std::int64_t batches = 4, call = 7, count = 0;

  PeerLayer(DType dtype, std::int64_t channels)
      : running_mean(dtype, {channels}), running_var(dtype, {channels}) {
    running_mean.fill(Doubles(at(channels), 0.25));
    running_var.fill(Doubles(at(channels), 1.5));
  }
  cuda::RunningStatistics arrays() {
    return {on_cuda(running_mean.view()), on_cuda(running_var.view()), &batches, &call, &count};
  }
  bool operator==(const PeerLayer& other) const {
    return same_bits(running_mean.values(), other.running_mean.values()) &&
           same_bits(running_var.values(), other.running_var.values()) &&
           batches == other.batches && call == other.call && count == other.count;
  }
};

/// What a rank sends and gets in a step.
struct RankStep {
  DType dtype;
  std::int64_t channels;
  bool share;  ///< of the gradients of weight and bias
  Words forward, backward, info;
  Doubles mean, var, rstd, coefficients;
  Tensor weight, dweight, dbias;

  RankStep(DType of, std::int64_t wide, bool own)
      : dtype(of),
        channels(wide),
        share(own),
        forward(at(message_words(of, wide))),
        backward(forward),
        info(cuda::kInfoWords, -7),
        mean(at(wide), 0.5),
        var(mean),
        rstd(mean),
        coefficients(at(3 * wide), 0.5),
        weight(DType::kFloat32, {wide}),
        dweight(DType::kFloat64, {wide}),
        dbias(dweight) {
    weight.fill(Doubles(at(wide), 0.75));
  }

  void launch_forward(const cuda::PeerGroup& group, PeerLayer& layer,
                      std::optional<double> momentum) {
    cuda::RunningStatistics running = layer.arrays();
    if (channels == 0) {  // of a rank that refuses
      running.mean = running.var = {};
    }
    cuda::exchange_moments(forward.data(), dtype, group, mean.data(), var.data(), rstd.data(),
                           info.data(), channels, kPeerEps, running, momentum, {});
  }
  void launch_backward(const cuda::PeerGroup& group) {
    cuda::exchange_gradients(backward.data(), dtype, group, share, info.data(), mean.data(),
                             rstd.data(), on_cuda(TensorView(weight.view())), coefficients.data(),
                             on_cuda(dweight.view()), on_cuda(dbias.view()), channels, {});
  }

  ::testing::AssertionResult same_statistics(const RankStep& other) const {
    return info != other.info             ? ::testing::AssertionFailure()
                                                << "info " << info[0] << ", " << info[1] << ", not "
                                                << other.info[0] << ", " << other.info[1]
           : !same_bits(mean, other.mean) ? same_bits(mean, other.mean) << " of mean"
           : !same_bits(var, other.var)   ? same_bits(var, other.var) << " of var"
                                          : same_bits(rstd, other.rstd) << " of rstd";
  }
  ::testing::AssertionResult same_gradients(const RankStep& other) const {
    const auto c = same_bits(coefficients, other.coefficients);
    const auto w = same_bits(dweight.values(), other.dweight.values());
    return !c   ? same_bits(coefficients, other.coefficients) << " of the coefficients"
           : !w ? same_bits(dweight.values(), other.dweight.values()) << " of dweight"
                : same_bits(dbias.values(), other.dbias.values()) << " of dbias";
  }
};

/// A batch, dealt to ranks, and what one rank makes of all of it.
struct PeerBatch {
  std::vector<RankStep> ranks;
  RankStep one;
  std::vector<RankStep> shares;  ///< each rank's own share of dweight and dbias

  /// samples: of each rank.
  PeerBatch(Random& random, DType dtype, std::int64_t channels,
            const std::vector<std::int64_t>& samples, std::uint64_t call, bool share)
      : one(dtype, channels, false) {
    constexpr std::int64_t kPlane = 3;
    const std::int64_t all = std::accumulate(samples.begin(), samples.end(), std::int64_t{0});
    const auto values = [&] { return rough_values(random, dtype, all, channels * kPlane); };
    Tensor x(dtype, {all, channels, kPlane}), dy(x);
    x.fill(values());
    dy.fill(values());
    const std::uint32_t forward = fingerprint(3, call, Direction::kForward, channels, kPeerEps);
    const auto sums = [&](std::int64_t first, std::int64_t count, RankStep& out) {
      const auto part = [&](const Tensor& whole) {
        TensorView view = whole.view();
        view.data = count == 0 ? nullptr
                               : static_cast<const std::byte*>(view.data) +
                                     at(first * channels * kPlane) * size_of(dtype);
        view.sizes = {count, channels, kPlane};
        return view;
      };
      local_moments(part(x), {}, out.forward.data(), forward, serial_executor());
      local_gradients({part(dy), part(x), {}, out.mean.data(), out.rstd.data()},
                      out.backward.data(), backward_fingerprint(forward), serial_executor());
    };
    sums(0, all, one);
    const MessageInfo info = read_header(one.forward.data(), 1);
    finalize_moments(info, one.forward.data() + kHeaderWords, one.mean.data(), one.var.data(),
                     one.rstd.data(), channels, kPeerEps, serial_executor());
    one.info = {info.count, forward};
    finalize_gradients(read_header(one.backward.data(), 1), one.backward.data() + kHeaderWords,
                       {one.mean.data(), one.rstd.data(), one.weight.view(),
                        one.coefficients.data(), one.dweight.view(), one.dbias.view(), channels},
                       info.count, serial_executor());
    std::int64_t first = 0;
    for (const std::int64_t count : samples) {
      ranks.emplace_back(dtype, channels, share);
      sums(first, count, ranks.back());
      first += count;
      shares.push_back(one);
      if (share) {
        affine_gradient_shares(ranks.back().backward.data() + kHeaderWords, dtype,
                               {.mean = one.mean.data(),
                                .rstd = one.rstd.data(),
                                .dweight = shares.back().dweight.view(),
                                .dbias = shares.back().dbias.view(),
                                .channels = channels},
                               serial_executor());
      }
    }
  }

  /// The layer after it.
  void update(PeerLayer& layer, std::optional<double> momentum) const {
    ++layer.call;
    layer.count = one.info[0];
    if (one.info[0] > 0) {
      ++layer.batches;
      update_running_statistics(layer.running_mean.view(), layer.running_var.view(),
                                one.mean.data(), one.var.data(), one.channels, one.info[0],
                                momentum.value_or(1.0 / static_cast<double>(layer.batches)));
    }
  }
};

}  // namespace syncbn::testing
