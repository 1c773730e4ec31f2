// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/autograd/autograd.h>
#include <syncbn/torch.hpp>

#include <array>
#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "models.hpp"
#include "processes.hpp"

// What ranks get when something is wrong: DIR/SCENARIO.RANK has a line per call, "ok" or
// "Class: text".

inline SyncBatchNorm new_layer(const Group& group, const char* name = "bn", int channels = 3,
                               std::chrono::seconds timeout = std::chrono::seconds(60)) {
  return SyncBatchNorm(
      SyncBatchNormOptions(channels).process_group(group).timeout(timeout).layer_name(name));
}

inline at::Tensor samples(int count = 4, int channels = 3) {
  return at::arange(count * channels, at::kFloat).view({count, channels});
}

inline Lines refused(const Group& group) {
  SyncBatchNorm layer = new_layer(group);
  const bool second = group->getRank() == 1;
  const auto input = [&](const at::Tensor& wrong) { return second ? wrong : samples(); };
  Lines lines;
  for (const auto& wrong : {samples().to(at::kLong), samples().to(at::kMeta), at::Tensor(),
                            samples().to_sparse(), samples(4, 2), samples().flatten()}) {
    lines.push_back(outcome([&] { layer->forward(input(wrong)); }));
  }
  layer->options.momentum(second ? 2.0 : 0.1);
  lines.push_back(outcome([&] { layer->forward(samples()); }));
  layer->options.momentum(0.1);
  lines.push_back(outcome([&] { layer->forward(samples()); }));  // the group still serves
  lines.push_back(std::to_string(layer->num_batches_tracked.item<std::int64_t>()));
  return lines;
}

inline Lines differ(const Group& group) {
  const bool second = group->getRank() == 1;
  SyncBatchNorm layer = new_layer(group);
  SyncBatchNorm other = new_layer(group, "stem.bn");
  SyncBatchNorm wide = new_layer(group, "wide", 600);
  Lines lines;
  lines.push_back(outcome([&] { (second ? other : layer)->forward(samples()); }));
  lines.push_back(outcome([&] { (second ? wide : layer)->forward(samples(4, second ? 600 : 3)); }));
  SyncBatchNorm fresh = new_layer(group);  // the ranks have called `layer` more or less often
  lines.push_back(
      outcome([&] { fresh->forward(samples().to(second ? at::kBFloat16 : at::kFloat)); }));
  const at::Tensor x = samples().requires_grad_();
  const at::Tensor y = fresh->forward(x);
  lines.push_back(outcome([&] {
    if (second) {
      fresh->forward(samples());
    } else {
      y.sum().backward();
    }
  }));
  lines.push_back(outcome([&] { new_layer(group)->forward(samples()); }));
  return lines;
}

/// A layer without a name on one rank, and on both.
inline Lines unnamed(const Group& group) {
  SyncBatchNorm named = new_layer(group);
  SyncBatchNorm layer(SyncBatchNormOptions(3).process_group(group));
  const bool second = group->getRank() == 1;
  Lines lines;
  lines.push_back(outcome([&] { (second ? layer : named)->forward(samples()); }));
  lines.push_back(outcome([&] { layer->forward(samples()); }));
  lines.push_back(std::to_string(layer->num_batches_tracked.item<std::int64_t>()));
  layer->eval();
  lines.push_back(outcome([&] { layer->forward(samples()); }));  // exchanges nothing
  lines.push_back(outcome([&] { new_layer(group)->forward(samples()); }));
  return lines;
}

inline Lines one_value(const Group& group) {
  SyncBatchNorm layer = new_layer(group);
  Lines lines{outcome([&] { layer->forward(samples(group->getRank())); })};
  lines.push_back(std::to_string(layer->num_batches_tracked.item<std::int64_t>()));
  lines.push_back(at::equal(layer->running_mean, at::zeros({3})) ? "unchanged" : "changed");
  layer->forward(samples(0));  // nobody has samples
  lines.push_back(std::to_string(layer->num_batches_tracked.item<std::int64_t>()));
  return lines;
}

/// Only rank 0 differentiates: there is no gradient of x, so nobody is waited for.
inline Lines frozen_input(const Group& group) {
  SyncBatchNorm layer = new_layer(group);
  const at::Tensor y = layer->forward(samples());
  return {outcome([&] {
    if (group->getRank() == 0) {
      (y * y).sum().backward();
    }
  })};
}

