#include "layer_step.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>

#include "device.hpp"
#include "groups.hpp"
#include "layer_call.hpp"
#include "syncbn/cuda_batch_norm.hpp"
#include "syncbn/welford.hpp"

namespace syncbn::testing {
namespace {

using Doubles = std::vector<double>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

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

Tensors make(const LayerCase& c, std::int64_t samples, Random& random) {
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
  const auto rough = [&] { return rough_values(random, c.dtype, samples, c.channels * plane); };
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
void add_parameters(Tensors& t, const LayerCase& c, Random random) {
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

Extents mask_sizes(const TensorView& x) {
  Extents sizes{x.sizes[0]};
  for (std::size_t axis = 2; axis < x.sizes.size(); ++axis) {
    sizes.push_back(x.sizes[axis]);
  }
  return sizes;
}

/// The forward as the CPU's layer has it, from the records of CUDA.
BatchStatistics forward_from_records(const LayerCase& c, Tensors& t, const MaskView& mask,
                                     const TensorView& residual, const RunningStatistics& running,
                                     const BatchNormOptions& options, Communicator& communicator) {
  Executor& executor = serial_executor();
  const std::uint64_t layer =
      layer_identity(options.layer, options.activation, options.statistics, !residual.absent());
  std::vector<std::int64_t> record(size(kHeaderWords + welford_words(c.dtype, c.channels)));
  {
    const DeviceTurn turn;
    DeviceTensor x(t.x);
    const DeviceArray<std::uint8_t> bytes(t.mask);
    const DeviceArray<std::int64_t> call(1, c.call);
    const DeviceArray<std::int64_t> message(record);
    cuda::local_welford(x.view(),
                        c.mask ? MaskView{bytes.data(), mask.sizes, Device::kCuda} : MaskView{},
                        {layer, call.data(), options.eps}, message.data(), {});
    record = message.values();
  }
  const auto ranks = size(communicator.size());
  std::vector<std::int64_t> all(record.size() * ranks);
  communicator.all_gather(std::as_bytes(std::span(record)), std::as_writable_bytes(std::span(all)));
  std::array<std::int64_t, kHeaderWords> header{};
  for (std::size_t i = 0; i < ranks * header.size(); ++i) {
    header[i % header.size()] += all[i / header.size() * record.size() + i % header.size()];
  }
  const MessageInfo info = read_header(header.data(), communicator.size());
  BatchStatistics s;
  s.mean.resize(size(c.channels));
  s.var = s.mean;
  s.rstd = s.mean;
  s.count = info.count;
  s.activation = options.activation;
  s.fingerprint = fingerprint(layer, options.call, Direction::kForward, c.channels, options.eps);
  merge_welford(info, all.data() + kHeaderWords, s.mean.data(), s.var.data(), s.rstd.data(),
                c.channels, communicator.size(), static_cast<std::int64_t>(record.size()),
                options.eps);
  const bool keeps_mask = c.residual && options.activation.kind != ActivationKind::kNone;
  s.activation_mask.resize(keeps_mask ? size(activation_mask_bytes(t.x.view())) : 0);
  normalize(t.x.view(), mask, s.mean.data(), s.rstd.data(), t.weight.view(), t.bias.view(),
            residual, t.y.view(), keeps_mask ? s.activation_mask.data() : nullptr,
            options.activation, executor);
  if (c.running && s.count > 0) {
    t.tracked += 1;
    update_running_statistics(running.mean, running.var, s.mean.data(), s.var.data(), c.channels,
                              s.count,
                              options.momentum.value_or(1.0 / static_cast<double>(t.tracked)));
  }
  return s;
}

void step_on_cpu(const LayerCase& c, Tensors& t, Communicator& communicator) {
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
      c.records_of_cuda
          ? forward_from_records(c, t, mask, residual, running, options, communicator)
          : batch_norm_forward(t.x.view(), mask, t.weight.view(), t.bias.view(), residual,
                               t.y.view(), running, options, communicator, executor);
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

void step_on_cuda(const LayerCase& c, Tensors& t, cuda::Communicator& communicator) {
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
  const DeviceArray<std::int64_t> workspace(cuda::batch_norm_workspace_words(
      c.dtype, c.channels, c.options.statistics, communicator.size()));
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

}  // namespace

void compare_layers(const LayerCase& c, const std::vector<std::int64_t>& samples, Random& random) {
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

}  // namespace syncbn::testing
