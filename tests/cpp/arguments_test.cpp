// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bad_input.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Arguments that are refused: the exception's type, a text with the argument's name, what was given
// and what is allowed; nothing is changed.
namespace syncbn::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// Refused as in bad_input.hpp, by `run` after what the cases spoil.
void expect_refused(std::vector<Case> cases, void (Arena::*run)()) {
  for (Case& one : cases) {
    one.call = [spoil = one.call, run](A a) { spoil(a), (a.*run)(); };
  }
  expect_refused(cases);
}

/// Another shape of the same memory.
template <class View>
void reshape(View& view, const Extents& sizes, const Extents& strides) {
  view.sizes = sizes;
  view.strides = strides;
}

/// What may be wrong with a tensor of samples.
std::vector<Case> sample_cases(const std::string& name, TensorView Arena::* of) {
  return {
      {"one axis", [=](A a) { reshape(a.*of, {6}, {1}); }, {name, "(6)", "2 to 12"}},
      {"absent", [=](A a) { a.*of = {}; }, {name + ": got none", "2 to 12 axes"}},
      {"13 axes",
       [=](A a) {
         (a.*of).sizes = std::vector<std::int64_t>(13, 1);
         (a.*of).strides = (a.*of).sizes;
       },
       {name, "13", "2 to 12"}},
      {"no strides", [=](A a) { (a.*of).strides = {}; }, {name, "0 strides", "3"}},
      {"a stride too many", [=](A a) { (a.*of).strides.push_back(1); }, {name, "4 strides", "3"}},
      {"negative size", [=](A a) { (a.*of).sizes[2] = -4; }, {name, "(2, 3, -4)", "at least 0"}},
      {"null", [=](A a) { (a.*of).data = nullptr; }, {name, "null", "(2, 3, 4)"}},
      {"unknown dtype",
       [=](A a) { (a.*of).dtype = kUnknown; },
       {name, "9", "float16, bfloat16, float32 or float64"}},
  };
}

/// What may be wrong with a tensor of one entry per channel.
template <class View>
std::vector<Case> channel_cases(const std::string& name, View Arena::* of) {
  return {
      {"four channels", [=](A a) { (a.*of).sizes = {4}; }, {name, "(4)", "(3)"}},
      {"two axes", [=](A a) { reshape(a.*of, {3, 1}, {1, 1}); }, {name, "(3, 1)", "(3)"}},
      {"a scalar", [=](A a) { reshape(a.*of, {}, {}); }, {name, "()", "(3)"}},
      {"null", [=](A a) { (a.*of).data = nullptr; }, {name, "null", "(3)"}},
      {"no strides", [=](A a) { (a.*of).strides = {}; }, {name, "0 strides", "1"}},
      {"negative size", [=](A a) { (a.*of).sizes[0] = -3; }, {name, "(-3)"}},
      {"unknown dtype", [=](A a) { (a.*of).dtype = kUnknown; }, {name, "9", "float64"}},
      {"on a GPU", [=](A a) { (a.*of).device = Device::kCuda; }, {name, "device"}},
  };
}

/// What may be wrong with a tensor that must be like x.
template <class View>
std::vector<Case> like_cases(const std::string& name, View Arena::* of) {
  return {
      {"another shape", [=](A a) { (a.*of).sizes = {2, 4, 3}; }, {name, "(2, 4, 3)", "(2, 3, 4)"}},
      {"fewer axes", [=](A a) { reshape(a.*of, {6, 4}, {4, 1}); }, {name, "(6, 4)", "(2, 3, 4)"}},
      {"another dtype",
       [=](A a) { (a.*of).dtype = DType::kBFloat16; },
       {name, "bfloat16", "float32"}},
      {"unknown dtype", [=](A a) { (a.*of).dtype = kUnknown; }, {name, "9", "float64"}},
      {"null", [=](A a) { (a.*of).data = nullptr; }, {name, "null", "(2, 3, 4)"}},
      {"no strides", [=](A a) { (a.*of).strides = {}; }, {name, "0 strides", "3"}},
      {"on a GPU", [=](A a) { (a.*of).device = Device::kCuda; }, {name, "device of x"}},
      {"absent", [=](A a) { a.*of = {}; }, {name + ": got none, expected a tensor like x"}},
  };
}

/// 2^37 elements of one channel, and as many as overflow, in one element of memory.
std::vector<Case> size_cases() {
  std::vector<Case> cases;
  for (const auto& sizes : {std::vector<std::int64_t>{1 << 20, 3, 1 << 17},
                            std::vector<std::int64_t>{(1LL << 36) + 1, 3},
                            std::vector<std::int64_t>{1LL << 40, 3, 1LL << 40},
                            std::vector<std::int64_t>{2, 3, 1LL << 62, 1LL << 62}}) {
    for (const bool null : {false, true}) {
      cases.push_back({null ? "too large and null" : "too large",
                       [=](A a) {
                         a.x = {null ? nullptr : a.x.data, DType::kFloat32, sizes,
                                std::vector<std::int64_t>(sizes.size(), 0)};
                         a.y = {a.y.data, DType::kFloat32, sizes, a.x.strides};
                       },
                       {"x", std::to_string(sizes[0]), null ? "" : "2^36"}});
    }
  }
  return cases;
}

const std::vector<Case> kOtherChannels = {
    {"four channels",
     [](A a) { a.options.channels = 4; },
     {"x: got 3 channels", "expected those of the layer, 4"}}};

