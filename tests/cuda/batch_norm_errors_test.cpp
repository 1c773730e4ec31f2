// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "device.hpp"
#include "groups.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/error.hpp"

// What a layer on CUDA makes of arguments that it refuses, and of ranks that disagree.
namespace syncbn::testing {
namespace {

using Doubles = std::vector<double>;

/// Tensors of a rank on the device.
struct OnDevice {
  DeviceTensor x{Tensor(DType::kFloat32, {2, 3}, Doubles{1, 2, 3, 4, 5, 6})};
  DeviceTensor y{Tensor(DType::kFloat32, {2, 3}, Doubles(6, 5.0))};
  DeviceTensor dx{Tensor(DType::kFloat32, {2, 3})};
  DeviceTensor running{Tensor(DType::kFloat32, {3}, Doubles(3, 2.0))};
  DeviceTensor var{Tensor(DType::kFloat32, {3}, Doubles(3, 2.0))};

  BatchNorm::Forward forward() {
    return {
        .x = x.view(), .y = y.view(), .running_mean = running.view(), .running_var = var.view()};
  }
};

const BatchNorm::Options kOptions{.channels = 3, .name = "layer"};

TEST(CudaBatchNorm, RefusalsReachEveryRankAndChangeNothing) {
  SYNCBN_NEEDS_DEVICE();
  for (const bool argument : {true, false}) {  // or an option
    ThreadGroup group(2);
    const auto errors = run_ranks(2, [&](int r) {
      const DeviceTurn turn;
      OnDevice t;
      const auto communicator = device_communicator(group.rank(r));
      Saved saved;
      try {
        BatchNorm layer(r == 1 && !argument ? BatchNorm::Options{.channels = 3} : kOptions,
                        *communicator);
        BatchNorm::Forward forward = t.forward();
        forward.y = r == 1 ? t.running.view() : forward.y;
        layer.forward(forward, saved);
      } catch (...) {
        EXPECT_EQ(t.y.fetch().values(), Doubles(6, 5.0));
        EXPECT_EQ(t.running.fetch().values(), Doubles(3, 2.0));
        EXPECT_TRUE(saved.mean().empty());
        throw;
      }
    });
    const std::string text = argument ? "layer, call 0, forward, 3 channels, float32: y: got"
                                      : "options.name: got none, expected this layer's own name";
    EXPECT_TRUE(contains(text_of<InvalidArgument>(errors[1]), text));
    EXPECT_TRUE(contains(text_of<PeerLost>(errors[0]), "rank 1 refused its call: " + text));
  }
}

TEST(CudaBatchNorm, TensorsOfTheOtherDeviceAreNamed) {
  SYNCBN_NEEDS_DEVICE();
  const DeviceTurn turn;
  OnDevice t;
  Tensor x(DType::kFloat32, {2, 3}, Doubles(6, 1.0));
  const BatchNorm::Forward on_cpu{.x = x.view(), .y = x.view()};
  Saved saved;
  ThreadGroup group(1), pair(2);
  const auto communicator = device_communicator(group.rank(0));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] {
                         BatchNorm layer(kOptions, *communicator);
                         layer.forward(on_cpu, saved);
                       }),
                       "x: got a tensor on the CPU, expected one on CUDA"));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] {
                         BatchNorm layer(kOptions, pair.rank(0));
                         layer.forward(t.forward(), saved);
                       }),
                       "x: got a tensor on CUDA, expected one on the CPU"));
}

/// A layer of one rank goes where its tensors are.
TEST(CudaBatchNorm, OneRankOnEitherDeviceExact) {
  SYNCBN_NEEDS_DEVICE();
  const DeviceTurn turn;
  OnDevice t;
  Tensor x(DType::kFloat32, {2, 3}, Doubles{1, 2, 3, 4, 5, 6}), y = x;
  BatchNorm layer({.channels = 3});
  Saved saved;
  layer.forward({.x = x.view(), .y = y.view()}, saved);
  EXPECT_EQ(saved.count(), 2);
  layer.forward(t.forward(), saved);
  EXPECT_EQ(saved.count(), 2);
  EXPECT_TRUE(same_bits(t.y.fetch().values(), y.values()));
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] {
                         layer.backward({.dy = x.view(), .x = x.view(), .dx = y.view()}, saved);
                       }),
                       "saved: got"));
}

/// The scratch memory of one type is no other's.
TEST(CudaBatchNorm, TypesInTurnExact) {
  SYNCBN_NEEDS_DEVICE();
  const DeviceTurn turn;
  Random random(3);
  BatchNorm layer({.channels = 5});
  Saved saved;
  for (const int at : {3, 0, 2, 1, 3, 2, 0}) {
    const DType dtype = kDtypes[at];
    SCOPED_TRACE(name(dtype));
    Tensor x(dtype, {4, 5, 9}, rough_values(random, dtype, 4, 45)), y = x, dx = x;
    DeviceTensor there(x), y_there(y), dx_there(dx);
    BatchNorm fresh({.channels = 5});
    Saved expected;
    fresh.forward({.x = x.view(), .y = y.view()}, expected);
    fresh.backward({.dy = y.view(), .x = x.view(), .dx = dx.view()}, expected);
    layer.forward({.x = there.view(), .y = y_there.view()}, saved);
    layer.backward({.dy = y_there.view(), .x = there.view(), .dx = dx_there.view()}, saved);
    EXPECT_TRUE(same_bits(y_there.fetch().values(), y.values()));
    EXPECT_TRUE(same_bits(dx_there.fetch().values(), dx.values()));
  }
}

/// Two layers meet: an error on the host would need to wait for the device.
TEST(CudaBatchNorm, DisagreementGivesNaNAndKeepsRunningStatistics) {
  SYNCBN_NEEDS_DEVICE();
  ThreadGroup group(2);
  expect_no_errors(run_ranks(2, [&](int r) {
    const DeviceTurn turn;
    OnDevice t;
    const auto communicator = device_communicator(group.rank(r));
    BatchNorm layer({.channels = 3, .name = r == 0 ? "stem" : "head"}, *communicator);
    Saved saved;
    layer.forward(t.forward(), saved);
    layer.backward({.dy = t.x.view(), .x = t.x.view(), .dx = t.dx.view()}, saved);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(same_bits(t.y.fetch().values(), Doubles(6, nan)));
    EXPECT_TRUE(same_bits(t.dx.fetch().values(), Doubles(6, nan)));
    EXPECT_EQ(t.running.fetch().values(), Doubles(3, 2.0));
    for (const std::function<void()>& asks :
         {std::function<void()>([&] { layer.check(); }), {[&] { saved.count(); }}}) {
      EXPECT_TRUE(contains(thrown_text<DivergenceError>(asks), "did not make the same call"));
    }
  }));
}

}  // namespace
}  // namespace syncbn::testing
