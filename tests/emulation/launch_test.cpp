// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/error.hpp"

// How kernels are launched: loaded before an exchange, with wide accesses where they fit, and
// what is said of a launch that fails.
namespace syncbn {
namespace {

class Settings {
 public:
  explicit Settings(const emulation::Settings& settings) { emulation::settings() = settings; }
  ~Settings() { emulation::settings() = {}; }
};

/// The passes of a training step, each of which can be called alone. Zeros everywhere: how they
/// compute is tested elsewhere.
struct Step {
  DType dtype;
  std::int64_t channels;
  Tensor x, dy, y, dx;
  Words message, workspace, info = Words(kInfoWords, 0);
  Doubles mean, var, rstd, coefficients;

  Step(DType type, const std::vector<std::int64_t>& sizes, Memory memory)
      : dtype(type),
        channels(sizes[1]),
        x(type, sizes, memory),
        dy(x),
        y(x),
        dx(x),
        message(size(message_words(type, channels)) + 1),
        workspace(size(cuda::workspace_words(type, channels)), 0),
        mean(size(channels)),
        var(mean),
        rstd(mean),
        coefficients(size(3 * channels)) {
    const Doubles zeros(size(x.numel()));
    x.fill(zeros);
    dy.fill(zeros);
  }
  void moments() {
    cuda::local_moments(on_cuda(x.view()), {}, {}, message.data(), workspace.data(), {});
  }
  void welford() { cuda::local_welford(on_cuda(x.view()), {}, {}, message.data(), {}); }
  void merge() {
    cuda::merge_welford(message.data(), dtype, 1, mean.data(), var.data(), rstd.data(), info.data(),
                        channels, 1e-5, {});
  }
  void gradients() {
    cuda::local_gradients({on_cuda(dy.view()), on_cuda(x.view()), {}, mean.data(), rstd.data()},
                          info.data(), message.data(), workspace.data(), {});
  }
  void after_forward() {
    cuda::finalize_moments(message.data(), dtype, 1, mean.data(), var.data(), rstd.data(),
                           info.data(), channels, 1e-5, {}, {});
    cuda::normalize(
        {on_cuda(x.view()), {}, mean.data(), rstd.data(), {}, {}, {}, on_cuda(y.view())}, {});
    cuda::update_running_statistics({{}, {}, nullptr, info.data(), nullptr, 0.1}, mean.data(),
                                    var.data(), info.data(), channels, {});
  }
  void evaluation() {
    const TensorView running = on_cuda(TensorView(var.data(), DType::kFloat64, {channels}));
    cuda::evaluation_statistics(running, running, mean.data(), rstd.data(), 1e-5, {});
    cuda::evaluation_input_gradient(on_cuda(dy.view()), {}, rstd.data(), {}, on_cuda(dx.view()),
                                    {});
    cuda::recover_input(
        {on_cuda(y.view()), mean.data(), rstd.data(), {}, {}, on_cuda(y.view()), nullptr, 0.5}, {});
  }
  void train() {
    moments();
    after_forward();
    gradients();
    after_backward();
  }
  void after_backward() {
    cuda::finalize_gradients(message.data(), dtype, 1, nullptr, info.data(),
                             {mean.data(), rstd.data(), {}, coefficients.data(), {}, {}, channels},
                             {});
    cuda::input_gradient({on_cuda(dy.view()),
                          on_cuda(x.view()),
                          {},
                          mean.data(),
                          rstd.data(),
                          coefficients.data(),
                          {},
                          on_cuda(dx.view())},
                         {});
  }
};

/// A kernel that is loaded while an exchange waits for another rank may wait for it too.
/// torch.nn.SyncBatchNorm loads its kernels as it comes to them.
TEST(CudaLaunch, StreamsHaveWorkspacesThatPassesLeaveZero) {
  const auto stream = [](std::intptr_t handle) {
    return cuda::Stream{reinterpret_cast<void*>(handle)};
  };
  std::int64_t* const of_one = stream_workspace(DType::kFloat32, 6, stream(512).handle);
  ASSERT_NE(of_one, nullptr);
  EXPECT_EQ(stream_workspace(DType::kFloat32, 5, stream(512).handle), of_one);
  EXPECT_NE(stream_workspace(DType::kFloat32, 6, stream(1024).handle), of_one);
  constexpr std::intptr_t kCaptured = -1;
  EXPECT_EQ(stream_workspace(DType::kFloat32, 6, stream(kCaptured).handle), nullptr);
  for (const DType dtype : kDtypes) {
    Step step(dtype, {3, 41, 5}, Memory::kPlanes);
    step.x.fill(Doubles(3 * 41 * 5, 1.5));
    std::int64_t* const words = stream_workspace(dtype, step.channels, stream(512).handle);
    const std::span all(words, size(cuda::workspace_words(dtype, step.channels)));
    EXPECT_EQ(Words(all.begin(), all.end()), Words(all.size())) << "before";
    Words messages[2];
    for (Words& message : messages) {
      message.resize(size(message_words(dtype, step.channels)));
      cuda::local_moments(on_cuda(step.x.view()), {}, {}, message.data(), words, stream(512));
      EXPECT_EQ(Words(all.begin(), all.end()), Words(all.size())) << "after";
    }
    EXPECT_EQ(messages[0], messages[1]);
  }
}

TEST(CudaLaunch, FirstPassLoadsAllKernels) {
  int device = 100;
  for (const DType dtype : kDtypes) {
    std::uint64_t loads_of_a_device = 0;
    for (const auto& first : {&Step::gradients, &Step::welford, &Step::moments}) {
      emulation::settings() = {.resident = 0, .device = ++device};
      const std::uint64_t before = emulation::counts().loads;
      (Step(dtype, {1, 1}, Memory::kPlanes).*first)();
      const std::uint64_t loads = emulation::counts().loads - before;
      EXPECT_GT(loads, 0u);
      EXPECT_TRUE(loads_of_a_device == 0 || loads_of_a_device == loads) << "the same, whoever";
      loads_of_a_device = loads;
    }
    const emulation::Counts before = emulation::counts();
    for (const Memory memory : kMemories) {
      for (const std::int64_t channels : {3, 16}) {
        for (const std::int64_t plane : {0, 1, 3, 16}) {
          Step step(dtype, {1, channels, plane, 1}, memory);
          step.train();
          step.evaluation();
          step.welford();
          step.merge();
        }
      }
    }
    EXPECT_EQ(emulation::counts().launches_of_unloaded, before.launches_of_unloaded) << name(dtype);
    EXPECT_EQ(emulation::counts().loads, before.loads) << "once for a device and dtype";
  }
  emulation::settings() = {};
}

/// The emulator refuses blocks of over 1024 threads, or with over 48 KB of shared memory.
TEST(CudaLaunch, BlocksFitTheDevice) {
  const Settings settings({.multiprocessors = 1, .resident = 0});
  for (const DType dtype : kDtypes) {
    for (const Memory memory : {Memory::kPlanes, Memory::kRows}) {
      for (const std::int64_t plane : {16, 17, 181}) {
        Step step(dtype, {plane == 16 ? 8 : 1, 2048, plane}, memory);
        EXPECT_NO_THROW(step.train()) << name(dtype) << plane;
      }
    }
  }
}

TEST(CudaLaunch, FailureTellsWhoseItIs) {
  Step step(DType::kFloat32, {2, 3, 4}, Memory::kPlanes);
  step.moments();  // kernels are loaded
  {
    const Settings settings({.launch_failure = {"out of resources", false}});
    const std::string text = thrown_text<Unavailable>([&] { step.moments(); });
    EXPECT_TRUE(contains(text, "CUDA: starting the sums of planes ("));
    EXPECT_TRUE(contains(text, "blocks of 64 threads) failed: out of resources"));
  }
  {
    const Settings settings({.launch_failure = {"an illegal address", true}});
    const std::string text = thrown_text<Error>([&] { step.moments(); });
    EXPECT_TRUE(
        contains(text, "CUDA: work that was enqueued earlier failed: an illegal address ("));
    EXPECT_TRUE(contains(text, "reported when starting the sums of planes ("));
    EXPECT_TRUE(contains(text, "; with CUDA_LAUNCH_BLOCKING=1 the call that enqueued it"));
  }
  const Settings settings({.device = 99, .load_failure = {"no kernel image", false}});
  const Words before = step.message;
  EXPECT_TRUE(contains(thrown_text<Unavailable>([&] { step.moments(); }),
                       "CUDA: loading a kernel failed: no kernel image"));
  EXPECT_EQ(step.message, before);
}

}  // namespace
}  // namespace syncbn
