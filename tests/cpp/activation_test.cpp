#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Fused activation and residual of the layer (docs/numerics.md, sections 4 and 6). Bits of the
// passes are checked in levels_test.cpp and, against the oracle, in tests/python.
namespace syncbn {
namespace {

using testing::contains;
using testing::kDtypes;
using testing::Memory;
using testing::Random;
using testing::rough_values;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;
using testing::thrown_text;

// x has mean 0 and variance 1 (eps = 0): v = weight * x + residual is -3, 0, 1 and NaN.
TEST(Activation, ByHandExact) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto self = self_communicator();
  for (const DType dtype : kDtypes) {
    SCOPED_TRACE(name(dtype));
    const Tensor x(dtype, {4, 1}, std::vector<double>{-1, 1, -1, 1});
    const Tensor weight(DType::kFloat32, {1}, std::vector<double>{2});
    const Tensor residual(dtype, {4, 1}, std::vector<double>{-1, -2, 3, nan});
    const Tensor dy(dtype, {4, 1}, std::vector<double>{8, 16, 32, 64});
    const struct {
      Activation activation;
      std::vector<double> y;
      std::vector<double> dresidual;
    } cases[] = {{{}, {-3, 0, 1, nan}, {8, 16, 32, 64}},
                 {{ActivationKind::kRelu}, {0, 0, 1, nan}, {0, 0, 32, 64}},
                 {{ActivationKind::kLeakyRelu, 0.5}, {-1.5, 0, 1, nan}, {4, 8, 32, 32}}};
    for (const auto& one : cases) {
      BatchNormOptions options;
      options.eps = 0;
      options.activation = one.activation;
      Tensor y(dtype, {4, 1});
      const BatchStatistics s = batch_norm_forward(x.view(), {}, weight.view(), {}, residual.view(),
                                                   y.view(), {}, options, *self, serial_executor());
      EXPECT_TRUE(same_bits(y.values(), one.y));
      Tensor dx(dtype, {4, 1});
      Tensor dbias(DType::kFloat64, {1});
      Tensor dresidual(dtype, {4, 1});
      batch_norm_backward(dy.view(), x.view(), {}, weight.view(), {}, s, dx.view(), {},
                          dbias.view(), dresidual.view(), AffineGradients::kGlobal, *self,
                          serial_executor());
      EXPECT_TRUE(same_bits(dresidual.values(), one.dresidual));
      double sum = 0;
      for (const double u : one.dresidual) {
        sum += u;
      }
      EXPECT_EQ(dbias.get(0), sum);
    }
  }
}

struct Outcome {
  std::vector<double> y, dx, dresidual, dweight, dbias;
};

struct Data {
  DType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<double> x, z, dy, weight, bias;
};

/// Ranks r takes the samples [bounds[r], bounds[r+1]).
Outcome run(const Data& data, const std::vector<std::int64_t>& bounds, Memory memory, bool residual,
            const Activation& activation) {
  const auto ranks = static_cast<int>(bounds.size()) - 1;
  const std::int64_t per_sample = static_cast<std::int64_t>(data.x.size()) / data.sizes[0];
  ThreadGroup group(ranks);
  Outcome out;
  out.y.resize(data.x.size());
  out.dx = out.dresidual = out.y;
  const auto errors = run_ranks(ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::vector<std::int64_t> sizes = data.sizes;
    sizes[0] = bounds[r + 1] - bounds[r];
    const auto begin = bounds[r] * per_sample;
    const auto end = bounds[r + 1] * per_sample;
    const auto part = [&](const std::vector<double>& all) {
      Tensor tensor(data.dtype, sizes, memory);
      tensor.fill(std::vector<double>(all.begin() + begin, all.begin() + end));
      return tensor;
    };
    const auto put = [&](const Tensor& tensor, std::vector<double>& all) {
      const std::vector<double> mine = tensor.values();
      std::copy(mine.begin(), mine.end(), all.begin() + begin);
    };
    const Tensor x = part(data.x);
    const Tensor z = part(data.z);
    const Tensor dy = part(data.dy);
    Tensor y = part(data.x);
    Tensor dx = part(data.x);
    Tensor dresidual = part(data.x);
    const std::int64_t channels = sizes[1];
    const Tensor weight(DType::kFloat32, {channels}, data.weight);
    const Tensor bias(DType::kFloat32, {channels}, data.bias);
    Tensor dweight(DType::kFloat64, {channels});
    Tensor dbias(DType::kFloat64, {channels});
    BatchNormOptions options{.layer = 1};
    options.activation = activation;
    const BatchStatistics s = batch_norm_forward(x.view(), {}, weight.view(), bias.view(),
                                                 residual ? z.view() : TensorView(), y.view(), {},
                                                 options, group.rank(rank), serial_executor());
    batch_norm_backward(dy.view(), x.view(), {}, weight.view(), bias.view(), s, dx.view(),
                        dweight.view(), dbias.view(),
                        residual ? dresidual.view() : MutableTensorView(), AffineGradients::kGlobal,
                        group.rank(rank), serial_executor());
    put(y, out.y);
    put(dx, out.dx);
    put(dresidual, out.dresidual);
    if (rank == 0) {
      out.dweight = dweight.values();
      out.dbias = dbias.values();
    }
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error, nullptr);
  }
  return out;
}

