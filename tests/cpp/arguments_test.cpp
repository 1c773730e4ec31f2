// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Arguments that are refused: the exception's type, a text with the argument's name, what was given
// and what is allowed; nothing is changed.
namespace syncbn {
namespace {

using testing::contains;
using testing::Tensor;
using testing::thrown_text;

constexpr DType kUnknown = static_cast<DType>(9);
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// A valid call of everything; cases spoil one argument.
struct Call {
  Tensor x{DType::kFloat32, {2, 3, 4}, std::vector<double>(24, 1.5)};
  Tensor dy = x;
  Tensor y = x;
  Tensor dx = x;
  Tensor weight{DType::kFloat32, {3}, {1, 2, 3}};
  Tensor bias = weight;
  Tensor running_mean = weight;
  Tensor running_var = weight;
  Tensor dweight = weight;
  Tensor dbias = weight;
  std::int64_t tracked = 7;

  TensorView x_view = std::as_const(x).view();
  TensorView dy_view = std::as_const(dy).view();
  TensorView weight_view = std::as_const(weight).view();
  TensorView bias_view = std::as_const(bias).view();
  MutableTensorView y_view = y.view();
  MutableTensorView dx_view = dx.view();
  MutableTensorView dweight_view = dweight.view();
  MutableTensorView dbias_view = dbias.view();
  MutableTensorView mean_view = running_mean.view();
  MutableTensorView var_view = running_var.view();
  std::int64_t* counter = &tracked;
  BatchNorm::Options options{.channels = 3};
  BatchNorm layer{options};
  Saved saved = saved_of(x_view, {.weight = weight_view, .bias = bias_view});

  /// For the layer that there is now.
  Saved saved_of(const TensorView& of, BatchNorm::Forward rest = {}) {
    Tensor other(DType::kFloat32, {of.sizes.begin(), of.sizes.end()});
    rest.x = of;
    rest.y = other.view();
    Saved filled;
    layer = BatchNorm({.channels = of.sizes[1]});
    layer.forward(rest, filled);
    return filled;
  }

