// SPDX-License-Identifier: Apache-2.0
// Ranks of MPI share statistics: the bits are those of one rank. mpiexec -n 2 example_15_mpi
#include <mpi.h>

#include <cstdio>
#include <cstring>
#include <syncbn/batch_norm.hpp>
#include <syncbn/mpi.hpp>
#include <vector>

namespace {

constexpr std::int64_t kSamples = 100;
constexpr std::int64_t kChannels = 4;

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

/// 0 if this rank's part of y has the bits that one rank computes.
int run() {
  std::vector<float> x(kSamples * kChannels);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * i % 97) * 0.37f;
  }
  syncbn::Communicator& alone = syncbn::self_communicator();
  const std::vector<float> expected = normalize(x, 0, kSamples, alone);

  syncbn::MpiCommunicator group(MPI_COMM_WORLD);
  const std::int64_t first = kSamples * group.rank() / group.size();
  const std::int64_t last = kSamples * (group.rank() + 1) / group.size();
  const std::vector<float> y = normalize(x, first, last, group);
  const bool same =
      std::memcmp(y.data(), expected.data() + first * kChannels, y.size() * sizeof(float)) == 0;
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