TEST(Activation, AnyNumberOfRanksExact) {
  Random random(90);
  for (const DType dtype : kDtypes) {
    Data data{dtype, {12, 5, 4, 7}, {}, {}, {}, {}, {}};
    for (auto* values : {&data.x, &data.z, &data.dy}) {
      *values = rough_values(random, dtype, 12, 5 * 4 * 7);
    }
    for (int c = 0; c < 5; ++c) {
      data.weight.push_back(testing::round_to(DType::kFloat32, random.signed_unit()));
      data.bias.push_back(testing::round_to(DType::kFloat32, random.signed_unit()));
    }
    for (const Activation activation :
         {Activation{ActivationKind::kRelu}, Activation{ActivationKind::kLeakyRelu, 0.2}}) {
      for (const bool residual : {false, true}) {
        const Outcome one = run(data, {0, 12}, Memory::kPlanes, residual, activation);
        for (const std::vector<std::int64_t>& bounds :
             {std::vector<std::int64_t>{0, 5, 12}, {0, 0, 1, 12}, {0, 3, 6, 6, 9, 12}}) {
          const Outcome many = run(data, bounds, Memory::kRows, residual, activation);
          EXPECT_TRUE(same_bits(many.y, one.y));
          EXPECT_TRUE(same_bits(many.dx, one.dx));
          EXPECT_TRUE(same_bits(many.dweight, one.dweight));
          EXPECT_TRUE(same_bits(many.dbias, one.dbias));
          EXPECT_TRUE(!residual || same_bits(many.dresidual, one.dresidual));
        }
      }
    }
  }
}

// In evaluation u = dy through the activation, dx = weight * rstd * u; running statistics 0 and 1.
TEST(Activation, EvaluationByHandExact) {
  for (const DType dtype : kDtypes) {
    for (const bool with_residual : {false, true}) {
      const Tensor x(dtype, {1, 2, 2}, std::vector<double>{-1, 1, -2, 4});
      const Tensor residual(dtype, {1, 2, 2}, std::vector<double>{4, -4, 0, 0});
      const Tensor weight(DType::kFloat32, {2}, std::vector<double>{2, 0.5});
      const Tensor zeros(DType::kFloat32, {2}, std::vector<double>{0, 0});
      const Tensor ones(DType::kFloat32, {2}, std::vector<double>{1, 1});
      const Tensor dy(dtype, {1, 2, 2}, std::vector<double>{1, 2, 4, 8});
      const TensorView z = with_residual ? residual.view() : TensorView();
      BatchNormOptions options;
      options.eps = 0;
      options.activation.kind = ActivationKind::kRelu;
      Tensor y(dtype, {1, 2, 2});
      batch_norm_evaluate(x.view(), {}, weight.view(), {}, z, zeros.view(), ones.view(), y.view(),
                          options, serial_executor());
      EXPECT_EQ(y.values(), with_residual ? (std::vector<double>{2, 0, 0, 2})
                                          : (std::vector<double>{0, 2, 0, 2}));
      Tensor dx(dtype, {1, 2, 2});
      Tensor dresidual(dtype, {1, 2, 2});
      Tensor dweight(DType::kFloat32, {2});
      batch_norm_evaluate_backward(dy.view(), x.view(), {}, weight.view(), {}, z, zeros.view(),
                                   ones.view(), dx.view(), dweight.view(), {},
                                   with_residual ? dresidual.view() : MutableTensorView(), options,
                                   serial_executor());
      EXPECT_EQ(dx.values(), with_residual ? (std::vector<double>{2, 0, 0, 4})
                                           : (std::vector<double>{0, 4, 0, 4}));
      EXPECT_EQ(dweight.values(),
                with_residual ? (std::vector<double>{-1, 32}) : (std::vector<double>{2, 32}));
      if (with_residual) {
        EXPECT_EQ(dresidual.values(), (std::vector<double>{1, 0, 0, 8}));
      }
    }
  }
}

