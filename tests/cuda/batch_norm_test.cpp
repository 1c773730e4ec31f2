#include "syncbn/cuda_batch_norm.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "device.hpp"
#include "groups.hpp"
#include "syncbn/error.hpp"

// A layer on CUDA against the same layer on CPU, rank for rank and bit for bit: every pass, type,
// memory layout and option. torch.nn.SyncBatchNorm has no CPU form to compare with.
namespace syncbn {
namespace {

using testing::contains;
using testing::device_communicator;
using testing::DeviceArray;
using testing::DeviceTensor;
using testing::DeviceTurn;
using testing::expect_no_errors;
using testing::kDtypes;
using testing::kMemories;
using testing::Memory;
using testing::Random;
using testing::run_ranks;
using testing::same_bits;
using testing::Tensor;
using testing::text_of;
using testing::thrown_text;
using Doubles = std::vector<double>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// What all ranks have in common.
struct Case {
  DType dtype = DType::kFloat32;
  std::int64_t channels = 1;
  std::vector<std::int64_t> spatial;
  BatchNormOptions options;
  bool residual = false;
  bool mask = false;
  bool running = true;
  AffineGradients which = AffineGradients::kShare;
  std::int64_t call = 0;
};

/// A rank's tensors before and after a step.
struct Tensors {
  Tensor x, dy, residual, y, dx, dresidual;             // (N, C, spatial...)
  Tensor evaluated, evaluated_dx, evaluated_dresidual;  // the same
  Tensor weight, bias, running_mean, running_var;       // (C)
  Tensor dweight, dbias, evaluated_dweight, evaluated_dbias;
  std::vector<std::uint8_t> mask;
  Doubles mean, var, rstd;
  std::int64_t tracked = 0, call = 0, count = 0, fingerprint = 0;
};

Tensor filled(Tensor tensor, const Doubles& values) {
  tensor.fill(values);
  return tensor;
}

Tensors make(const Case& c, std::int64_t samples, Random& random) {
  Tensors t;
  std::vector<std::int64_t> sizes = {samples, c.channels};
  std::int64_t plane = 1;
  for (const std::int64_t s : c.spatial) {
    sizes.push_back(s);
    plane *= s;
  }
  const auto memory = [&] { return random.pick(kMemories); };
  const Memory common = memory();
  const auto place = [&] { return random.one_in(3) ? memory() : common; };
  const auto rough = [&] {
    return testing::rough_values(random, c.dtype, samples, c.channels * plane);
  };
  t.x = filled(Tensor(c.dtype, sizes, common), rough());
  t.dy = filled(Tensor(c.dtype, sizes, place()), rough());
  t.residual = filled(Tensor(c.dtype, sizes, place()), rough());
  for (Tensor* out :
       {&t.y, &t.dx, &t.dresidual, &t.evaluated, &t.evaluated_dx, &t.evaluated_dresidual}) {
    *out = Tensor(c.dtype, sizes, place());
  }
  t.mask.resize(size(samples * plane));
  for (std::uint8_t& counts : t.mask) {
    counts = random.one_in(4) ? 0 : 1;
  }
  return t;
}

/// Parameters and buffers, the same on every rank.
void add_parameters(Tensors& t, const Case& c, Random random) {
  const auto values = [&](double low) {
    Doubles out(size(c.channels));
    for (double& value : out) {
      value = low + 2 * std::abs(random.signed_unit());
    }
    return out;
  };
  const auto tensor = [&](double low) {
    return filled(
        Tensor(random.pick<DType>({kDtypes[0], kDtypes[1], kDtypes[2], kDtypes[3]}), {c.channels}),
        values(low));
  };
  t.weight = tensor(-1);
  t.bias = tensor(-1);
  t.running_mean = tensor(-1);
  t.running_var = tensor(0);
  for (Tensor* out : {&t.dweight, &t.dbias, &t.evaluated_dweight, &t.evaluated_dbias}) {
    *out = Tensor(DType::kFloat64, {c.channels});
  }
  t.tracked = 3;
  t.call = c.call;
}

std::vector<std::int64_t> mask_sizes(const TensorView& x) {
  std::vector<std::int64_t> sizes = x.sizes;
  sizes.erase(sizes.begin() + 1);
  return sizes;
}

void step_on_cpu(const Case& c, Tensors& t, Communicator& communicator) {
  Executor& executor = serial_executor();
  const MaskView mask = c.mask ? MaskView{t.mask.data(), mask_sizes(t.x.view())} : MaskView{};
  const TensorView residual = c.residual ? TensorView(t.residual.view()) : TensorView();
  const MutableTensorView dresidual = c.residual ? t.dresidual.view() : MutableTensorView();
  BatchNormOptions options = c.options;
  options.call = static_cast<std::uint64_t>(c.call);
  RunningStatistics running;
  if (c.running) {
    running = {t.running_mean.view(), t.running_var.view(), &t.tracked};
  }
  const BatchStatistics s =
      batch_norm_forward(t.x.view(), mask, t.weight.view(), t.bias.view(), residual, t.y.view(),
                         running, options, communicator, executor);
  t.call += 1;
  t.mean = s.mean;
  t.var = s.var;
  t.rstd = s.rstd;
  t.count = s.count;
  t.fingerprint = s.fingerprint;
  batch_norm_backward(t.dy.view(), t.x.view(), mask, t.weight.view(), t.bias.view(), s, t.dx.view(),
                      t.dweight.view(), t.dbias.view(), dresidual, c.which, communicator, executor);
  const TensorView mean = c.running ? TensorView(t.running_mean.view()) : TensorView();
  const TensorView var = c.running ? TensorView(t.running_var.view()) : TensorView();
  batch_norm_evaluate(t.x.view(), mask, t.weight.view(), t.bias.view(), residual, mean, var,
                      t.evaluated.view(), options, executor);
  if (c.running) {
    batch_norm_evaluate_backward(
        t.dy.view(), t.x.view(), mask, t.weight.view(), t.bias.view(), residual, mean, var,
        t.evaluated_dx.view(), t.evaluated_dweight.view(), t.evaluated_dbias.view(),
        c.residual ? t.evaluated_dresidual.view() : MutableTensorView(), options, executor);
  }
}

void step_on_cuda(const Case& c, Tensors& t, cuda::Communicator& communicator) {
  const cuda::Stream stream;
  const auto absent_unless = [](bool there, Tensor& tensor) {
    return there ? DeviceTensor(tensor) : DeviceTensor();
  };
  DeviceTensor x(t.x), dy(t.dy), y(t.y), dx(t.dx), evaluated(t.evaluated);
  DeviceTensor evaluated_dx(t.evaluated_dx), weight(t.weight), bias(t.bias);
  DeviceTensor dweight(t.dweight), dbias(t.dbias);
  DeviceTensor evaluated_dweight(t.evaluated_dweight), evaluated_dbias(t.evaluated_dbias);
  DeviceTensor residual = absent_unless(c.residual, t.residual);
  DeviceTensor dresidual = absent_unless(c.residual, t.dresidual);
  DeviceTensor evaluated_dresidual = absent_unless(c.residual, t.evaluated_dresidual);
  DeviceTensor running_mean = absent_unless(c.running, t.running_mean);
  DeviceTensor running_var = absent_unless(c.running, t.running_var);
  const DeviceArray<std::uint8_t> mask_bytes(t.mask);
  const MaskView mask =
      c.mask ? MaskView{mask_bytes.data(), mask_sizes(t.x.view()), Device::kCuda} : MaskView{};
  const DeviceArray<std::int64_t> counters(std::vector<std::int64_t>{t.tracked, t.call});
  const DeviceArray<double> mean(c.channels), var(c.channels), rstd(c.channels);
  const DeviceArray<std::int64_t> info(cuda::kInfoWords, -9);
  const DeviceArray<std::uint8_t> bits(activation_mask_bytes(t.x.view()));
  const DeviceArray<std::int64_t> workspace(cuda::batch_norm_workspace_words(c.dtype, c.channels));
  const bool keeps_mask = c.residual && c.options.activation.kind != ActivationKind::kNone;
  const cuda::BatchStatistics statistics{mean.data(), var.data(), rstd.data(), info.data(),
                                         keeps_mask ? bits.data() : nullptr};
  cuda::RunningStatistics running;
  running.call = counters.data() + 1;
  if (c.running) {
    running.mean = running_mean.view();
    running.var = running_var.view();
    running.num_batches_tracked = counters.data();
  }
  cuda::batch_norm_forward(x.view(), mask, weight.view(), bias.view(), residual.view(), y.view(),
                           running, statistics, c.options, communicator, workspace.data(), stream);
  cuda::batch_norm_backward(dy.view(), x.view(), mask, weight.view(), bias.view(), statistics,
                            dx.view(), dweight.view(), dbias.view(), dresidual.view(),
                            c.options.activation, c.which, communicator, workspace.data(), stream);
  cuda::batch_norm_evaluate(x.view(), mask, weight.view(), bias.view(), residual.view(),
                            running_mean.view(), running_var.view(), evaluated.view(), c.options,
                            workspace.data(), stream);
  if (c.running) {
    cuda::batch_norm_evaluate_backward(
        dy.view(), x.view(), mask, weight.view(), bias.view(), residual.view(), running_mean.view(),
        running_var.view(), evaluated_dx.view(), evaluated_dweight.view(), evaluated_dbias.view(),
        evaluated_dresidual.view(), c.options, bits.data(), workspace.data(), stream);
    t.running_mean = running_mean.fetch();
    t.running_var = running_var.fetch();
    t.evaluated_dx = evaluated_dx.fetch();
    t.evaluated_dweight = evaluated_dweight.fetch();
    t.evaluated_dbias = evaluated_dbias.fetch();
  }
  if (c.residual) {
    t.dresidual = dresidual.fetch();
    t.evaluated_dresidual = c.running ? evaluated_dresidual.fetch() : t.evaluated_dresidual;
  }
  t.y = y.fetch();
  t.dx = dx.fetch();
  t.evaluated = evaluated.fetch();
  t.dweight = dweight.fetch();
  t.dbias = dbias.fetch();
  t.mean = mean.values();
  t.var = var.values();
  t.rstd = rstd.values();
  t.tracked = counters.values()[0];
  t.call = counters.values()[1];
  t.count = info.values()[0];
  t.fingerprint = info.values()[1];
}

void expect_same(const Tensors& cuda, const Tensors& cpu) {
  const auto same = [](const char* name, const Tensor& actual, const Tensor& expected) {
    if (expected.numel() > 0) {
      EXPECT_TRUE(same_bits(actual.values(), expected.values())) << name;
      EXPECT_TRUE(actual.gaps_untouched()) << name;
    }
  };
  same("y", cuda.y, cpu.y);
  same("dx", cuda.dx, cpu.dx);
  same("dresidual", cuda.dresidual, cpu.dresidual);
  same("evaluated", cuda.evaluated, cpu.evaluated);
  same("evaluated_dx", cuda.evaluated_dx, cpu.evaluated_dx);
  same("evaluated_dresidual", cuda.evaluated_dresidual, cpu.evaluated_dresidual);
  same("running_mean", cuda.running_mean, cpu.running_mean);
  same("running_var", cuda.running_var, cpu.running_var);
  same("dweight", cuda.dweight, cpu.dweight);
  same("dbias", cuda.dbias, cpu.dbias);
  same("evaluated_dweight", cuda.evaluated_dweight, cpu.evaluated_dweight);
  same("evaluated_dbias", cuda.evaluated_dbias, cpu.evaluated_dbias);
  EXPECT_TRUE(same_bits(cuda.mean, cpu.mean));
  EXPECT_TRUE(same_bits(cuda.var, cpu.var));
  EXPECT_TRUE(same_bits(cuda.rstd, cpu.rstd));
  EXPECT_EQ(cuda.tracked, cpu.tracked);
  EXPECT_EQ(cuda.call, cpu.call);
  EXPECT_EQ(cuda.count, cpu.count);
  EXPECT_EQ(cuda.fingerprint, cpu.fingerprint);
}

void compare(const Case& c, const std::vector<std::int64_t>& samples, Random& random) {
  std::vector<Tensors> cuda;
  for (const std::int64_t n : samples) {
    cuda.push_back(make(c, n, random));
    add_parameters(cuda.back(), c, Random(7));
  }
  std::vector<Tensors> cpu = cuda;
  const int ranks = static_cast<int>(samples.size());
  ThreadGroup of_cpu(ranks), of_cuda(ranks);
  expect_no_errors(run_ranks(
      ranks, [&](int r) { step_on_cpu(c, cpu[static_cast<std::size_t>(r)], of_cpu.rank(r)); }));
  expect_no_errors(run_ranks(ranks, [&](int r) {
    const DeviceTurn turn;
    step_on_cuda(c, cuda[static_cast<std::size_t>(r)], *device_communicator(of_cuda.rank(r)));
  }));
  for (int r = 0; r < ranks; ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    expect_same(cuda[static_cast<std::size_t>(r)], cpu[static_cast<std::size_t>(r)]);
  }
}

void random_steps(int first, int last) {
  for (int i = first; i < last && !::testing::Test::HasFailure(); ++i) {
    Random random(static_cast<std::uint64_t>(1000 + i));
    Case c;
    c.dtype = kDtypes[i % 4];
    c.channels = random.pick<std::int64_t>({1, 2, 5, 8, 16, 33, 64});
    c.spatial = random.pick<std::vector<std::int64_t>>(
        {{}, {1}, {7}, {16}, {7, 7}, {8, 8}, {3, 5, 2}, {23, 27}});
    c.options.eps = random.pick<double>({1e-5, 1e-3, 0});
    c.options.layer = random.bits();
    c.options.momentum =
        random.one_in(3) ? std::nullopt : std::optional<double>(random.one_in(2) ? 0.1 : 1.0);
    c.options.activation.kind = static_cast<ActivationKind>(random.between(0, 2));
    c.residual = random.one_in(2);
    c.mask = random.one_in(3);
    c.running = !random.one_in(4);
    c.which = random.one_in(2) ? AffineGradients::kGlobal : AffineGradients::kShare;
    c.call = random.between(0, 9);
    std::vector<std::int64_t> samples;
    for (std::int64_t ranks = random.pick<std::int64_t>({1, 1, 2, 3}); ranks > 0; --ranks) {
      samples.push_back(random.pick<std::int64_t>({0, 1, 2, 5, 9}));
    }
    SCOPED_TRACE("case " + std::to_string(i) + ", " + name(c.dtype) + ", " +
                 std::to_string(c.channels) + " channels, " + std::to_string(samples.size()) +
                 " ranks");
    compare(c, samples, random);
  }
}

TEST(CudaBatchNorm, RandomStepsExact) {
  SYNCBN_NEEDS_DEVICE();
  random_steps(0, testing::device_cases());
}

/// What compute-sanitizer runs, at a hundredth of the speed.
TEST(CudaBatchNorm, FewRandomStepsExact) {
  SYNCBN_NEEDS_DEVICE();
  random_steps(500, 516);
}

/// Enough of everything that many blocks share a channel and many channels a block.
TEST(CudaBatchNorm, LargeShapesExact) {
  SYNCBN_NEEDS_DEVICE();
  const bool gpu = testing::device_cases() > 100;
  Random random(31);
  for (const DType dtype : kDtypes) {
    for (const auto& spatial : std::vector<std::vector<std::int64_t>>{{}, {14, 14}, {57, 57}}) {
      Case c;
      c.dtype = dtype;
      c.spatial = spatial;
      c.channels = gpu ? 70 : 6;
      SCOPED_TRACE(std::string(name(dtype)) + ", " + std::to_string(spatial.size()) + " axes");
      compare(c, {spatial.empty() && gpu ? 3000 : 12, 4}, random);
    }
  }
}

TEST(CudaBatchNorm, RefusedArgumentsReachEveryRankAndChangeNothing) {
  SYNCBN_NEEDS_DEVICE();
  ThreadGroup group(2);
  const auto errors = run_ranks(2, [&](int r) {
    const DeviceTurn turn;
    DeviceTensor x(Tensor(DType::kFloat32, {2, 3}, Doubles(6, 1.0)));
    DeviceTensor y(Tensor(DType::kFloat32, {2, 3}, Doubles(6, 5.0)));
    DeviceTensor running(Tensor(DType::kFloat32, {3}, Doubles(3, 2.0)));
    const DeviceArray<double> values(9);
    const DeviceArray<std::int64_t> info(cuda::kInfoWords);
    const DeviceArray<std::int64_t> workspace(cuda::batch_norm_workspace_words(DType::kFloat32, 3));
    BatchNormOptions options;
    options.eps = r == 1 ? -1 : 1e-5;
    const auto check = [&] {
      EXPECT_EQ(y.fetch().values(), Doubles(6, 5.0));
      EXPECT_EQ(running.fetch().values(), Doubles(3, 2.0));
    };
    const auto communicator = device_communicator(group.rank(r));
    try {
      cuda::batch_norm_forward(
          x.view(), {}, {}, {}, {}, y.view(), {running.view(), running.view(), nullptr, nullptr},
          {values.data(), values.data() + 3, values.data() + 6, info.data(), nullptr}, options,
          *communicator, workspace.data(), {});
    } catch (...) {
      check();
      throw;
    }
  });
  EXPECT_TRUE(contains(text_of<InvalidArgument>(errors[1]), "eps: got -1"));
  EXPECT_TRUE(contains(text_of<PeerLost>(errors[0]), "rank 1 left the group: eps: got -1"));
}

TEST(CudaBatchNorm, WrongArgumentsAreNamed) {
  SYNCBN_NEEDS_DEVICE();
  DeviceTensor x(Tensor(DType::kFloat32, {2, 3}, Doubles(6, 1.0)));
  const DeviceArray<double> values(9);
  const DeviceArray<std::int64_t> info(cuda::kInfoWords);
  const DeviceArray<std::int64_t> workspace(cuda::batch_norm_workspace_words(DType::kFloat32, 3));
  const cuda::BatchStatistics good{values.data(), values.data() + 3, values.data() + 6,
                                   info.data()};
  const auto forward = [&](const TensorView& in, const TensorView& residual,
                           const cuda::BatchStatistics& statistics, const BatchNormOptions& options,
                           std::int64_t* memory) {
    ThreadGroup group(1);
    return thrown_text<InvalidArgument>([&] {
      const DeviceTurn turn;
      MutableTensorView out = x.view();
      out.device = in.device;
      cuda::batch_norm_forward(in, {}, {}, {}, residual, out, {}, statistics, options,
                               *device_communicator(group.rank(0)), memory, {});
    });
  };
  TensorView on_cpu = x.view();
  on_cpu.device = Device::kCpu;
  EXPECT_TRUE(contains(forward(on_cpu, {}, good, {}, workspace.data()),
                       "x: got a tensor on CPU, expected one on CUDA"));
  EXPECT_TRUE(contains(forward(x.view(), {}, good, {}, nullptr),
                       "workspace: got null, expected batch_norm_workspace_words(x.dtype, C)"));
  EXPECT_TRUE(contains(forward(x.view(), {}, {}, {}, workspace.data()),
                       "statistics.mean: got null, expected C entries"));
  BatchNormOptions options;
  options.call = 3;
  EXPECT_TRUE(contains(forward(x.view(), {}, good, options, workspace.data()),
                       "options.call: got 3, expected 0"));
  options = {};
  options.statistics = Statistics::kWelford;
  EXPECT_TRUE(contains(forward(x.view(), {}, good, options, workspace.data()),
                       "options.statistics: got welford, expected reproducible"));
  options = {};
  options.activation.kind = ActivationKind::kRelu;
  EXPECT_TRUE(contains(forward(x.view(), x.view(), good, options, workspace.data()),
                       "statistics.activation_mask: got null"));
}

/// Two layers meet: an error on the host would need to wait for the device.
TEST(CudaBatchNorm, DisagreementGivesNaNAndKeepsRunningStatistics) {
  SYNCBN_NEEDS_DEVICE();
  ThreadGroup group(2);
  expect_no_errors(run_ranks(2, [&](int r) {
    const DeviceTurn turn;
    DeviceTensor x(Tensor(DType::kFloat32, {2, 3}, Doubles{1, 2, 3, 4, 5, 6}));
    DeviceTensor y(Tensor(DType::kFloat32, {2, 3}));
    DeviceTensor dx(Tensor(DType::kFloat32, {2, 3}));
    DeviceTensor running(Tensor(DType::kFloat32, {3}, Doubles(3, 2.0)));
    const DeviceArray<double> values(9);
    const DeviceArray<std::int64_t> info(cuda::kInfoWords);
    const DeviceArray<std::int64_t> workspace(cuda::batch_norm_workspace_words(DType::kFloat32, 3));
    const cuda::BatchStatistics statistics{values.data(), values.data() + 3, values.data() + 6,
                                           info.data()};
    BatchNormOptions options;
    options.layer = static_cast<std::uint64_t>(r);
    const auto communicator = device_communicator(group.rank(r));
    cuda::batch_norm_forward(x.view(), {}, {}, {}, {}, y.view(),
                             {running.view(), running.view(), nullptr, nullptr}, statistics,
                             options, *communicator, workspace.data(), {});
    cuda::batch_norm_backward(x.view(), x.view(), {}, {}, {}, statistics, dx.view(), {}, {}, {}, {},
                              AffineGradients::kShare, *communicator, workspace.data(), {});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(same_bits(y.fetch().values(), Doubles(6, nan)));
    EXPECT_TRUE(same_bits(dx.fetch().values(), Doubles(6, nan)));
    EXPECT_EQ(running.fetch().values(), Doubles(3, 2.0));
    EXPECT_EQ(info.values()[0], -1);
  }));
}

}  // namespace
}  // namespace syncbn
