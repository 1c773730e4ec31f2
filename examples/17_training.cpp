// SPDX-License-Identifier: Apache-2.0
// Trains a network on three ranks, which are threads with 20, 100 and 180 samples: linear, batch
// norm with ReLU, linear, logistic loss. First each rank has statistics of its own samples, then
// they are shared. All that ranks share goes through the group.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <syncbn/batch_norm.hpp>
#include <thread>
#include <vector>

namespace {

constexpr std::int64_t kSamples = 300;
constexpr std::int64_t kHidden = 16;
constexpr int kSteps = 300;
constexpr float kLearningRate = 2.0f;

/// One array of all parameters, so that one message has all gradients.
struct Parameters {
  std::array<float, 5 * kHidden + 1> all{};
  std::span<float> linear() { return std::span(all).first<2 * kHidden>(); }  ///< (2, kHidden)
  std::span<float> weight() { return std::span(all).subspan<2 * kHidden, kHidden>(); }
  std::span<float> bias() { return std::span(all).subspan<3 * kHidden, kHidden>(); }
  std::span<float> head() { return std::span(all).subspan<4 * kHidden, kHidden + 1>(); }
};

/// Between -limit and limit. The distributions of standard libraries differ between versions.
float draw(std::minstd_rand& random, float limit) {
  return limit * (static_cast<float>(random()) / 0x1p30f - 1);
}

/// Points in the plane; those inside a circle are to be told from the others.
struct Sample {
  float x[2];
  float target;
};

std::vector<Sample> all_samples() {
  std::minstd_rand random(1);  // NOLINT(bugprone-random-generator-seed): the same on every rank
  std::vector<Sample> samples(kSamples);
  for (Sample& s : samples) {
    s = {{draw(random, 1.5f), draw(random, 1.5f)}, 0};
    s.target = std::hypot(s.x[0], s.x[1]) < 1 ? 1.0f : 0.0f;
  }
  return samples;
}

/// One rank's network. statistics: the group whose samples normalize.
class Network {
 public:
  Network(syncbn::Communicator& group, syncbn::Communicator& statistics)
      : group_(group),
        layer_({.channels = kHidden,
                .name = "hidden.bn",
                .activation = {syncbn::ActivationKind::kRelu}},
               statistics) {
    std::minstd_rand random(3);  // NOLINT(bugprone-random-generator-seed): the same on every rank
    for (float& value : parameters_.linear()) {
      value = draw(random, 2.0f);
    }
    for (float& value : parameters_.weight()) {
      value = 1;
    }
    for (float& value : parameters_.head()) {
      value = draw(random, 0.2f);
    }
  }

  /// A step on this rank's samples; the loss over all ranks' samples.
  float train(std::span<const Sample> samples) {
    const std::int64_t n = std::ssize(samples);
    std::vector<float> hidden(static_cast<std::size_t>(n * kHidden)), active(hidden);
    linear(samples, hidden);
    layer_.forward({.x = {hidden, {n, kHidden}},
                    .weight = {parameters_.weight(), {kHidden}},
                    .bias = {parameters_.bias(), {kHidden}},
                    .y = {active, {n, kHidden}},
                    .running_mean = {running_mean_, {kHidden}},
                    .running_var = {running_var_, {kHidden}}},
                   saved_);

    Parameters gradients;
    std::vector<float> dactive(active.size()), dhidden(active.size());
    float loss = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const float target = samples[static_cast<std::size_t>(i)].target;
      const float p = probability(active, i);
      loss -= std::log(target > 0 ? p : 1 - p) / kSamples;
      const float dlogit = (p - target) / kSamples;
      for (std::int64_t c = 0; c < kHidden; ++c) {
        const auto at = static_cast<std::size_t>(i * kHidden + c);
        const auto channel = static_cast<std::size_t>(c);
        gradients.head()[channel] += dlogit * active[at];
        dactive[at] = dlogit * parameters_.head()[channel];
      }
      gradients.head()[kHidden] += dlogit;
    }

    layer_.backward({.dy = {dactive, {n, kHidden}},
                     .x = {hidden, {n, kHidden}},
                     .weight = {parameters_.weight(), {kHidden}},
                     .bias = {parameters_.bias(), {kHidden}},
                     .dx = {dhidden, {n, kHidden}},
                     .dweight = {gradients.weight(), {kHidden}},
                     .dbias = {gradients.bias(), {kHidden}}},
                    saved_);
    for (std::size_t at = 0; at < dhidden.size(); ++at) {
      const Sample& s = samples[at / kHidden];
      gradients.linear()[at % kHidden] += dhidden[at] * s.x[0];
      gradients.linear()[kHidden + at % kHidden] += dhidden[at] * s.x[1];
    }
    loss = sum_over_ranks(gradients, loss);
    for (std::size_t i = 0; i < parameters_.all.size(); ++i) {
      parameters_.all[i] -= kLearningRate * gradients.all[i];
    }
    return loss;
  }