TEST(Arguments, Options) {
  expect_refused(
      {{"channels", [](A a) { a.options.channels = -1; }, {"channels", "-1", "0 to 2^31"}},
       {"channels",
        [](A a) { a.options.channels = (1LL << 31) + 1; },
        {"channels", "2147483649", "0 to 2^31"}},
       {"eps", [](A a) { a.options.eps = -0.5; }, {"eps", "-0.5", "at least 0"}},
       {"eps", [](A a) { a.options.eps = -1e-9; }, {"eps", "e-09", "at least 0"}},
       {"eps", [](A a) { a.options.eps = kNan; }, {"eps", "nan", "finite"}},
       {"eps", [](A a) { a.options.eps = kInf; }, {"eps", "inf", "finite"}},
       {"-0.1", [](A a) { a.options.momentum = -0.25; }, {"momentum", "-0.25", "[0, 1]"}},
       {"1.5", [](A a) { a.options.momentum = 1.5; }, {"momentum", "1.5", "[0, 1]"}},
       {"just above 1",
        [](A a) { a.options.momentum = 1.0000001; },
        {"momentum", "1.0000001", "[0, 1]"}},
       {"NaN", [](A a) { a.options.momentum = kNan; }, {"momentum", "nan", "[0, 1]"}}},
      &Arena::forward);
}

TEST(Arguments, Forward) {
  const auto run = &Arena::forward;
  expect_refused(sample_cases("x", &Arena::x), run);
  expect_refused(size_cases(), run);
  expect_refused(kOtherChannels, run);
  expect_refused(like_cases("y", &Arena::y), run);
  expect_refused(channel_cases("weight", &Arena::weight), run);
  expect_refused(channel_cases("bias", &Arena::bias), run);
  expect_refused(channel_cases("running_mean", &Arena::running_mean), run);
  expect_refused(channel_cases("running_var", &Arena::running_var), run);
}

TEST(Arguments, CumulativeAveragingNeedsACounter) {
  // A forward has no dx, so that nothing is absent in the first case.
  for (const auto absent : {&Arena::dx, &Arena::running_mean, &Arena::running_var}) {
    expect_refused({{"no counter",
                     [=](A a) { a.options.momentum.reset(), a.counter = nullptr, a.*absent = {}; },
                     {"num_batches_tracked", "null", "momentum"}}},
                   &Arena::forward);
  }
}

TEST(Arguments, Backward) {
  const auto run = &Arena::backward;
  expect_refused(sample_cases("x", &Arena::x), run);
  expect_refused(like_cases("dy", &Arena::dy), run);
  expect_refused(like_cases("dx", &Arena::dx), run);
  expect_refused(channel_cases("weight", &Arena::weight), run);
  expect_refused(channel_cases("bias", &Arena::bias), run);
  expect_refused(channel_cases("dweight", &Arena::dweight), run);
  expect_refused(channel_cases("dbias", &Arena::dbias), run);
  expect_refused({{"statistics of other channels",
                   [](A a) {
                     Tensor y(DType::kFloat32, {2, 2, 4});
                     a.layer = BatchNorm({.channels = 2});
                     a.layer.forward({.x = {a.x.data, DType::kFloat32, {2, 2, 4}}, .y = y.view()},
                                     a.saved);
                   },
                   {"saved: got 2 channels", "expected those of x, 3"}},
                  {"more bytes than a pointer can reach",
                   [](A a) {
                     a.mask = {}, a.weight = a.bias = {}, a.dweight = a.dbias = {};
                     for (TensorView* of : {&a.x, &a.dy}) {
                       reshape(*of, {1 << 18, 1LL << 31, 1 << 13}, {1LL << 44, 1 << 13, 1});
                     }
                     reshape(a.dx, a.x.sizes, a.x.strides);
                   },
                   {"saved: got 3 channels", "expected those of x, 2147483648"}},
                  {"no statistics",
                   [](A a) { a.saved = Saved(); },
                   {"saved: got one without content", "one that a forward filled"}}},
                 run);
}

TEST(Arguments, Evaluate) {
  const auto run = &Arena::evaluate;
  expect_refused(sample_cases("x", &Arena::x), run);
  expect_refused(kOtherChannels, run);
  expect_refused(like_cases("y", &Arena::y), run);
  expect_refused(channel_cases("weight", &Arena::weight), run);
  expect_refused(channel_cases("running_mean", &Arena::running_mean), run);
  expect_refused(channel_cases("running_var", &Arena::running_var), run);
  for (const auto member : {&Arena::running_mean, &Arena::running_var}) {
    expect_refused({{"only one of the running statistics",
                     [=](A a) { a.*member = {}; },
                     {"running_mean", "running_var", "only one", "both"}}},
                   run);
  }
}

TEST(Arguments, EvaluateBackward) {
  const auto run = &Arena::evaluate_backward;
  expect_refused(sample_cases("x", &Arena::x), run);
  expect_refused(kOtherChannels, run);
  expect_refused(like_cases("dy", &Arena::dy), run);
  expect_refused(like_cases("dx", &Arena::dx), run);
  expect_refused(channel_cases("weight", &Arena::weight), run);
  expect_refused(channel_cases("dweight", &Arena::dweight), run);
  expect_refused(channel_cases("dbias", &Arena::dbias), run);
  expect_refused({{"no running statistics",
                   [](A a) { a.running_mean = {}, a.running_var = {}; },
                   {"running_mean", "running_var", "none", "both"}}},
                 run);
}

}  // namespace
}  // namespace syncbn::testing
