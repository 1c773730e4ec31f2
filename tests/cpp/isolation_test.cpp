// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// A channel that holds NaN, infinities, the largest numbers, denormal ones or zeros of any sign
// changes no bit of another channel: blocks of channels share vector registers.
namespace syncbn {
namespace {

using testing::available_levels;
using testing::kDtypes;
using testing::kMemories;
using testing::LevelScope;
using testing::Memory;
using testing::Random;
using testing::round_to;
using testing::same_bits;
using testing::Tensor;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

double largest(DType dtype) {
  return dtype == DType::kFloat64    ? std::numeric_limits<double>::max()
         : dtype == DType::kFloat16  ? 65504.0
         : dtype == DType::kBFloat16 ? 0x1.fep127
                                     : std::numeric_limits<float>::max();
}

double smallest(DType dtype) {
  return dtype == DType::kFloat64    ? std::numeric_limits<double>::denorm_min()
         : dtype == DType::kFloat16  ? 0x1p-24
         : dtype == DType::kBFloat16 ? 0x1p-133
                                     : 0x1p-149;
}

/// What takes the place of a channel's values: of the first element alone, or of all.
struct Poison {
  const char* name;
  double (*first)(DType);
  double (*second)(DType);
  bool whole = false;
};

const std::vector<Poison> kPoisons = {
    {"NaN", [](DType) { return kNan; }, nullptr},
    {"+inf", [](DType) { return kInf; }, nullptr},
    {"-inf", [](DType) { return -kInf; }, nullptr},
    {"both", [](DType) { return kInf; }, [](DType) { return -kInf; }},
    {"largest", largest, largest, true},
    {"denormal", smallest, [](DType d) { return -smallest(d); }, true},
    {"zeros", [](DType) { return -0.0; }, [](DType) { return 0.0; }, true},
};

struct Shape {
  std::int64_t samples, channels, plane;
  std::int64_t elements() const { return samples * channels * plane; }
};

struct Options {
  Activation activation;
  bool residual = false;
  bool mask = false;
  Statistics statistics = Statistics::kReproducible;
};

/// Everything that a step gives, as (channels, values of a channel) after one reordering.
struct Outcome {
  std::vector<std::vector<double>> of_channel;
  std::vector<double> mean, var, running_mean, running_var, dweight;
};

Outcome step(const Shape& s, DType dtype, Memory memory, const std::vector<double>& xs,
             const std::vector<double>& dys, const Options& options) {
  const std::vector<std::int64_t> sizes = {s.samples, s.channels, s.plane};
  Tensor x(dtype, sizes, memory), dy(dtype, sizes, memory), z(dtype, sizes, memory);
  Tensor y(dtype, sizes, memory), dx(dtype, sizes, memory), dz(dtype, sizes, memory);
  x.fill(xs);
  dy.fill(dys);
  std::vector<double> zs(xs.size());
  for (std::size_t i = 0; i < zs.size(); ++i) {
    zs[i] = 0.25 * static_cast<double>(i % 5) - 0.5;
  }
  z.fill(zs);
  std::vector<double> ones(static_cast<std::size_t>(s.channels), 1.0), weights = ones;
  for (std::size_t c = 0; c < weights.size(); ++c) {
    weights[c] = 0.5 + 0.125 * static_cast<double>(c);
  }
  Tensor weight(DType::kFloat32, {s.channels}, weights), bias(DType::kFloat32, {s.channels}, ones);
  Tensor running_mean = bias, running_var = weight, dweight = weight, dbias = bias;
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(s.samples * s.plane), 1);
  bytes.back() = 0;
  const MaskView mask = options.mask ? MaskView{bytes.data(), {s.samples, s.plane}} : MaskView{};
  const TensorView residual = options.residual ? std::as_const(z).view() : TensorView{};
  BatchNorm layer(
      {.channels = s.channels, .activation = options.activation, .statistics = options.statistics});
  Saved saved;
  layer.forward({.x = x.view(),
                 .mask = mask,
                 .weight = weight.view(),
                 .bias = bias.view(),
                 .residual = residual,
                 .y = y.view(),
                 .running_mean = running_mean.view(),
                 .running_var = running_var.view()},
                saved);
  const bool keeps = options.residual;
  if (keeps) {
    dz.fill(dys);
  }
  layer.backward({.dy = dy.view(),
                  .x = x.view(),
                  .mask = mask,
                  .weight = weight.view(),
                  .bias = bias.view(),
                  .dx = dx.view(),
                  .dweight = dweight.view(),
                  .dbias = dbias.view(),
                  .dresidual = keeps ? dz.view() : MutableTensorView{}},
                 saved);
  Outcome out{std::vector<std::vector<double>>(static_cast<std::size_t>(s.channels)),
              testing::values(saved.mean()),
              testing::values(saved.var()),
              running_mean.values(),
              running_var.values(),
              dweight.values()};
  for (const auto& values :
       {y.values(), dx.values(), keeps ? dz.values() : std::vector<double>{}}) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto c = i / static_cast<std::size_t>(s.plane) % out.of_channel.size();
      out.of_channel[c].push_back(values[i]);
    }
  }
  for (const auto& values : {out.mean, out.var, testing::values(saved.rstd()), out.running_mean,
                             out.running_var, out.dweight, dbias.values()}) {
    for (std::size_t c = 0; c < values.size(); ++c) {
      out.of_channel[c].push_back(values[c]);
    }
  }
  return out;
}

