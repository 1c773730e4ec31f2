// SPDX-License-Identifier: Apache-2.0
#include "bad_input.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

// What a caller of the layer and of the operator can get wrong, besides what arguments_test.cpp
// has.
namespace syncbn::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

float* next(const MutableTensorView& tensor) { return static_cast<float*>(tensor.data) + 1; }

const std::vector<Case> kCases = {
    {"mask of another plane",
     [](A a) { a.mask.sizes = {2, 5}, a.forward(); },
     {"mask: got shape (2, 5)", "expected (2, 4)"}},
    {"mask with channels",
     [](A a) { a.mask.sizes = {2, 3, 4}, a.backward(); },
     {"mask: got shape (2, 3, 4)", "expected (2, 4)"}},
    {"mask of another length",
     [](A a) { a.mask = {std::span(a.mask_memory).first(2), {2, 4}}, a.forward(); },
     {"mask: got 2 elements", "expected those of shape (2, 4)"}},
    {"mask without bytes",
     [](A a) { a.mask.data = nullptr, a.evaluate(); },
     {"mask: got a null pointer", "expected data"}},
    {"mask on a GPU",
     [](A a) { a.mask.device = Device::kCuda, a.evaluate_backward(); },
     {"mask: got a tensor on CUDA", "expected the device of x, CPU"}},
    {"residual of another shape",
     [](A a) { a.residual = {a.x.data, DType::kFloat32, {2, 4, 3}}, a.forward(); },
     {"residual: got shape (2, 4, 3)", "expected the shape of x, (2, 3, 4)"}},
    {"residual of another dtype",
     [](A a) { a.residual = {a.x.data, DType::kFloat16, {2, 3, 4}}, a.evaluate(); },
     {"residual: got float16", "expected the dtype of x, float32"}},
    {"unknown activation",
     [](A a) { a.options.activation.kind = static_cast<ActivationKind>(9), a.forward(); },
     {"activation: got number 9", "expected none, relu or leaky_relu"}},
    {"infinite slope",
     [](A a) { a.options.activation = {ActivationKind::kLeakyRelu, kInf}, a.evaluate(); },
     {"negative_slope: got inf", "expected a finite number"}},
    {"unknown statistics",
     [](A a) { a.options.statistics = static_cast<Statistics>(7), a.forward(); },
     {"statistics: got number 7", "expected reproducible or welford"}},
    {"negative counter",
     [](A a) { a.tracked = -5, a.options.momentum.reset(), a.forward(); },
     {"num_batches_tracked: got -5", "expected 0 to 2^53"}},
    {"counter that overflows",
     [](A a) { a.tracked = std::numeric_limits<std::int64_t>::max(), a.forward(); },
     {"num_batches_tracked: got 9223372036854775807", "expected room for one more"}},
    {"y in one place",
     [](A a) { flatten(a.y, 1), a.forward(); },
     {"y: got stride 0 of axis 1 of shape (2, 3, 4)", "expected memory of its own for each entry"}},
    {"y of evaluation in one place",
     [](A a) { flatten(a.y, 2), a.evaluate(); },
     {"y: got stride 0 of axis 2", "expected memory of its own for each entry"}},
    {"y over a part of x",
     [](A a) { a.x = a.y, a.y.data = next(a.y), a.forward(); },
     {"y: got memory of x", "expected exactly that tensor, or other memory"}},
    {"y over x in another order",
     [](A a) { a.x = a.y, a.x.strides = {12, 1, 3}, a.forward(); },
     {"y: got memory of x", "expected exactly that tensor, or other memory"}},
    {"running statistics in one place",
     [](A a) { a.running_var = a.running_mean, a.forward(); },
     {"running_var: got memory of running_mean", "expected memory of its own"}},
    {"running var that is the weight",
     [](A a) { a.weight = a.running_var, a.forward(); },
     {"running_var: got memory of weight", "expected memory of its own"}},
    {"gradients of weight and bias in one place",
     [](A a) { a.dbias = a.dweight, a.backward(); },
     {"dbias: got memory of dweight", "expected memory of its own"}},
    {"dx over a part of dy",
     [](A a) { a.dy = a.dx, a.dx.data = next(a.dx), a.backward(); },
     {"dx: got memory of dy", "expected exactly that tensor, or other memory"}},
    {"gradient of the residual in dx",
     [](A a) { a.dresidual = a.dx, a.backward(); },
     {"dresidual: got memory of dx", "expected memory of its own"}},
    {"forward without a running var",
     [](A a) { a.running_var = {}, a.forward(); },
     {"running_mean, running_var: got only one of them", "expected both or neither"}},
    {"forward without a running mean",
     [](A a) { a.running_mean = {}, a.forward(); },
     {"running_mean, running_var: got only one of them", "expected both or neither"}},
    {"running mean in one place",
     [](A a) { flatten(a.running_mean, 0), a.forward(); },
     {"running_mean: got stride 0", "expected memory of its own for each entry"}},
    {"running var in one place",
     [](A a) { flatten(a.running_var, 0), a.forward(); },
     {"running_var: got stride 0", "expected memory of its own for each entry"}},
    {"2^31 + 1 channels",
     [](A a) { a.x = {nullptr, DType::kFloat32, {0, (1LL << 31) + 1}}, a.mask = {}, a.forward(); },
     {"x: got shape (0, 2147483649)", "expected at most 2^31 channels"}},
    {"channels whose words wrap around",
     [](A a) { a.x = {nullptr, DType::kFloat16, {0, kWrapping}}, a.mask = {}, a.forward(); },
     {"x: got shape (0, 3074457345618258603)", "expected at most 2^31 channels"}},
    {"dresidual of another shape",
     [](A a) { a.dresidual = {a.dx.data, DType::kFloat32, {2, 4, 3}}, a.backward(); },
     {"dresidual: got shape (2, 4, 3)", "expected the shape of x, (2, 3, 4)"}},
    {"dresidual in one place",
     [](A a) { a.dresidual = a.dz_memory.view(), flatten(a.dresidual, 0), a.backward(); },
     {"dresidual: got stride 0 of axis 0", "expected memory of its own for each entry"}},
    {"dx in one place",
     [](A a) { flatten(a.dx, 0), a.backward(); },
     {"dx: got stride 0 of axis 0", "expected memory of its own for each entry"}},
    {"dx of evaluation in one place",
     [](A a) { flatten(a.dx, 0), a.evaluate_backward(); },
     {"dx: got stride 0 of axis 0", "expected memory of its own for each entry"}},
    {"dweight in one place",
     [](A a) { flatten(a.dweight, 0), a.backward(); },
     {"dweight: got stride 0", "expected memory of its own for each entry"}},
    {"dbias in one place",
     [](A a) { flatten(a.dbias, 0), a.evaluate_backward(); },
     {"dbias: got stride 0", "expected memory of its own for each entry"}},
    {"unknown gradients",
     [](A a) { a.affine = static_cast<AffineGradients>(5), a.backward(); },
     {"affine: got number 5", "expected share or global"}},
    {"dx that is dy",
     [](A a) {
       a.residual = std::as_const(a.z_memory).view(), a.dy = a.dx;
       a.options.activation.kind = ActivationKind::kRelu, a.evaluate_backward();
     },
     {"dx: got dy", "expected other memory"}},
    {"a group of nobody",
     [](A a) {
       Sized nobody(0);
       BatchNorm(a.options, nobody);
     },
     {"ranks: got 0", "expected 1 to 2048"}},
    {"a group that is too large",
     [](A a) {
       Sized many(2049);
       BatchNorm(a.options, many);
     },
     {"ranks: got 2049", "expected 1 to 2048"}},
    {"operator without estimates",
     [](A a) { a.running_mean = {}, a.op(); },
     {"estimated_mean: got none", "expected one entry per channel of x"}},
    {"operator's scale of other channels",
     [](A a) { a.weight.sizes = {4}, a.op(); },
     {"scale: got shape (4)", "expected (3), one entry per channel of x"}},
    {"operator with a negative counter",
     [](A a) { a.batches = -1, a.op(); },
     {"batches: got -1", "expected a number of at least 0"}},
    {"operator without a counter",
     [](A a) { a.saved_batches = nullptr, a.op(); },
     {"saved_batches: got null", "expected a counter"}},
    {"operator's epsilon",
     [](A a) { a.attributes.epsilon = kNan, a.op(); },
     {"epsilon: got nan", "expected a finite number of at least 0"}},
    {"operator's momentum",
     [](A a) { a.attributes.momentum = 1.5, a.op_backward(); },
     {"momentum: got 1.5", "expected a number in [0, 1]"}},
    {"operator's estimate in one place",
     [](A a) { flatten(a.running_var, 0), a.op(); },
     {"saved_var: got stride 0", "expected memory of its own for each entry"}},
    {"operator's batch mean in one place",
     [](A a) { flatten(a.batch_mean, 0), a.op(); },
     {"batch_mean: got stride 0", "expected memory of its own for each entry"}},
    {"operator's dx in one place",
     [](A a) { flatten(a.dx, 0), a.op_backward(); },
     {"dx: got stride 0 of axis 0", "expected memory of its own for each entry"}},
    {"operator's statistics of other channels",
     [](A a) { a.statistics.rstd.pop_back(), a.op_backward(); },
     {"statistics: got 2 channels", "expected those of x, 3"}},
};

TEST(BadInput, OfTheLayerIsRefusedExact) { expect_refused(kCases); }

/// Bytes of a mask are true or false, whatever their value.
TEST(BadInput, AnyByteButZeroCountsExact) {
  Arena ones, others;
  others.mask_memory.assign(8, 0x80);
  ones.mask_memory[3] = others.mask_memory[3] = 0;
  good_step(ones);
  good_step(others);
  EXPECT_TRUE(ones.values() == others.values());
}

}  // namespace
}  // namespace syncbn::testing
