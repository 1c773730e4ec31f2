// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "placed_rank.hpp"
#include "properties.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// A channel that holds NaN, infinities, the largest numbers, denormal ones or zeros of any sign
// changes no bit of another channel: blocks of channels share vector registers.
namespace syncbn::testing {
namespace {

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

/// What a step gives: of all whole batches and channels, the entries of channel c.
std::vector<std::vector<double>> by_channel(const Step& step, const Outcome& out) {
  std::vector<std::vector<double>> all(static_cast<std::size_t>(step.channels()));
  for (const auto& values : {out.y, out.dx, out.u}) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      all[i / static_cast<std::size_t>(step.plane()) % all.size()].push_back(values[i]);
    }
  }
  const Outcome::Known& known = out.ranks[0];
  for (const auto& values : {known.mean, known.var, known.rstd, known.running_mean,
                             known.running_var, known.dweight, known.dbias}) {
    for (std::size_t c = 0; c < all.size(); ++c) {
      all[c].push_back(values[c]);
    }
  }
  return all;
}

/// Puts the poison into channel c.
void spoil(std::vector<double>& values, const Step& step, std::int64_t c, const Poison& poison) {
  bool second = false;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (static_cast<std::int64_t>(i) / step.plane() % step.channels() != c) {
      continue;
    }
    double (*of)(DType) = second && poison.second != nullptr ? poison.second : poison.first;
    values[i] = of(step.dtype);
    if (!poison.whole && (second || poison.second == nullptr)) {
      return;
    }
    second = !second;
  }
}

/// docs/numerics.md, section 3: NaN or both infinities give NaN, one infinity gives itself, and
/// the variance is NaN; section 5 hands them on to the running statistics.
void expect_contract(const Outcome::Known& out, std::size_t c, const std::string& poison) {
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

void expect_isolated(
    const std::vector<std::int64_t>& sizes, DType dtype, Memory memory,
    const std::function<void(Step&)>& options = [](Step&) {}) {
  Random random(41);
  Step step(random, dtype, sizes);
  for (std::size_t i = 0; i < step.x.size(); ++i) {
    step.x[i] = round_to(dtype, 2 * random.signed_unit());
    step.dy[i] = round_to(dtype, random.signed_unit());
  }
  options(step);
  Placement placement;
  placement.x = placement.dy = placement.residual = placement.out = memory;
  const auto run = [&](const Step& of) {
    return run_in_group(of, whole(of.sizes[0]), {placement});
  };
  const Outcome clean = run(step);
  const auto clean_channels = by_channel(step, clean);
  for (const Poison& poison : kPoisons) {
    for (const bool in_x : {true, false}) {
      const std::int64_t c = random.between(0, step.channels() - 1);
      SCOPED_TRACE(std::string(poison.name) + (in_x ? " in x" : " in dy") + ", channel " +
                   std::to_string(c));
      Step bad = step;
      spoil(in_x ? bad.x : bad.dy, step, c, poison);
      const Outcome out = run(bad);
      const auto channels = by_channel(step, out);
      for (std::int64_t i = 0; i < step.channels(); ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (i != c) {
          EXPECT_TRUE(same_bits(channels[at], clean_channels[at])) << i;
        } else if (in_x || step.options.activation.kind != ActivationKind::kRelu) {
          EXPECT_FALSE(same_bits(channels[at], clean_channels[at]));  // relu may stop a dy
        }
      }
      const bool exact = step.options.statistics == Statistics::kReproducible;
      if (in_x && exact) {
        expect_contract(out.ranks[0], static_cast<std::size_t>(c), poison.name);
      } else if (!in_x) {  // backward changes no statistic
        EXPECT_TRUE(same_bits(out.ranks[0].running_mean, clean.ranks[0].running_mean));
        EXPECT_TRUE(same_bits(out.ranks[0].running_var, clean.ranks[0].running_var));
      }
    }
  }
}

class Isolation : public ::testing::TestWithParam<DType> {};

TEST_P(Isolation, NoChannelReachesAnotherExact) {
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    for (const Memory memory : kMemories) {
      // A row of vectors with a rest, single rows, planes longer than a segment.
      for (const auto& sizes :
           std::vector<std::vector<std::int64_t>>{{5, 19}, {2, 37}, {3, 19, 7}, {2, 5, 530}}) {
        SCOPED_TRACE(level + ", memory " + std::to_string(static_cast<int>(memory)) +
                     ", channels " + std::to_string(sizes[1]));
        expect_isolated(sizes, GetParam(), memory);
      }
    }
  }
}

TEST_P(Isolation, NorWithOptionsExact) {
  const auto relu = [](Step& s) { s.options.activation.kind = ActivationKind::kRelu; };
  const auto leaky = [](Step& s) { s.options.activation = {ActivationKind::kLeakyRelu, 0.125}; };
  const auto masked = [](Step& s) {
    s.mask.assign(static_cast<std::size_t>(s.sizes[0] * s.plane()), 1);
    s.mask.back() = 0;
  };
  const auto residual = [](Step& s) {
    s.keep = true;
    for (std::size_t i = 0; i < s.x.size(); ++i) {
      s.residual.push_back(0.25 * static_cast<double>(i % 5) - 0.5);
    }
  };
  const std::vector<std::function<void(Step&)>> all = {
      relu,
      [&](Step& s) { leaky(s), residual(s); },
      [&](Step& s) { relu(s), residual(s), masked(s); },
      [&](Step& s) { residual(s), masked(s); },
      masked,
      [](Step& s) { s.options.statistics = Statistics::kWelford; }};
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    for (const Memory memory : {Memory::kPlanes, Memory::kRows}) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        SCOPED_TRACE(level + ", options " + std::to_string(i));
        expect_isolated({3, 19, 7}, GetParam(), memory, all[i]);
        expect_isolated({6, 19}, GetParam(), memory, all[i]);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Isolation, ::testing::ValuesIn(kDtypes),
                         [](const auto& test) { return std::string(name(test.param)); });

}  // namespace
}  // namespace syncbn::testing