  /// The share of samples that are told rightly, with running statistics; no exchange.
  float accuracy(std::span<const Sample> samples) {
    const std::int64_t n = std::ssize(samples);
    std::vector<float> hidden(static_cast<std::size_t>(n * kHidden));
    linear(samples, hidden);
    layer_.evaluate({.x = {hidden, {n, kHidden}},
                     .weight = {parameters_.weight(), {kHidden}},
                     .bias = {parameters_.bias(), {kHidden}},
                     .running_mean = {running_mean_, {kHidden}},
                     .running_var = {running_var_, {kHidden}},
                     .y = {hidden, {n, kHidden}}});  // in place
    std::int64_t right = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const bool inside = samples[static_cast<std::size_t>(i)].target > 0;
      right += (probability(hidden, i) > 0.5f) == inside ? 1 : 0;
    }
    return static_cast<float>(right) / static_cast<float>(n);
  }

  const Parameters& parameters() const { return parameters_; }

 private:
  void linear(std::span<const Sample> samples, std::vector<float>& hidden) {
    for (std::size_t at = 0; at < hidden.size(); ++at) {
      const Sample& s = samples[at / kHidden];
      hidden[at] = s.x[0] * parameters_.linear()[at % kHidden] +
                   s.x[1] * parameters_.linear()[kHidden + at % kHidden];
    }
  }
  float probability(const std::vector<float>& active, std::int64_t sample) {
    float logit = parameters_.head()[kHidden];
    for (std::size_t c = 0; c < kHidden; ++c) {
      logit += parameters_.head()[c] * active[static_cast<std::size_t>(sample) * kHidden + c];
    }
    return 1 / (1 + std::exp(-logit));
  }

  /// In rank order, so that every rank has the same bits and parameters stay equal.
  float sum_over_ranks(Parameters& gradients, float loss) {
    std::vector<float> own(gradients.all.begin(), gradients.all.end());
    own.push_back(loss);
    // A group sums integers: each rank writes the bits of its numbers to a place of its own.
    std::vector<std::int64_t> bits(own.size() * static_cast<std::size_t>(group_.size()));
    std::transform(own.begin(), own.end(), bits.begin() + group_.rank() * std::ssize(own),
                   [](float number) { return std::bit_cast<std::int32_t>(number); });
    group_.all_reduce_sum(bits);
    std::fill(own.begin(), own.end(), 0.0f);
    for (std::size_t i = 0; i < bits.size(); ++i) {
      own[i % own.size()] += std::bit_cast<float>(static_cast<std::int32_t>(bits[i]));
    }
    std::copy(own.begin(), own.end() - 1, gradients.all.begin());
    loss = own.back();
    return loss;
  }

  syncbn::Communicator& group_;
  syncbn::BatchNorm layer_;
  syncbn::Saved saved_;
  Parameters parameters_;
  std::array<float, kHidden> running_mean_{}, running_var_{};
};

struct Trained {
  Parameters parameters;
  std::vector<float> losses, accuracy;  ///< every few steps
};

/// Of each rank.
std::array<Trained, 3> train(const std::vector<Sample>& samples, bool shared, int every) {
  constexpr std::array<std::size_t, 4> kBounds = {0, 20, 120, kSamples};
  syncbn::ThreadGroup group(3);
  std::array<Trained, 3> trained;
  std::vector<std::thread> ranks;
  for (std::size_t r = 0; r < 3; ++r) {
    ranks.emplace_back([&, r] {
      syncbn::Communicator& all = group.rank(static_cast<int>(r));
      syncbn::Communicator& alone = syncbn::self_communicator();
      Network network(all, shared ? all : alone);
      const auto share = std::span(samples).subspan(kBounds[r], kBounds[r + 1] - kBounds[r]);
      for (int step = 1; step <= kSteps; ++step) {
        const float loss = network.train(share);
        if (step % every == 0) {
          trained[r].losses.push_back(loss);
          trained[r].accuracy.push_back(network.accuracy(samples));
        }
      }
      trained[r].parameters = network.parameters();
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return trained;
}

}  // namespace

int main(int argc, char** /*argv*/) {
  const std::vector<Sample> samples = all_samples();
  const int every = argc > 1 ? 5 : 100;  // with an argument: for the figure of the page
  bool right = true;
  for (const bool shared : {false, true}) {
    const std::array<Trained, 3> ranks = train(samples, shared, every);
    std::printf("%s statistics\n", shared ? "shared" : "own");
    for (std::size_t i = 0; i < ranks[0].losses.size(); ++i) {
      std::printf("step %3d: loss %.3f, accuracy of the ranks %.3f %.3f %.3f\n",
                  every * static_cast<int>(i + 1), double{ranks[0].losses[i]},
                  double{ranks[0].accuracy[i]}, double{ranks[1].accuracy[i]},
                  double{ranks[2].accuracy[i]});
    }
    for (const Trained& rank : ranks) {
      right = right && rank.parameters.all == ranks[0].parameters.all;
      right = right && (!shared || rank.accuracy == ranks[0].accuracy);
    }
    right = right && (!shared || ranks[0].accuracy.back() > 0.95f);
  }
  std::printf("%s\n", right ? "the ranks have the same parameters" : "wrong");
  return right ? 0 : 1;
}