  void forward() {
    BatchNorm(options).forward({.x = x_view,
                                .weight = weight_view,
                                .bias = bias_view,
                                .y = y_view,
                                .running_mean = mean_view,
                                .running_var = var_view,
                                .num_batches_tracked = counter},
                               saved);
  }
  void backward() {
    layer.backward({.dy = dy_view,
                    .x = x_view,
                    .weight = weight_view,
                    .bias = bias_view,
                    .dx = dx_view,
                    .dweight = dweight_view,
                    .dbias = dbias_view},
                   saved);
  }
  void evaluate() {
    BatchNorm(options).evaluate({.x = x_view,
                                 .weight = weight_view,
                                 .bias = bias_view,
                                 .running_mean = mean_view,
                                 .running_var = var_view,
                                 .y = y_view});
  }
  void evaluate_backward() {
    BatchNorm(options).evaluate_backward({.dy = dy_view,
                                          .x = x_view,
                                          .weight = weight_view,
                                          .bias = bias_view,
                                          .running_mean = mean_view,
                                          .running_var = var_view,
                                          .dx = dx_view,
                                          .dweight = dweight_view,
                                          .dbias = dbias_view});
  }
  std::vector<std::vector<std::byte>> memory() const {
    return {y.storage(),
            dx.storage(),
            dweight.storage(),
            dbias.storage(),
            running_mean.storage(),
            running_var.storage(),
            std::vector<std::byte>(static_cast<std::size_t>(tracked))};
  }
};

struct Refused {
  const char* what;
  std::function<void(Call&)> spoil;
  std::vector<std::string> parts;  ///< of the text
};

void expect_refused(const std::vector<Refused>& cases, void (Call::*function)()) {
  for (const Refused& one : cases) {
    SCOPED_TRACE(one.what);
    Call call;
    one.spoil(call);
    const auto before = call.memory();
    const std::string text = thrown_text<InvalidArgument>([&] { (call.*function)(); });
    for (const std::string& part : one.parts) {
      EXPECT_TRUE(contains(text, part));
    }
    EXPECT_TRUE(call.memory() == before) << "something was changed";
  }
}

/// What may be wrong with a tensor of samples.
std::vector<Refused> sample_cases(const std::string& name,
                                  const std::function<TensorView&(Call&)>& of) {
  return {
      {"one axis",
       [=](Call& c) { of(c).sizes = {6}, of(c).strides = {1}; },
       {name, "(6)", "2 to 12"}},
      {"absent", [=](Call& c) { of(c) = {}; }, {name, "0 axes", "2 to 12"}},
      {"13 axes",
       [=](Call& c) {
         of(c).sizes = std::vector<std::int64_t>(13, 1);
         of(c).strides = of(c).sizes;
       },
       {name, "13", "2 to 12"}},
      {"no strides", [=](Call& c) { of(c).strides = {}; }, {name, "0 strides", "3"}},
      {"a stride too many", [=](Call& c) { of(c).strides.push_back(1); }, {name, "4 strides", "3"}},
      {"negative size", [=](Call& c) { of(c).sizes[2] = -4; }, {name, "(2, 3, -4)", "at least 0"}},
      {"null", [=](Call& c) { of(c).data = nullptr; }, {name, "null", "(2, 3, 4)"}},
      {"unknown dtype",
       [=](Call& c) { of(c).dtype = kUnknown; },
       {name, "9", "float16, bfloat16, float32 or float64"}},
  };
}

/// What may be wrong with a tensor of one entry per channel.
template <class View>
std::vector<Refused> channel_cases(const std::string& name, const std::function<View&(Call&)>& of) {
  return {
      {"four channels", [=](Call& c) { of(c).sizes = {4}; }, {name, "(4)", "(3)"}},
      {"two axes",
       [=](Call& c) {
         of(c).sizes = {3, 1};
         of(c).strides = {1, 1};
       },
       {name, "(3, 1)", "(3)"}},
      {"a scalar",
       [=](Call& c) {
         of(c).sizes = {};
         of(c).strides = {};
       },
       {name, "()", "(3)"}},
      {"null", [=](Call& c) { of(c).data = nullptr; }, {name, "null", "(3)"}},
      {"no strides", [=](Call& c) { of(c).strides = {}; }, {name, "0 strides", "1"}},
      {"negative size", [=](Call& c) { of(c).sizes[0] = -3; }, {name, "(-3)"}},
      {"unknown dtype", [=](Call& c) { of(c).dtype = kUnknown; }, {name, "9", "float64"}},
      {"on a GPU", [=](Call& c) { of(c).device = Device::kCuda; }, {name, "device"}},
  };
}

/// What may be wrong with a tensor that must be like x.
template <class View>
std::vector<Refused> like_cases(const std::string& name, const std::function<View&(Call&)>& of) {
  return {
      {"another shape",
       [=](Call& c) { of(c).sizes = {2, 4, 3}; },
       {name, "(2, 4, 3)", "(2, 3, 4)"}},
      {"fewer axes",
       [=](Call& c) {
         of(c).sizes = {6, 4};
         of(c).strides = {4, 1};
       },
       {name, "(6, 4)", "(2, 3, 4)"}},
      {"another dtype",
       [=](Call& c) { of(c).dtype = DType::kBFloat16; },
       {name, "bfloat16", "float32"}},
      {"unknown dtype", [=](Call& c) { of(c).dtype = kUnknown; }, {name, "9", "float64"}},
      {"null", [=](Call& c) { of(c).data = nullptr; }, {name, "null", "(2, 3, 4)"}},
      {"no strides", [=](Call& c) { of(c).strides = {}; }, {name, "0 strides", "3"}},
      {"on a GPU", [=](Call& c) { of(c).device = Device::kCuda; }, {name, "device of x"}},
      {"absent", [=](Call& c) { of(c) = {}; }, {name, "()"}},
  };
}

/// 2^37 elements of one channel, and as many as overflow, in one element of memory.
std::vector<Refused> size_cases() {
  std::vector<Refused> cases;
  for (const auto& sizes : {std::vector<std::int64_t>{1 << 20, 3, 1 << 17},
                            std::vector<std::int64_t>{(1LL << 36) + 1, 3},
                            std::vector<std::int64_t>{1LL << 40, 3, 1LL << 40},
                            std::vector<std::int64_t>{2, 3, 1LL << 62, 1LL << 62}}) {
    for (const bool null : {false, true}) {
      cases.push_back({null ? "too large and null" : "too large",
                       [=](Call& c) {
                         c.x_view = {null ? nullptr : c.x_view.data, DType::kFloat32, sizes,
                                     std::vector<std::int64_t>(sizes.size(), 0)};
                         c.y_view = {c.y_view.data, DType::kFloat32, sizes, c.x_view.strides};
                       },
                       {"x", std::to_string(sizes[0]), null ? "" : "2^36"}});
    }
  }
  for (const std::int64_t channels : {(1LL << 31) + 1, 1LL << 62}) {
    cases.push_back({"too many channels, of no elements",
                     [=](Call& c) { c.x_view = {nullptr, DType::kFloat32, {0, channels}, {0, 0}}; },
                     {"x", std::to_string(channels), "2^31 channels"}});
  }
  return cases;
}

std::function<TensorView&(Call&)> view(TensorView Call::* member) {
  return [=](Call& c) -> TensorView& { return c.*member; };
}
std::function<MutableTensorView&(Call&)> view(MutableTensorView Call::* member) {
  return [=](Call& c) -> MutableTensorView& { return c.*member; };
}

TEST(Arguments, TheCallIsFine) {
  for (const auto function :
       {&Call::forward, &Call::backward, &Call::evaluate, &Call::evaluate_backward}) {
    Call call;
    const auto before = call.memory();
    EXPECT_NO_THROW((call.*function)());
    EXPECT_TRUE(call.memory() != before);
  }
}

const std::vector<Refused> kOtherChannels = {
    {"four channels",
     [](Call& c) { c.options.channels = 4; },
     {"x: got 3 channels", "expected those of the layer, 4"}}};

TEST(Arguments, Options) {
  expect_refused(
      {{"channels", [](Call& c) { c.options.channels = -1; }, {"channels", "-1", "0 to 2^31"}},
       {"channels",
        [](Call& c) { c.options.channels = (1LL << 31) + 1; },
        {"channels", "2147483649", "0 to 2^31"}},
       {"eps", [](Call& c) { c.options.eps = -0.5; }, {"eps", "-0.5", "at least 0"}},
       {"eps", [](Call& c) { c.options.eps = -1e-9; }, {"eps", "e-09", "at least 0"}},
       {"eps", [](Call& c) { c.options.eps = kNan; }, {"eps", "nan", "finite"}},
       {"eps", [](Call& c) { c.options.eps = kInf; }, {"eps", "inf", "finite"}},
       {"-0.1", [](Call& c) { c.options.momentum = -0.25; }, {"momentum", "-0.25", "[0, 1]"}},
       {"1.5", [](Call& c) { c.options.momentum = 1.5; }, {"momentum", "1.5", "[0, 1]"}},
       {"just above 1",
        [](Call& c) { c.options.momentum = 1.0000001; },
        {"momentum", "1.0000001", "[0, 1]"}},
       {"NaN", [](Call& c) { c.options.momentum = kNan; }, {"momentum", "nan", "[0, 1]"}}},
      &Call::forward);
}

TEST(Arguments, Forward) {
  using M = MutableTensorView;
  const auto run = &Call::forward;
  expect_refused(sample_cases("x", view(&Call::x_view)), run);
  expect_refused(size_cases(), run);
  expect_refused(kOtherChannels, run);
  expect_refused(like_cases<M>("y", view(&Call::y_view)), run);
  expect_refused(channel_cases<TensorView>("weight", view(&Call::weight_view)), run);
  expect_refused(channel_cases<TensorView>("bias", view(&Call::bias_view)), run);
  expect_refused(channel_cases<M>("running_mean", view(&Call::mean_view)), run);
  expect_refused(channel_cases<M>("running_var", view(&Call::var_view)), run);
}

TEST(Arguments, CumulativeAveragingNeedsACounter) {
  const auto cumulative = [](Call& c) { c.options.momentum.reset(), c.counter = nullptr; };
  expect_refused({{"no counter", cumulative, {"num_batches_tracked", "null", "momentum"}},
                  {"no counter, only mean",
                   [=](Call& c) { cumulative(c), c.var_view = {}; },
                   {"num_batches_tracked", "null", "momentum"}},
                  {"no counter, only var",
                   [=](Call& c) { cumulative(c), c.mean_view = {}; },
                   {"num_batches_tracked", "null", "momentum"}}},
                 &Call::forward);
}

TEST(Arguments, Backward) {
  using M = MutableTensorView;
  const auto run = &Call::backward;
  expect_refused(sample_cases("x", view(&Call::x_view)), run);
  expect_refused(like_cases<TensorView>("dy", view(&Call::dy_view)), run);
  expect_refused(like_cases<M>("dx", view(&Call::dx_view)), run);
  expect_refused(channel_cases<TensorView>("weight", view(&Call::weight_view)), run);
  expect_refused(channel_cases<TensorView>("bias", view(&Call::bias_view)), run);
  expect_refused(channel_cases<M>("dweight", view(&Call::dweight_view)), run);
  expect_refused(channel_cases<M>("dbias", view(&Call::dbias_view)), run);
  expect_refused(
      {{"statistics of other channels",
        [](Call& c) { c.saved = c.saved_of({c.x_view.data, DType::kFloat32, {2, 2, 4}}); },
        {"saved: got 2 channels", "expected those of x, 3"}},
       {"no statistics",
        [](Call& c) { c.saved = Saved(); },
        {"saved: got one without content", "one that a forward filled"}}},
      run);
}

TEST(Arguments, Evaluate) {
  using M = MutableTensorView;
  const auto run = &Call::evaluate;
  expect_refused(sample_cases("x", view(&Call::x_view)), run);
  expect_refused(kOtherChannels, run);
  expect_refused(like_cases<M>("y", view(&Call::y_view)), run);
  expect_refused(channel_cases<TensorView>("weight", view(&Call::weight_view)), run);
  expect_refused(channel_cases<M>("running_mean", view(&Call::mean_view)), run);
  expect_refused(channel_cases<M>("running_var", view(&Call::var_view)), run);
  for (const auto member : {&Call::mean_view, &Call::var_view}) {
    expect_refused({{"only one of the running statistics",
                     [=](Call& c) { c.*member = {}; },
                     {"running_mean", "running_var", "only one", "both"}}},
                   run);
  }
}

TEST(Arguments, EvaluateBackward) {
  using M = MutableTensorView;
  const auto run = &Call::evaluate_backward;
  expect_refused(sample_cases("x", view(&Call::x_view)), run);
  expect_refused(kOtherChannels, run);
  expect_refused(like_cases<TensorView>("dy", view(&Call::dy_view)), run);
  expect_refused(like_cases<M>("dx", view(&Call::dx_view)), run);
  expect_refused(channel_cases<TensorView>("weight", view(&Call::weight_view)), run);
  expect_refused(channel_cases<M>("dweight", view(&Call::dweight_view)), run);
  expect_refused(channel_cases<M>("dbias", view(&Call::dbias_view)), run);
  expect_refused({{"no running statistics",
                   [](Call& c) { c.mean_view = {}, c.var_view = {}; },
                   {"running_mean", "running_var", "none", "both"}}},
                 run);
}

TEST(Arguments, UpdateOfRunningStatistics) {
  const std::vector<double> values = {1, 2, 3};
  Tensor mean(DType::kFloat32, {3}, values);
  const auto update = [&](const MutableTensorView& m, const MutableTensorView& v, double factor) {
    return thrown_text<InvalidArgument>(
        [&] { update_running_statistics(m, v, values.data(), values.data(), 3, 5, factor); });
  };
  const MutableTensorView two(mean.view().data, DType::kFloat32, {2});
  EXPECT_TRUE(contains(update(two, {}, 0.5), "running_mean: got shape (2)"));
  EXPECT_TRUE(contains(update(mean.view(), two, 0.5), "running_var: got shape (2)"));
  EXPECT_TRUE(contains(update(mean.view(), {}, 1.5), "1.5"));
  EXPECT_TRUE(contains(update(mean.view(), {}, kNan), "nan"));
  EXPECT_EQ(mean.values(), values);
}

}  // namespace
}  // namespace syncbn
