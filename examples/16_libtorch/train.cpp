// SPDX-License-Identifier: Apache-2.0
// Two processes train a small segmentation network in C++. Statistics of all batch norms are
// shared; gradients are averaged, as DistributedDataParallel does.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <syncbn/torch.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "pictures.hpp"

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
constexpr int kRanks = 2;

torch::nn::Sequential new_network(const Group& group) {
  using torch::nn::Conv2dOptions;
  torch::nn::Sequential network;
  for (int stage = 0, in = 3, out = 16; stage < 3; ++stage, in = out, out = 32) {
    network->push_back(torch::nn::Conv2d(
        Conv2dOptions(in, out, 3).stride(stage == 0 ? 2 : 1).padding(1).bias(false)));
    network->push_back(torch::nn::BatchNorm2d(out));
    network->push_back(torch::nn::ReLU());
  }
  network->push_back(torch::nn::Conv2d(Conv2dOptions(32, kClasses, 1)));
  syncbn::torch::convert(*network, group);  // BatchNorm*d become synchronized
  return network;
}

/// Whether all ranks have the same bits in it.
bool same_on_all(const torch::Tensor& tensor, const Group& group) {
  std::vector<torch::Tensor> own{tensor};
  std::vector<std::vector<torch::Tensor>> all{
      {torch::empty_like(tensor), torch::empty_like(tensor)}};
  group->allgather(all, own)->wait();
  return torch::equal(all[0][0], all[0][1]);
}

Group new_group(const std::string& file, int rank) {
  const auto store = c10::make_intrusive<c10d::FileStore>(file, kRanks);
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  const auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, kRanks, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, kRanks);
  group->setBackend(torch::kCPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  return group;
}

int train(int rank, int steps, const std::string& file) {
  torch::set_num_threads(1);
  const Group group = new_group(file, rank);
  torch::manual_seed(0);  // the same weights on all ranks
  torch::nn::Sequential network = new_network(group);
  torch::optim::Adam optimizer(network->parameters(), torch::optim::AdamOptions(5e-3));
  const torch::Tensor weight = torch::ones({kClasses}).index_put_({0}, 0.25);
  const int tenth = steps / 10;
  double first = 0, last = 0;  // losses of the first and the last tenth of the steps
  for (int step = 0; step < steps; ++step) {
    torch::manual_seed(static_cast<std::uint64_t>(1 + step * kRanks + rank));
    std::vector<torch::Tensor> pictures, classes;
    for (int i = 0; i < 2; ++i) {
      auto [picture, truth] = new_picture();
      pictures.push_back(picture);
      classes.push_back(truth);
    }
    const torch::Tensor scores = torch::upsample_bilinear2d(
        network->forward(torch::stack(pictures)), {kSide, kSide}, /*align_corners=*/false);
    torch::Tensor loss =
        torch::cross_entropy_loss(scores, torch::stack(classes), weight, at::Reduction::Sum);
    loss = loss / static_cast<double>(2 * kSide * kSide);
    optimizer.zero_grad();
    loss.backward();
    syncbn::torch::average_gradients(network->parameters(), group);
    optimizer.step();
    std::vector<torch::Tensor> sum{loss.detach()};
    group->allreduce(sum)->wait();
    const double shown = sum[0].item<double>() / kRanks;
    if (step < tenth) {
      first += shown / static_cast<double>(tenth);
    } else if (step >= steps - tenth) {
      last += shown / static_cast<double>(tenth);
    }
  }
  bool same = true;
  for (const torch::Tensor& buffer : network->buffers()) {
    same = same_on_all(buffer, group) && same;
  }
  std::printf("rank %d of %d: loss %.4f -> %.4f; running statistics %s\n", rank, kRanks, first,
              last, same ? "equal on all ranks" : "DIFFER");
  std::fflush(stdout);
  return same && last < 0.5 * first ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  const int steps = count > 1 ? std::stoi(arguments[1]) : 200;
  char folder[] = "/tmp/syncbn_train_XXXXXX";
  if (mkdtemp(folder) == nullptr) {
    return 1;
  }
  const std::string file = std::string(folder) + "/store";
  for (int rank = 0; rank < kRanks; ++rank) {
    if (fork() == 0) {
      return train(rank, steps, file);
    }
  }
  int failed = 0;
  for (int rank = 0, status = 0; rank < kRanks; ++rank) {
    wait(&status);
    failed += status != 0;
  }
  std::remove(file.c_str());
  std::remove(folder);
  return failed;
}
