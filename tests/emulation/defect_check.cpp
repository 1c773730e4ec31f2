// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/executor.hpp"

// Runs the moments' kernels, with or without a defect (argument "defect" or "none"), over shapes
// that take each kernel. Exits with 0 if a defect was noticed where there is one, and only there.
namespace syncbn {
namespace {

/// How the kernels gave themselves away; empty if they did not.
std::string noticed(const testing::Tensor& x, std::int64_t channels, std::uint64_t seed) {
  const DType dtype = x.view().dtype;
  std::vector<std::int64_t> expected(static_cast<std::size_t>(message_words(dtype, channels)));
  local_moments(x.view(), {}, expected.data(),
                fingerprint(0, 0, Direction::kForward, channels, 0.0), serial_executor());
  std::vector<std::int64_t> words(expected.size(), -1);
  std::vector<std::int64_t> workspace(
      static_cast<std::size_t>(cuda::workspace_words(dtype, channels)), 0);
  const std::vector<std::int64_t> clean = workspace;
  TensorView on_cuda = x.view();
  on_cuda.device = Device::kCuda;
  emulation::settings() = {.seed = seed, .multiprocessors = 3, .resident = 12};
  try {
    cuda::local_moments(on_cuda, {}, {}, words.data(), workspace.data(), {});
  } catch (const emulation::KernelError& error) {
    return error.what();
  }
  return words != expected    ? "other words than the reference's"
         : workspace != clean ? "scratch memory that is not left clean"
                              : "";
}

int check(bool defect) {
  testing::Random random(5);
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    for (const auto memory : {testing::Memory::kPlanes, testing::Memory::kRows}) {
      for (const std::int64_t plane : {1, 30, 1100}) {
        for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
          const std::int64_t channels = 8;
          testing::Tensor x(dtype, {9, channels, plane}, memory);
          x.fill(testing::rough_values(random, dtype, 9, channels * plane));
          const std::string how = noticed(x, channels, seed);
          if (!how.empty()) {
            std::printf("seed %d, %s, planes of %d: %s\n", static_cast<int>(seed), name(dtype),
                        static_cast<int>(plane), how.c_str());
            return defect ? 0 : 1;
          }
        }
      }
    }
  }
  std::printf("nothing was noticed\n");
  return defect ? 1 : 0;
}

}  // namespace
}  // namespace syncbn

int main(int argc, char** argv) {
  return syncbn::check(argc > 1 && std::strcmp(argv[1], "defect") == 0);
}
