#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/error.hpp"
#include "syncbn/passes.hpp"

// A build without CUDA says so, and how to get one. (torch.nn.SyncBatchNorm on CPU: "expected input
// tensor to be on cuda or ...".)
namespace syncbn {
namespace {

using testing::contains;
using testing::thrown_text;

TEST(NoCuda, FunctionsSayHowToBuildThem) {
  const std::vector<float> data(6);
  const TensorView x(data.data(), DType::kFloat32, {2, 3}, {3, 1}, Device::kCuda);
  std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(x.dtype, 3)), -1);
  const std::vector<std::int64_t> untouched = message;
  for (const std::string& text : {
           thrown_text<Unavailable>(
               [&] { cuda::local_moments(x, {}, {}, message.data(), message.data(), {}); }),
           thrown_text<Unavailable>([&] { cuda::workspace_words(DType::kFloat32, 3); }),
           thrown_text<Unavailable>(
               [&] { local_moments(x, {}, message.data(), 0, serial_executor()); }),
       }) {
    EXPECT_TRUE(contains(text, "built without CUDA"));
    EXPECT_TRUE(contains(text, "configure with -D SYNCBN_CUDA=ON"));
  }
  EXPECT_EQ(message, untouched);
}

}  // namespace
}  // namespace syncbn
