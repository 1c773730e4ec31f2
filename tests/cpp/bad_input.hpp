// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/batch_norm_op.hpp"
#include "syncbn/step.hpp"

// Tables of calls that are refused: each with a text that names the argument, what was given and
// what is allowed.
namespace syncbn::testing {

inline constexpr DType kUnknown = static_cast<DType>(9);
inline constexpr std::int64_t kChannels = 3;
/// 6 words each are 2 words modulo 2^64.
inline constexpr std::int64_t kWrapping = 3074457345618258603;

/// A group that says any size of itself.
class Sized final : public Communicator {
 public:
  explicit Sized(int size) : size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  void all_reduce_sum(std::span<std::int64_t>) override { ADD_FAILURE() << "an exchange"; }
  void abandon(const std::string&) override {}

 private:
  int size_;
};

/// Memory for a step and for every door of it; cases spoil the views.
struct Arena {
  static Tensor samples(double first) {
    std::vector<double> values(24);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = first + static_cast<double>(i * i % 7);
    }
    return {DType::kFloat32, {2, kChannels, 4}, values};
  }
  Tensor x_memory = samples(1), dy_memory = samples(-3), z_memory = samples(2);
  Tensor y_memory = samples(0), dx_memory = samples(0), dz_memory = samples(0);
  Tensor weight_memory{DType::kFloat32, {kChannels}, {1, 2, 3}};
  Tensor mean_memory = weight_memory, var_memory = weight_memory;
  Tensor dweight_memory = weight_memory, dbias_memory = weight_memory;
  Tensor batch_mean_memory = weight_memory;
  std::vector<std::uint8_t> mask_memory = std::vector<std::uint8_t>(8, 1);
  std::vector<std::uint8_t> bits = std::vector<std::uint8_t>(64, 1);
  std::int64_t tracked = 7;
  std::int64_t* counter = &tracked;
  std::vector<double> mean{1, 2, 3}, var{1, 1, 1}, rstd{1, 1, 1};
  std::vector<double> coefficients = std::vector<double>(9, 1);
  std::vector<std::int64_t> message = std::vector<std::int64_t>(kHeaderWords + 19 * 3, 0);

  TensorView x = std::as_const(x_memory).view(), dy = std::as_const(dy_memory).view();
  TensorView residual, weight = std::as_const(weight_memory).view(), bias = weight;
  MaskView mask{mask_memory.data(), {2, 4}};
  MutableTensorView y = y_memory.view(), dx = dx_memory.view(), dresidual;
  MutableTensorView dweight = dweight_memory.view(), dbias = dbias_memory.view();
  MutableTensorView batch_mean = batch_mean_memory.view();
  MutableTensorView running_mean = mean_memory.view(), running_var = var_memory.view();
  BatchNorm::Options options{.channels = kChannels};
  BatchNorm layer{options};
  Saved saved = trained();
  AffineGradients affine = AffineGradients::kGlobal;
  BatchNormOpAttributes attributes;
  BatchNormOpStatistics statistics{mean, var, rstd, 8, 5};
  std::int64_t batches = 2;
  std::int64_t* saved_batches = &tracked;
  Executor& executor = serial_executor();