/// Counts the all-reduces of a group.
class CountingBackend : public c10d::Backend {
 public:
  explicit CountingBackend(Group group)
      : Backend(group->getRank(), group->getSize()), group_(std::move(group)) {}
  const std::string getBackendName() const override { return "counting"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    ++count;
    return group_->allreduce(tensors, options);
  }
  int count = 0;

 private:
  Group group_;
};

/// All-reduces of a forward, a backward and an evaluation, of a narrow and a wide layer.
inline Lines messages(const Group& gloo) {
  const auto counting = c10::make_intrusive<CountingBackend>(gloo);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(gloo->getRank(), gloo->getSize());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, counting);
  Lines lines;
  const auto counted = [&](const auto& body) {
    counting->count = 0;
    body();
    lines.push_back(std::to_string(counting->count));
  };
  for (const int channels : {512, 513}) {
    SyncBatchNorm layer = new_layer(group, "bn", channels);
    at::Tensor y;
    counted([&] { y = layer->forward(samples(4, channels).requires_grad_()); });
    counted([&] { y.sum().backward(); });
    layer->eval();
    counted([&] { layer->forward(samples(4, channels)); });
  }
  return lines;
}

inline Lines missing(const Group& group) {
  SyncBatchNorm layer = new_layer(group, "bn", 3, std::chrono::seconds(2));
  if (group->getRank() == 2) {
    std::this_thread::sleep_for(std::chrono::seconds(7));
    return {outcome([&] { layer->forward(samples()); })};
  }
  Lines lines;
  for (int i = 0; i < 2; ++i) {
    lines.push_back(outcome([&] { layer->forward(samples()); }));
  }
  return lines;
}

inline Lines gone(const Group& group) {
  SyncBatchNorm layer = new_layer(group);
  layer->forward(samples());
  if (group->getRank() == 1) {
    _exit(0);
  }
  const Lines lines{outcome([&] { layer->forward(samples()); })};
  // Whether rank 0 wrote before it knew is a race. This is not one.
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0 || close(ends[0]) != 0 || write(ends[1], "", 1) != -1) {
    throw std::logic_error("expected a pipe that cannot be written to");
  }
  close(ends[1]);
  return lines;
}

inline Lines communicator(const Group& group) {
  ProcessGroupCommunicator ranks(group, std::chrono::seconds(20));
  const auto rank = static_cast<std::size_t>(ranks.rank());
  Lines lines;
  std::vector<std::int64_t> words(30000, std::int64_t{1} << 62);
  words.back() = static_cast<std::int64_t>(rank);
  ranks.all_reduce_sum(words);
  lines.push_back(words[0] == INT64_MIN && words[29998] == INT64_MIN && words[29999] == 1
                      ? "sums"
                      : "other sums");
  lines.push_back(
      outcome([&] { ranks.all_reduce_sum(std::span(words).first(rank == 0 ? 22 : 23)); }));
  lines.push_back(outcome([&] {
    if (rank == 0) {
      ranks.abandon("it has no more pictures");
    } else {
      ranks.all_reduce_sum(words);
    }
  }));
  lines.push_back(outcome([&] { ranks.all_reduce_sum(words); }));
  lines.push_back(outcome([&] { ProcessGroupCommunicator nobody{Group()}; }));
  lines.push_back(
      outcome([&] { ProcessGroupCommunicator impatient(group, std::chrono::milliseconds(0)); }));
  for (const auto& [place, size] : {std::pair{0, 1}, {2, 2}, {-1, 2}, {0, 0}, {0, 2049}}) {
    lines.push_back(outcome([&, place = place, size = size] {
      ProcessGroupCommunicator bare(c10::make_intrusive<c10d::ProcessGroup>(place, size));
    }));
  }
  return lines;
}

