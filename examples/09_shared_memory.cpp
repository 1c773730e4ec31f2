// SPDX-License-Identifier: Apache-2.0
// Two processes share statistics through shared memory: the bits are those of one rank.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <span>
#include <syncbn/batch_norm.hpp>
#include <syncbn/shared_memory.hpp>
#include <vector>

namespace {

constexpr std::int64_t kSamples = 100;
constexpr std::int64_t kChannels = 4;
constexpr std::int64_t kBounds[] = {0, 30, kSamples};  // which samples a rank has

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

/// A pipe in each direction between the ranks. A program with a launcher uses what that brings:
/// MPI, a key-value store.
struct Pipes {
  int to[2][2];  ///< to[r]: read by rank r
};

/// Both ranks' bytes, in rank order.
void gather(int rank, std::span<const std::byte> mine, std::span<std::byte> all,
            const Pipes& pipes) {
  const std::size_t bytes = mine.size();
  std::byte* other = all.data() + static_cast<std::size_t>(1 - rank) * bytes;
  std::memcpy(all.data() + static_cast<std::size_t>(rank) * bytes, mine.data(), bytes);
  if (write(pipes.to[1 - rank][1], mine.data(), bytes) != static_cast<ssize_t>(bytes) ||
      read(pipes.to[rank][0], other, bytes) != static_cast<ssize_t>(bytes)) {
    std::perror("pipe");
    _exit(1);
  }
}

/// This rank's part of y; empty if the ranks cannot share memory.
std::vector<float> run(int rank, const std::vector<float>& x, const Pipes& pipes) {
  const auto opened = syncbn::SharedMemoryGroup::create(
      rank, 2, [&](std::span<const std::byte> mine, std::span<std::byte> all) {
        gather(rank, mine, all, pipes);
      });
  if (opened.group == nullptr) {  // on the other rank neither
    std::printf("rank %d has no shared memory: %s\n", rank, opened.why.c_str());
    return {};
  }
  return normalize(x, kBounds[rank], kBounds[rank + 1], *opened.group);
}

}  // namespace

int main() {
  std::vector<float> x(kSamples * kChannels);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * i % 97) * 0.37f;
  }
  syncbn::Communicator& alone = syncbn::self_communicator();
  const std::vector<float> expected = normalize(x, 0, kSamples, alone);

  Pipes pipes;
  if (pipe(pipes.to[0]) != 0 || pipe(pipes.to[1]) != 0) {
    std::perror("pipe");
    return 1;
  }
  const pid_t child = fork();
  const int rank = child == 0 ? 1 : 0;
  const std::vector<float> y = run(rank, x, pipes);
  const float* of_one = expected.data() + kBounds[rank] * kChannels;
  const auto count = static_cast<std::size_t>((kBounds[rank + 1] - kBounds[rank]) * kChannels);
  const bool same = y.size() == count && std::memcmp(y.data(), of_one, count * sizeof(float)) == 0;
  std::printf("rank %d of 2 and 1 rank: %s\n", rank, same ? "the same bits" : "different bits");
  int others = 0;
  if (rank == 0) {
    waitpid(child, &others, 0);
  }
  return same && others == 0 ? 0 : 1;
}
