// SPDX-License-Identifier: Apache-2.0
// Ranks of MPI share statistics: the bits are those of one rank. Then they train, and go on after
// an error. mpiexec -n 2 example_15_mpi
#include <mpi.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <syncbn/batch_norm.hpp>
#include <syncbn/mpi.hpp>
#include <vector>

namespace {

constexpr std::int64_t kSamples = 100;
constexpr std::int64_t kChannels = 4;
constexpr int kSteps = 5;
constexpr int kMostErrors = 3;

std::vector<float> normalize(const std::vector<float>& x, std::int64_t first, std::int64_t last,
                             syncbn::Communicator& communicator) {
  const std::vector<std::int64_t> shape = {last - first, kChannels};
  std::vector<float> y(static_cast<std::size_t>((last - first) * kChannels));
  syncbn::BatchNorm layer({.channels = kChannels, .name = "stem.bn"}, communicator);
  syncbn::Saved saved;  // what a backward would be given
  layer.forward({.x = {x.data() + first * kChannels, syncbn::DType::kFloat32, shape},
                 .y = {y.data(), syncbn::DType::kFloat32, shape}},
                saved);
  return y;
}

/// All that a training changes. The state of an optimizer belongs here, too. It has no pointers, so
/// that MPI can send its bytes.
struct State {
  int step = 0;
  std::array<float, kChannels> weight = {1, 1, 1, 1}, bias = {};
  std::array<float, kChannels> running_mean = {}, running_var = {1, 1, 1, 1};
};

/// A rank's samples, and whether it cannot read them once, in step 2.
struct Part {
  std::int64_t first, last;
  bool fails = false;
};

/// Trains weight and bias for the loss sum(y * y) / 2, whose gradient by y is y.
void train_step(syncbn::BatchNorm& layer, Part& part, State& state) {
  if (part.fails && state.step == 2) {
    part.fails = false;
    throw std::runtime_error("the samples cannot be read");
  }
  const syncbn::Extents shape = {part.last - part.first, kChannels};
  std::vector<float> x(static_cast<std::size_t>(shape[0] * shape[1])), y(x.size()), dx(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto number = static_cast<std::size_t>(part.first * kChannels + state.step) + i;
    x[i] = static_cast<float>(number * number % 97) * 0.37f;
  }
  syncbn::Saved saved;
  layer.forward({.x = {x, shape},
                 .weight = {state.weight, {kChannels}},
                 .bias = {state.bias, {kChannels}},
                 .y = {y, shape},
                 .running_mean = {state.running_mean, {kChannels}},
                 .running_var = {state.running_var, {kChannels}}},
                saved);
  std::array<float, kChannels> dweight, dbias;
  layer.backward({.dy = {y, shape},
                  .x = {x, shape},
                  .weight = {state.weight, {kChannels}},
                  .bias = {state.bias, {kChannels}},
                  .dx = {dx, shape},
                  .dweight = {dweight, {kChannels}},
                  .dbias = {dbias, {kChannels}},
                  .affine = syncbn::AffineGradients::kGlobal},  // sums over all ranks
                 saved);
  for (std::size_t c = 0; c < kChannels; ++c) {
    state.weight[c] -= 1e-3f * dweight[c];
    state.bias[c] -= 1e-3f * dbias[c];
  }
  ++state.step;
}

State train_on(syncbn::MpiCommunicator& group, Part part) {
  syncbn::BatchNorm layer({.channels = kChannels, .name = "head.bn"}, group);
  State state;  // the step, parameters and running statistics: the same on all ranks
  for (int errors = 0; state.step < kSteps;) {
    State next = state;
    int good = 1, all_good = 0;
    try {
      train_step(layer, part, next);  // forward, backward, ++next.step; no MPI call of your own
    } catch (const std::exception& error) {
      group.abandon(error.what());  // the others get PeerLost
      good = 0;
    }
    MPI_Allreduce(&good, &all_good, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (all_good == 0) {
      if (++errors > kMostErrors) {
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
      group.reset();  // on every rank; layers begin at call 0
      MPI_Bcast(&state, sizeof(state), MPI_BYTE, 0, MPI_COMM_WORLD);  // all go on with rank 0's
      continue;
    }
    state = next;
  }
  return state;
}

/// 0 if the ranks have the bits that one rank computes.
int run() {
  std::vector<float> x(kSamples * kChannels);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * i % 97) * 0.37f;
  }
  syncbn::Communicator& alone = syncbn::self_communicator();
  const std::vector<float> expected = normalize(x, 0, kSamples, alone);

  syncbn::MpiCommunicator group(MPI_COMM_WORLD, std::chrono::minutes(1));  // the time limit
  const std::int64_t first = kSamples * group.rank() / group.size();
  const std::int64_t last = kSamples * (group.rank() + 1) / group.size();
  const std::vector<float> y = normalize(x, first, last, group);
  State state_of_one;
  syncbn::BatchNorm layer({.channels = kChannels, .name = "head.bn"}, alone);
  Part whole = {0, kSamples};
  while (state_of_one.step < kSteps) {
    train_step(layer, whole, state_of_one);
  }
  const State state = train_on(group, {first, last, group.rank() == group.size() - 1});
  const bool same =
      std::memcmp(y.data(), expected.data() + first * kChannels, y.size() * sizeof(float)) == 0 &&
      state.running_mean == state_of_one.running_mean &&
      state.running_var == state_of_one.running_var;
  std::printf("rank %d of %d and 1 rank: %s\n", group.rank(), group.size(),
              same ? "the same bits" : "different bits");
  return same ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int result = run();  // the group ends before MPI does
  MPI_Finalize();
  return result;
}
