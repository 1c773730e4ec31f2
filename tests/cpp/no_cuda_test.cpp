// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "syncbn/error.hpp"
#include "syncbn/step.hpp"

// A build without CUDA says so, and how to get one. (torch.nn.SyncBatchNorm on CPU: "expected input
// tensor to be on cuda or ...".)
namespace syncbn::testing {
namespace {

TEST(NoCuda, FunctionsSayHowToBuildThem) {
  const std::vector<float> data(6);
  std::vector<float> out(6, 5);
  const TensorView x(data.data(), DType::kFloat32, {2, 3}, {3, 1}, Device::kCuda);
  const MutableTensorView y(out.data(), DType::kFloat32, {2, 3}, {3, 1}, Device::kCuda);
  TensorView statistics(data.data(), DType::kFloat32, {3});
  statistics.device = Device::kCuda;
  std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(x.dtype, 3)), -1);
  const std::vector<std::int64_t> untouched = message;
  BatchNorm layer({.channels = 3});
  Saved saved;
  for (const std::string& text : {
           thrown_text<Unavailable>([&] { forward_begin({.pass = {.x = x}}, message.data(), {}); }),
           thrown_text<Unavailable>([&] { workspace_words(DType::kFloat32, 3); }),
           thrown_text<Unavailable>([&] { stream_workspace(DType::kFloat32, 3, nullptr); }),
           thrown_text<Unavailable>([&] { cuda::self_communicator(); }),
           thrown_text<Unavailable>([&] { layer.forward({.x = x, .y = y}, saved); }),
           thrown_text<Unavailable>([&] { layer.backward({.dy = x, .x = x, .dx = y}, saved); }),
           thrown_text<Unavailable>([&] { layer.evaluate({.x = x, .y = y}); }),
           thrown_text<Unavailable>([&] {
             layer.evaluate_backward(
                 {.dy = x, .x = x, .running_mean = statistics, .running_var = statistics, .dx = y});
           }),
       }) {
    EXPECT_TRUE(contains(text, "built without CUDA"));
    EXPECT_TRUE(contains(text, "configure with -D SYNCBN_CUDA=ON"));
  }
  EXPECT_EQ(message, untouched);
  EXPECT_EQ(out, std::vector<float>(6, 5));
}

}  // namespace
}  // namespace syncbn::testing