/// Without a group.
inline Lines alone(const Group&) {
  SyncBatchNorm layer(SyncBatchNormOptions(3).layer_name("bn"));
  Lines lines{outcome([&] { layer->forward(samples(1)); })};
  const at::Tensor x = samples().requires_grad_();
  const at::Tensor y = layer->forward(x).pow(2).sum();
  const auto dx = torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true);
  lines.push_back(outcome([&] { dx[0].sum().backward(); }));
  layer->zero_grad();
  const at::Tensor weights = samples() + 1;
  (layer->forward(x) * weights).sum().backward();
  const at::Tensor with_x = layer->weight.grad().clone();
  layer->zero_grad();
  (layer->forward(samples()) * weights).sum().backward();
  lines.push_back(at::equal(layer->weight.grad(), with_x) ? "same gradient" : "another one");
  const bool same = at::equal(layer->forward(at::_neg_view(samples())), layer->forward(-samples()));
  lines.push_back(same ? "same output" : "another one");
  layer->eval();
  lines.push_back(outcome([&] { layer->forward(samples().flatten()); }));
  struct Net : torch::nn::Module {
    Net() {
      register_module("stem", SyncBatchNorm(3));
      register_module("head", SyncBatchNorm(3));
    }
  } net;
  syncbn::torch::name_layers(net);
  for (const auto& child : net.children()) {
    lines.push_back(child->as<SyncBatchNorm::Impl>()->options.layer_name());
  }
  return lines;
}

/// Any group: threads here, whose samples are those of one rank.
inline Lines threads(const Group& gloo) {
  const auto step = [](SyncBatchNormOptions options, const at::Tensor& share) {
    SyncBatchNorm layer(options.layer_name("bn"));
    const at::Tensor x = share.clone().requires_grad_();
    const at::Tensor y = layer->forward(x);
    y.pow(3).sum().backward();
    return std::pair(y.detach(), x.grad());
  };
  syncbn::ThreadGroup group(2);
  const auto end = [&](int rank) {
    return std::shared_ptr<syncbn::Communicator>(std::shared_ptr<void>(), &group.rank(rank));
  };
  std::vector<at::Tensor> y(2), dx(2);
  syncbn::run(group, [&](syncbn::Communicator& ranks) {
    const auto rank = static_cast<std::size_t>(ranks.rank());
    const at::Tensor share = rank == 0 ? samples().slice(0, 0, 1) : samples().slice(0, 1);
    std::tie(y[rank], dx[rank]) =
        step(SyncBatchNormOptions(3).communicator(end(ranks.rank())), share);
  });
  const auto [all_y, all_dx] = step(SyncBatchNormOptions(3), samples());
  Lines lines{at::equal(at::cat(y), all_y) ? "same output" : "another one"};
  lines.push_back(at::equal(at::cat(dx), all_dx) ? "same gradient" : "another one");
  lines.push_back(outcome(
      [&] { step(SyncBatchNormOptions(3).communicator(end(0)).process_group(gloo), samples()); }));
  std::vector<std::int64_t> words = {1};
  lines.push_back(outcome([&] { group.rank(1).all_reduce_sum(words); }));
  return lines;
}

inline bool write_errors(const std::string& folder) {
  using Scenario = std::pair<int, Lines (*)(const Group&)>;
  const std::map<std::string, Scenario> scenarios = {{"refused", {2, refused}},
                                                     {"differ", {2, differ}},
                                                     {"unnamed", {2, unnamed}},
                                                     {"one_value", {2, one_value}},
                                                     {"frozen_input", {2, frozen_input}},
                                                     {"messages", {2, messages}},
                                                     {"missing", {3, missing}},
                                                     {"gone", {2, gone}},
                                                     {"alone", {1, alone}},
                                                     {"threads", {1, threads}},
                                                     {"converted", {2, converted}},
                                                     {"averaged", {2, averaged}},
                                                     {"averaged_other", {2, averaged_other}},
                                                     {"communicator", {2, communicator}}};
  bool well = true;
  for (const auto& [name, scenario] : scenarios) {
    const auto& [ranks, run] = scenario;
    const std::string file = folder + "/" + name;
    const int size = ranks;
    const auto body = run;
    well = in_processes(size,
                        [&](int rank) {
                          const Lines lines = body(gloo_group(file + ".store", rank, size));
                          std::ofstream stream(file + "." + std::to_string(rank));
                          for (const std::string& line : lines) {
                            stream << line << "\n";
                          }
                        }) &&
           well;
  }
  return well;
}
