// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <syncbn/torch.hpp>

#include <chrono>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "outcome.hpp"
#include "processes.hpp"

// Whole models: batch norms that are replaced in them, and their gradients.

namespace nn = torch::nn;

/// A Sequential cannot hold another one whose forward is a template.
struct Inner : nn::SequentialImpl {
  using nn::SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return nn::SequentialImpl::forward(x); }
};

/// A batch norm in each kind of container, and one in two places.
struct Containers : nn::Module {
  nn::Sequential body;
  nn::ModuleList list;
  nn::ModuleDict dict;
  Containers() {
    const auto options = nn::BatchNormOptions(3).eps(0.5).momentum(std::nullopt);
    const nn::BatchNorm1d shared(options);
    body->push_back("first", shared);
    body->push_back(
        "inner", std::make_shared<Inner>(nn::BatchNorm1d(nn::BatchNormOptions(3).affine(false))));
    list->push_back(nn::BatchNorm1d(nn::BatchNormOptions(3).track_running_stats(false)));
    list->push_back(shared);
    dict->update({{"norm", std::make_shared<nn::BatchNorm2dImpl>(3)}});
    register_module("body", body);
    register_module("list", list);
    register_module("dict", dict);
  }
};

/// What cannot be replaced, beside what could.
struct Member : nn::Module {
  nn::BatchNorm1d norm{3};
  nn::Sequential body{nn::BatchNorm1d(3)};
  Member() {
    register_module("norm", norm);
    register_module("body", body);
  }
};

inline Lines converted(const Group& group) {
  Containers model;
  nn::BatchNorm1d plain(nn::BatchNormOptions(3).eps(0.5).momentum(std::nullopt));
  const at::Tensor x = at::arange(12, at::kFloat).view({4, 3});
  model.body->forward(x);  // fills running statistics
  plain->forward(x);
  model.dict->eval();
  torch::optim::SGD optimizer(model.parameters(), /*lr=*/1);
  Lines lines{std::to_string(syncbn::torch::convert(model, group, "net"))};
  for (const auto& item : model.named_modules("net", false)) {
    if (const auto* layer = item.value()->as<SyncBatchNorm::Impl>()) {
      std::ostringstream text;
      text << item.key() << ' ' << layer->options.layer_name() << ' ' << *item.value()
           << (layer->is_training() ? "" : ", evaluates");
      lines.push_back(text.str());
    }
  }
  auto& first = *model.list[1]->as<SyncBatchNorm::Impl>();
  lines.push_back(at::equal(first.running_var, plain->running_var) ? "same statistics" : "others");
  SyncBatchNormOptions options(3);
  SyncBatchNorm made(
      options.eps(0.5).momentum(std::nullopt).process_group(group).layer_name("own"));
  SyncBatchNorm inner(SyncBatchNormOptions(3).process_group(group).layer_name("inner"));
  const at::Tensor share = x * (1 + group->getRank());
  const at::Tensor y = model.body->forward(share);
  lines.push_back(at::equal(y, inner->forward(made->forward(share))) ? "same output" : "another");
  lines.push_back(std::to_string(first.num_batches_tracked.item<std::int64_t>()) + " batches");
  y.pow(3).sum().backward();
  const at::Tensor before = first.weight.detach().clone();
  optimizer.step();
  lines.push_back(at::equal(first.weight, before) ? "not trained" : "trained");

  Member member;
  lines.push_back(outcome([&] { syncbn::torch::convert(member, group); }));
  lines.push_back(member.body[0]->as<nn::BatchNorm1d>() != nullptr ? "unchanged" : "replaced");
  lines.push_back(outcome([&] { syncbn::torch::convert(*plain, group); }));
  return lines;
}

inline Lines averaged(const Group& group) {
  const int rank = group->getRank();
  const auto parameter = [](at::ScalarType dtype, bool learns = true) {
    return at::zeros({2, 2}, dtype).requires_grad_(learns);
  };
  const std::vector<at::Tensor> all = {parameter(at::kFloat), parameter(at::kDouble),
                                       parameter(at::kFloat), parameter(at::kFloat),
                                       parameter(at::kFloat, false)};
  all[0].mutable_grad() = at::full({2, 2}, 1.0F + 2.0F * static_cast<float>(rank)).t();
  all[1].mutable_grad() = at::full({2, 2}, 4.0 * rank, at::kDouble);
  if (rank == 1) {
    all[2].mutable_grad() = at::full({2, 2}, 6.0F);
  }
  syncbn::torch::average_gradients(all, group);
  Lines lines;
  for (const at::Tensor& each : all) {
    std::ostringstream text;
    if (each.grad().defined()) {
      text << each.grad().dtype() << ' ' << each.grad().min().item<double>() << ' '
           << each.grad().max().item<double>();
    } else {
      text << "none";
    }
    lines.push_back(text.str());
  }
  lines.push_back(outcome([&] { syncbn::torch::average_gradients(all, {}); }));
  return lines;
}

/// Ranks whose parameters have another order, of as many elements; another number; or of which one
/// is in a layer. Gradients stay as they were.
inline Lines averaged_other(const Group& group) {
  const bool second = group->getRank() == 1;
  std::vector<at::Tensor> all = {at::zeros({3}).requires_grad_(),
                                 at::zeros({3, 2}).requires_grad_(),
                                 at::zeros({2}, at::kDouble).requires_grad_()};
  for (const at::Tensor& each : all) {
    each.mutable_grad() = at::ones_like(each);
  }
  const auto average = [&] {
    return outcome([&] { syncbn::torch::average_gradients(all, group, std::chrono::seconds(2)); });
  };
  SyncBatchNorm layer(SyncBatchNormOptions(3).process_group(group).layer_name("bn"));
  Lines lines;
  if (second) {
    std::swap(all[0], all[1]);
  }
  lines.push_back(average());
  if (second) {
    std::swap(all[0], all[1]);
    all[2].set_requires_grad(false);
  }
  lines.push_back(average());
  all[2].set_requires_grad(true);
  lines.push_back(second ? outcome([&] { layer->forward(at::zeros({2, 3})); }) : average());
  lines.push_back(average());
  lines.push_back(at::equal(all[1].grad(), at::ones({3, 2})) ? "unchanged" : "changed");
  if (second) {
    std::this_thread::sleep_for(std::chrono::seconds(5));
  } else {
    lines.push_back(average());
  }
  return lines;
}