// |x' - x| <= k (|x - mean| + |bias / scale|) + 2 u |x| with k = 11 u32 + u, u the type's unit
// roundoff, u32 = 2^-24 (2^-53 for float64): docs/activation.md.
TEST(Activation, RecoveredInputWithinBound) {
  Random random(91);
  for (const DType dtype : kDtypes) {
    const double unit = dtype == DType::kFloat16    ? 0x1p-11
                        : dtype == DType::kBFloat16 ? 0x1p-8
                        : dtype == DType::kFloat32  ? 0x1p-24
                                                    : 0x1p-53;
    const double k = 11 * (dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24) + unit;
    for (const Memory memory : testing::kMemories) {
      Tensor x(dtype, {6, 19, 7, 3}, memory);
      std::vector<double> values(static_cast<std::size_t>(x.numel()));
      for (double& value : values) {
        value = testing::round_to(dtype, 3 + 2 * random.signed_unit());
      }
      x.fill(values);
      std::vector<double> w(19);
      std::vector<double> b(19);
      for (std::size_t c = 0; c < 19; ++c) {
        w[c] = testing::round_to(
            DType::kFloat32, (1 + std::abs(random.signed_unit())) * (random.one_in(2) ? 1 : -1));
        b[c] = testing::round_to(DType::kFloat32, random.signed_unit());
      }
      const Tensor weight(DType::kFloat32, {19}, w);
      const Tensor bias(DType::kFloat32, {19}, b);
      const auto self = self_communicator();
      BatchNormOptions options;
      options.activation = {ActivationKind::kLeakyRelu, 0.01};
      Tensor y = x;
      const BatchStatistics s =
          batch_norm_forward(std::as_const(y).view(), {}, weight.view(), bias.view(), {}, y.view(),
                             {}, options, *self, serial_executor());
      const std::vector<double> written = y.values();
      std::vector<std::uint8_t> mask(
          static_cast<std::size_t>(activation_mask_bytes(std::as_const(y).view())));
      recover_input(std::as_const(y).view(), s.mean.data(), s.rstd.data(), weight.view(),
                    bias.view(), y.view(), mask.data(), 0.01, serial_executor());
      EXPECT_TRUE(y.gaps_untouched());
      const std::vector<double> back = y.values();
      for (std::size_t i = 0; i < back.size(); ++i) {
        const std::size_t c = i / 21 % 19;
        const double allowed =
            k * (std::abs(values[i] - s.mean[c]) + std::abs(b[c] / (w[c] * s.rstd[c]))) +
            2 * unit * std::abs(values[i]);
        ASSERT_LE(std::abs(back[i] - values[i]), allowed) << i;
      }
      // The mask sends dy back as it went through y's sign.
      Tensor dy(dtype, {6, 19, 7, 3}, memory);
      dy.fill(std::vector<double>(values.size(), 1.0));
      Tensor u = dy;
      std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(dtype, 19)));
      local_gradients(std::as_const(dy).view(), std::as_const(y).view(), {}, s.mean.data(),
                      s.rstd.data(), {{ActivationKind::kLeakyRelu, 0.5}, {}, {}, mask.data()},
                      u.view(), message.data(), 0, serial_executor());
      const std::vector<double> sent = u.values();
      for (std::size_t i = 0; i < sent.size(); ++i) {
        ASSERT_EQ(sent[i], written[i] > 0 ? 1.0 : 0.5) << i;
      }
    }
  }
}

TEST(Activation, RefusedArguments) {
  const auto self = self_communicator();
  const Tensor x(DType::kFloat32, {2, 2}, std::vector<double>{1, 2, 3, 4});
  const Tensor other(DType::kFloat16, {2, 2}, std::vector<double>{1, 2, 3, 4});
  Tensor y(DType::kFloat32, {2, 2}, std::vector<double>{9, 9, 9, 9});
  const auto forward = [&](const TensorView& residual, const BatchNormOptions& options) {
    return thrown_text<InvalidArgument>([&] {
      batch_norm_forward(x.view(), {}, {}, {}, residual, y.view(), {}, options, *self,
                         serial_executor());
    });
  };
  EXPECT_TRUE(contains(forward(other.view(), {}), "residual: got float16"));
  EXPECT_TRUE(contains(forward(TensorView(x.view().data, DType::kFloat32, {2, 1}), {}),
                       "residual: got shape (2, 1)"));
  BatchNormOptions options;
  options.activation = {ActivationKind::kLeakyRelu, std::numeric_limits<double>::infinity()};
  EXPECT_TRUE(contains(forward({}, options), "activation.negative_slope: got inf"));
  options.activation = {static_cast<ActivationKind>(7)};
  EXPECT_TRUE(contains(forward({}, options), "activation: got number 7"));
  EXPECT_EQ(y.values(), std::vector<double>(4, 9));

  BatchStatistics statistics{{1, 2}, {1, 1}, {1, 1}, 2, 5};
  statistics.activation_mask.resize(3);
  EXPECT_TRUE(contains(thrown_text<InvalidArgument>([&] {
                         batch_norm_backward(x.view(), x.view(), {}, {}, {}, statistics, y.view(),
                                             {}, {}, {}, AffineGradients::kShare, *self,
                                             serial_executor());
                       }),
                       "statistics: got an activation mask of 3 bytes"));
}

}  // namespace
}  // namespace syncbn
