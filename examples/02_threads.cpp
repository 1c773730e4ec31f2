// SPDX-License-Identifier: Apache-2.0
// Three ranks as threads share statistics, whatever each brings: the bits are those of one rank.
#include <cstdio>
#include <cstring>
#include <syncbn/batch_norm.hpp>
#include <vector>

namespace {

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

}  // namespace

int main() {
  std::vector<float> x(100 * kChannels);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * i % 97) * 0.37f;
  }
  syncbn::Communicator& alone = syncbn::self_communicator();
  const std::vector<float> expected = normalize(x, 0, 100, alone);

  syncbn::ThreadGroup group(3);
  const std::int64_t bounds[] = {0, 10, 10, 100};  // rank 1 has no samples
  std::vector<std::vector<float>> parts(3);
  syncbn::run(group, [&](syncbn::Communicator& end) {  // on a thread for each rank
    const auto r = static_cast<std::size_t>(end.rank());
    parts[r] = normalize(x, bounds[r], bounds[r + 1], end);  // its layer is {options, end}
  });
  std::vector<float> y;
  for (const std::vector<float>& part : parts) {
    y.insert(y.end(), part.begin(), part.end());
  }
  const bool same = std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) == 0;
  std::printf("3 ranks and 1 rank: %s\n", same ? "the same bits" : "different bits");
  return same ? 0 : 1;
}