  void forward() {
    layer = BatchNorm(options);
    layer.forward({.x = x,
                   .mask = mask,
                   .weight = weight,
                   .bias = bias,
                   .residual = residual,
                   .y = y,
                   .running_mean = running_mean,
                   .running_var = running_var,
                   .num_batches_tracked = counter},
                  saved);
  }
  void backward() {
    layer.backward({.dy = dy,
                    .x = x,
                    .mask = mask,
                    .weight = weight,
                    .bias = bias,
                    .dx = dx,
                    .dweight = dweight,
                    .dbias = dbias,
                    .dresidual = dresidual,
                    .affine = affine},
                   saved);
  }
  void evaluate() {
    BatchNorm(options).evaluate({.x = x,
                                 .mask = mask,
                                 .weight = weight,
                                 .bias = bias,
                                 .residual = residual,
                                 .running_mean = running_mean,
                                 .running_var = running_var,
                                 .y = y});
  }
  void evaluate_backward() {
    BatchNorm(options).evaluate_backward({.dy = dy,
                                          .x = x,
                                          .mask = mask,
                                          .weight = weight,
                                          .bias = bias,
                                          .residual = residual,
                                          .running_mean = running_mean,
                                          .running_var = running_var,
                                          .dx = dx,
                                          .dweight = dweight,
                                          .dbias = dbias,
                                          .dresidual = dresidual});
  }
  void op() {
    batch_norm_op({x, running_mean, running_var, weight, bias, batches},
                  {y, batch_mean, {}, running_mean, running_var, saved_batches}, attributes,
                  self_communicator(), executor);
  }
  void op_backward() {
    batch_norm_op_backward({dy, x, weight, dx, dweight, dbias}, statistics, attributes,
                           self_communicator(), executor);
  }
  /// A forward of x, without another trace.
  Saved trained() {
    Tensor out = x_memory;
    Saved fresh;
    layer = BatchNorm({.channels = kChannels});
    layer.forward({.x = x, .mask = mask, .weight = weight, .bias = bias, .y = out.view()}, fresh);
    return fresh;
  }
  /// Puts back what a case spoils: the views, the options, and the counter.
  void repair() {
    const Arena fresh;
    x = std::as_const(x_memory).view(), dy = std::as_const(dy_memory).view();
    residual = {}, dresidual = {};
    mask = {mask_memory.data(), {2, 4}};
    weight = bias = std::as_const(weight_memory).view();
    y = y_memory.view(), dx = dx_memory.view();
    dweight = dweight_memory.view(), dbias = dbias_memory.view();
    batch_mean = batch_mean_memory.view();
    running_mean = mean_memory.view(), running_var = var_memory.view();
    options = fresh.options, attributes = {}, affine = fresh.affine;
    saved = trained();
    statistics = fresh.statistics;
    saved_batches = counter = &tracked, batches = fresh.batches, tracked = fresh.tracked;
  }
  std::vector<std::vector<double>> values() const {
    std::vector<std::vector<double>> all{mean, var, rstd, coefficients};
    for (const Tensor* t : {&y_memory, &dx_memory, &dz_memory, &mean_memory, &var_memory,
                            &dweight_memory, &dbias_memory, &batch_mean_memory}) {
      all.push_back(t->values());
    }
    all.emplace_back(message.begin(), message.end());
    all.emplace_back(bits.begin(), bits.end());
    all.push_back({static_cast<double>(tracked)});
    return all;
  }
};

struct Case {
  const char* what;
  std::function<void(Arena&)> call;
  std::vector<std::string> parts;  ///< of the text: argument, given, allowed
};

using A = Arena&;

inline ForwardStep forward_step(A a) {
  return {.pass = {.x = a.x,
                   .y = a.y,
                   .mean = a.mean.data(),
                   .var = a.var.data(),
                   .rstd = a.rstd.data()},
          .running = {.mean = a.running_mean, .var = a.running_var},
          .info = a.message.data()};
}
inline BackwardStep backward_step(A a) {
  return {.pass = {.dy = a.dy,
                   .x = a.x,
                   .mean = a.mean.data(),
                   .rstd = a.rstd.data(),
                   .dx = a.dx,
                   .dweight = a.dweight,
                   .dbias = a.dbias},
          .info = a.message.data(),
          .coefficients = a.coefficients.data()};
}
inline Merged merged(A a) { return {a.message.data(), a.message.data() + kHeaderWords}; }

/// All entries along an axis in one place.
template <class View>
void flatten(View& view, std::size_t axis) {
  view.strides[axis] = 0;
}

/// A training step, evaluation and the operator, both directions.
inline void good_step(A a) {
  a.forward();
  a.backward();
  a.evaluate();
  a.evaluate_backward();
  a.op();
}

/// Every case is refused and changes nothing, and the step after all of them has the bits of one
/// that never saw them.
inline void expect_refused(const std::vector<Case>& cases) {
  Arena untouched;
  const auto before = untouched.values();
  Arena arena;
  for (const Case& one : cases) {
    SCOPED_TRACE(one.what);
    const std::string text = thrown_text<InvalidArgument>([&] { one.call(arena); });
    for (const std::string& part : one.parts) {
      EXPECT_TRUE(contains(text, part));
    }
    const std::int64_t given = arena.tracked;  // some cases spoil it
    arena.repair();
    EXPECT_TRUE(arena.values() == before) << "something was changed";
    EXPECT_TRUE(given == arena.tracked || contains(text, "got " + std::to_string(given)));
  }
  good_step(untouched);
  good_step(arena);
  EXPECT_TRUE(arena.values() == untouched.values());
  EXPECT_FALSE(arena.values() == before);
}

}  // namespace syncbn::testing
