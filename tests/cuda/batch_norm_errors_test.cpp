#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "device.hpp"
#include "groups.hpp"
#include "syncbn/cuda_batch_norm.hpp"
#include "syncbn/error.hpp"

// What a layer on CUDA makes of arguments that it refuses, and of ranks that disagree.
namespace syncbn {
namespace {

using testing::contains;
using testing::device_communicator;
using testing::DeviceArray;
using testing::DeviceTensor;
using testing::DeviceTurn;
using testing::expect_no_errors;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;
using testing::text_of;
using testing::thrown_text;
using Doubles = std::vector<double>;

void expect_refused(const BatchNormOptions& wrong, const std::string& text) {
  ThreadGroup group(2);
  const auto errors = run_ranks(2, [&](int r) {
    const DeviceTurn turn;
    DeviceTensor x(Tensor(DType::kFloat32, {2, 3}, Doubles(6, 1.0)));
    DeviceTensor y(Tensor(DType::kFloat32, {2, 3}, Doubles(6, 5.0)));
    DeviceTensor running(Tensor(DType::kFloat32, {3}, Doubles(3, 2.0)));
    const DeviceArray<double> values(9);
    const DeviceArray<std::int64_t> info(cuda::kInfoWords);
    const DeviceArray<std::int64_t> workspace(cuda::batch_norm_workspace_words(DType::kFloat32, 3));
    const BatchNormOptions options = r == 1 ? wrong : BatchNormOptions{.layer = 1};
    const auto check = [&] {
      EXPECT_EQ(y.fetch().values(), Doubles(6, 5.0));
      EXPECT_EQ(running.fetch().values(), Doubles(3, 2.0));
    };
    const auto communicator = device_communicator(group.rank(r));
    try {
      cuda::batch_norm_forward(
          x.view(), {}, {}, {}, {}, y.view(), {running.view(), running.view(), nullptr, nullptr},
          {values.data(), values.data() + 3, values.data() + 6, info.data(), nullptr}, options,
          *communicator, workspace.data(), {});
    } catch (...) {
      check();
      throw;
    }
  });
  EXPECT_TRUE(contains(text_of<InvalidArgument>(errors[1]), text));
  EXPECT_TRUE(contains(text_of<PeerLost>(errors[0]), "rank 1 left the group: " + text));
}

TEST(CudaBatchNorm, RefusedArgumentsReachEveryRankAndChangeNothing) {
  SYNCBN_NEEDS_DEVICE();
  expect_refused({.eps = -1, .layer = 1}, "eps: got -1");
  expect_refused({}, "options.layer: got 0, expected this layer's own number");
}

TEST(CudaBatchNorm, WrongArgumentsAreNamed) {
  SYNCBN_NEEDS_DEVICE();
  DeviceTensor x(Tensor(DType::kFloat32, {2, 3}, Doubles(6, 1.0)));
  const DeviceArray<double> values(9);
  const DeviceArray<std::int64_t> info(cuda::kInfoWords);
  const DeviceArray<std::int64_t> workspace(cuda::batch_norm_workspace_words(DType::kFloat32, 3));
  const cuda::BatchStatistics good{values.data(), values.data() + 3, values.data() + 6,
                                   info.data()};
  const auto forward = [&](const TensorView& in, const TensorView& residual,
                           const cuda::BatchStatistics& statistics, const BatchNormOptions& options,
                           std::int64_t* memory) {
    ThreadGroup group(1);
    return thrown_text<InvalidArgument>([&] {
      const DeviceTurn turn;
      MutableTensorView out = x.view();
      out.device = in.device;
      cuda::batch_norm_forward(in, {}, {}, {}, residual, out, {}, statistics, options,
                               *device_communicator(group.rank(0)), memory, {});
    });
  };
  TensorView on_cpu = x.view();
  on_cpu.device = Device::kCpu;
  EXPECT_TRUE(contains(forward(on_cpu, {}, good, {}, workspace.data()),
                       "x: got a tensor on CPU, expected one on CUDA"));
  EXPECT_TRUE(contains(forward(x.view(), {}, good, {}, nullptr),
                       "workspace: got null, expected the words of batch_norm_workspace_words"));
  EXPECT_TRUE(contains(forward(x.view(), {}, {}, {}, workspace.data()),
                       "statistics.mean: got null, expected C entries"));
  BatchNormOptions options;
  options.call = 3;
  EXPECT_TRUE(contains(forward(x.view(), {}, good, options, workspace.data()),
                       "options.call: got 3, expected 0"));
  options = {};
  options.activation.kind = ActivationKind::kRelu;
  EXPECT_TRUE(contains(forward(x.view(), x.view(), good, options, workspace.data()),
                       "statistics.activation_mask: got null"));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([] {
                         cuda::batch_norm_workspace_words(DType::kFloat32, 3, Statistics::kWelford,
                                                          0);
                       }),
                       "ranks: got 0, expected 1 to 2048"));
}

/// Two layers meet: an error on the host would need to wait for the device.
TEST(CudaBatchNorm, DisagreementGivesNaNAndKeepsRunningStatistics) {
  SYNCBN_NEEDS_DEVICE();
  ThreadGroup group(2);
  expect_no_errors(run_ranks(2, [&](int r) {
    const DeviceTurn turn;
    DeviceTensor x(Tensor(DType::kFloat32, {2, 3}, Doubles{1, 2, 3, 4, 5, 6}));
    DeviceTensor y(Tensor(DType::kFloat32, {2, 3}));
    DeviceTensor dx(Tensor(DType::kFloat32, {2, 3}));
    DeviceTensor running(Tensor(DType::kFloat32, {3}, Doubles(3, 2.0)));
    const DeviceArray<double> values(9);
    const DeviceArray<std::int64_t> info(cuda::kInfoWords);
    const DeviceArray<std::int64_t> workspace(cuda::batch_norm_workspace_words(DType::kFloat32, 3));
    const cuda::BatchStatistics statistics{values.data(), values.data() + 3, values.data() + 6,
                                           info.data()};
    BatchNormOptions options;
    options.layer = static_cast<std::uint64_t>(1 + r);
    const auto communicator = device_communicator(group.rank(r));
    cuda::batch_norm_forward(x.view(), {}, {}, {}, {}, y.view(),
                             {running.view(), running.view(), nullptr, nullptr}, statistics,
                             options, *communicator, workspace.data(), {});
    cuda::batch_norm_backward(x.view(), x.view(), {}, {}, {}, statistics, dx.view(), {}, {}, {}, {},
                              AffineGradients::kShare, *communicator, workspace.data(), {});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(same_bits(y.fetch().values(), Doubles(6, nan)));
    EXPECT_TRUE(same_bits(dx.fetch().values(), Doubles(6, nan)));
    EXPECT_EQ(running.fetch().values(), Doubles(3, 2.0));
    EXPECT_EQ(info.values()[0], -1);
  }));
}

}  // namespace
}  // namespace syncbn
