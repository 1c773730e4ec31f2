// SPDX-License-Identifier: Apache-2.0
// Ranks of MPI train batch norm and a weighted sum of its channels, on threads of OpenMP.
// mpiexec -n 2 example_18_training_mpi
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <span>
#include <syncbn/batch_norm.hpp>
#include <syncbn/mpi.hpp>
#include <vector>

constexpr int kThreads = 2;

class OpenMp final : public syncbn::Executor {
 public:
  int concurrency() const override { return kThreads; }
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const Body& body) override {
    const std::int64_t step = std::max(grain, (end - begin + kThreads - 1) / kThreads);
#pragma omp parallel for num_threads(kThreads)
    for (std::int64_t i = begin; i < end; i += step) {
      body(i, std::min(i + step, end));
    }
  }
};

constexpr std::size_t kChannels = 4;

void train() {
  syncbn::MpiCommunicator group(MPI_COMM_WORLD, std::chrono::minutes(1));  // the time limit
  syncbn::BatchNorm layer({.channels = kChannels, .name = "bn"}, group);
  syncbn::Saved saved;
  OpenMp threads;
  const syncbn::Extents shape = {10 + 20 * group.rank(), kChannels};  // samples of this rank
  std::vector<float> x(static_cast<std::size_t>(shape[0]) * kChannels);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t number = x.size() + i;
    x[i] = static_cast<float>(number * number % 97);
  }
  std::vector<float> y(x.size()), dy(x.size()), dx(x.size());
  std::vector<float> parameters = {1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0};
  const auto part = [](std::vector<float>& all, std::size_t i) {  // weight, bias, head
    return std::span(all).subspan(i * kChannels, kChannels);
  };
  for (int step = 0; step <= 100; ++step) {
    layer.forward({.x = {x, shape},
                   .weight = {part(parameters, 0), {kChannels}},
                   .bias = {part(parameters, 1), {kChannels}},
                   .y = {y, shape}},
                  saved, threads);
    std::vector<float> gradients(parameters.size() + 1);  // and the loss
    const auto head = part(parameters, 2), dhead = part(gradients, 2);
    for (std::size_t i = 0; i < x.size(); i += kChannels) {
      float error = x[i + 1] / 97 - x[i] / 97;  // the head learns this difference
      for (std::size_t c = 0; c < kChannels; ++c) {
        error += head[c] * y[i + c];
      }
      for (std::size_t c = 0; c < kChannels; ++c) {
        dhead[c] += error * y[i + c];
        dy[i + c] = error * head[c];
      }
      gradients.back() += error * error / 2;
    }
    layer.backward({.dy = {dy, shape},
                    .x = {x, shape},
                    .weight = {part(parameters, 0), {kChannels}},
                    .bias = {part(parameters, 1), {kChannels}},
                    .dx = {dx, shape},
                    .dweight = {part(gradients, 0), {kChannels}},
                    .dbias = {part(gradients, 1), {kChannels}}},
                   saved, threads);
    // The gradients, and the loss, of all ranks' samples.
    MPI_Allreduce(MPI_IN_PLACE, gradients.data(), static_cast<int>(gradients.size()), MPI_FLOAT,
                  MPI_SUM, MPI_COMM_WORLD);
    const float samples = static_cast<float>(saved.count());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i] -= 0.02f * gradients[i] / samples;
    }
    if (group.rank() == 0 && step % 50 == 0) {
      std::printf("step %3d: loss %.4f over %g samples\n", step, gradients.back() / samples,
                  samples);
    }
  }
}

int main(int argc, char** argv) {
  int level = 0;  // of threads: only this one calls MPI
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  train();  // the group ends before MPI does
  MPI_Finalize();
}