/// The values with the poison in channel c.
std::vector<double> poisoned(std::vector<double> values, const Shape& s, std::int64_t c,
                             const Poison& poison, DType dtype) {
  bool second = false;
  for (std::int64_t i = 0; i < s.elements(); ++i) {
    if (i / s.plane % s.channels != c) {
      continue;
    }
    double (*of)(DType) = second && poison.second != nullptr ? poison.second : poison.first;
    values[static_cast<std::size_t>(i)] = of(dtype);
    if (!poison.whole && (second || poison.second == nullptr)) {
      break;
    }
    second = !second;
  }
  return values;
}

/// docs/numerics.md, section 3: NaN or both infinities give NaN, one infinity gives itself, and
/// the variance is NaN; section 5 hands them on to the running statistics.
void expect_contract(const Outcome& out, std::size_t c, const std::string& poison) {
  if (poison == "NaN" || poison == "+inf" || poison == "-inf" || poison == "both") {
    const double mean = poison == "+inf" ? kInf : poison == "-inf" ? -kInf : kNan;
    EXPECT_TRUE(same_bits(out.mean[c], mean));
    EXPECT_TRUE(same_bits(out.var[c], kNan));
    EXPECT_TRUE(same_bits(out.running_mean[c], mean));
    EXPECT_TRUE(same_bits(out.running_var[c], kNan));
    EXPECT_TRUE(same_bits(out.dweight[c], kNan));
  } else if (poison == "zeros") {
    EXPECT_TRUE(same_bits(out.mean[c], 0.0));
    EXPECT_TRUE(same_bits(out.var[c], 0.0));
  }
}

void expect_isolated(const Shape& s, DType dtype, Memory memory, const Options& options) {
  Random random(41);
  std::vector<double> xs(static_cast<std::size_t>(s.elements())), dys = xs;
  for (std::size_t i = 0; i < xs.size(); ++i) {
    xs[i] = round_to(dtype, 2 * random.signed_unit());
    dys[i] = round_to(dtype, random.signed_unit());
  }
  const Outcome clean = step(s, dtype, memory, xs, dys, options);
  for (const Poison& poison : kPoisons) {
    for (const bool in_x : {true, false}) {
      const std::int64_t c = random.between(0, s.channels - 1);
      SCOPED_TRACE(std::string(poison.name) + (in_x ? " in x" : " in dy") + ", channel " +
                   std::to_string(c));
      const auto bad = poisoned(in_x ? xs : dys, s, c, poison, dtype);
      const Outcome out = step(s, dtype, memory, in_x ? bad : xs, in_x ? dys : bad, options);
      for (std::size_t other = 0; other < out.of_channel.size(); ++other) {
        if (other != static_cast<std::size_t>(c)) {
          EXPECT_TRUE(same_bits(out.of_channel[other], clean.of_channel[other])) << other;
        }
      }
      if (in_x || options.activation.kind != ActivationKind::kRelu) {  // relu may stop a dy
        EXPECT_FALSE(same_bits(out.of_channel[static_cast<std::size_t>(c)],
                               clean.of_channel[static_cast<std::size_t>(c)]));
      }
      const bool exact = options.statistics == Statistics::kReproducible;
      if (in_x && exact) {
        expect_contract(out, static_cast<std::size_t>(c), poison.name);
      } else if (!in_x) {  // backward changes no statistic
        EXPECT_TRUE(same_bits(out.running_mean, clean.running_mean));
        EXPECT_TRUE(same_bits(out.running_var, clean.running_var));
      }
    }
  }
}

class Isolation : public ::testing::TestWithParam<DType> {};

TEST_P(Isolation, NoChannelReachesAnotherExact) {
  // A row of vectors with a rest, single rows, planes longer than a segment.
  const std::vector<Shape> shapes = {{5, 19, 1}, {2, 37, 1}, {3, 19, 7}, {2, 5, 530}};
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    for (const Memory memory : kMemories) {
      for (const Shape& shape : shapes) {
        SCOPED_TRACE(level + ", memory " + std::to_string(static_cast<int>(memory)) + ", plane " +
                     std::to_string(shape.plane));
        expect_isolated(shape, GetParam(), memory, {});
      }
    }
  }
}

TEST_P(Isolation, NorWithOptionsExact) {
  const Activation relu{ActivationKind::kRelu}, leaky{ActivationKind::kLeakyRelu, 0.125};
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    for (const Memory memory : {Memory::kPlanes, Memory::kRows}) {
      for (const Options& options :
           {Options{relu}, Options{leaky, true}, Options{relu, true, true}, Options{{}, true, true},
            Options{{}, false, true}, Options{{}, false, false, Statistics::kWelford}}) {
        SCOPED_TRACE(level + ", activation " +
                     std::to_string(static_cast<int>(options.activation.kind)) + ", mask " +
                     std::to_string(options.mask));
        expect_isolated({3, 19, 7}, GetParam(), memory, options);
        expect_isolated({6, 19, 1}, GetParam(), memory, options);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Isolation, ::testing::ValuesIn(kDtypes),
                         [](const auto& test) { return std::string(name(test.param)); });

}  // namespace
}  // namespace syncbn
