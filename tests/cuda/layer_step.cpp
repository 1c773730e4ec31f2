// SPDX-License-Identifier: Apache-2.0
#include "layer_step.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>

#include "cuda/passes.hpp"
#include "device.hpp"
#include "groups.hpp"
#include "layer.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"

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
  std::int64_t tracked = 0, count = 0;
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
}

Extents mask_sizes(const TensorView& x) {
  Extents sizes{x.sizes[0]};
  for (std::size_t axis = 2; axis < x.sizes.size(); ++axis) {
    sizes.push_back(x.sizes[axis]);
  }
  return sizes;
}

/// The forward as the CPU's layer has it, from the records of CUDA.
void forward_from_records(const LayerState& layer, const BatchNorm::Forward& f, Tensors& t,
                          SavedState& saved) {
  const BatchNorm::Options& options = layer.options;
  Communicator& communicator = *layer.on_cpu;
  const std::int64_t channels = options.channels;
  const std::uint64_t identity =
      layer_identity(layer.number, options.activation, options.statistics, !f.residual.absent(),
                     !f.weight.absent(), !f.bias.absent());
  std::vector<std::int64_t> record(size(kHeaderWords + welford_words(f.x.dtype, channels)));
  {
    const DeviceTurn turn;
    DeviceTensor x(t.x);
    const DeviceArray<std::uint8_t> bytes(t.mask);
    const DeviceArray<std::int64_t> message(record);
    cuda::local_welford(
        x.view(),
        f.mask.absent() ? MaskView{} : MaskView{bytes.data(), f.mask.sizes, Device::kCuda},
        {identity, nullptr, options.eps}, message.data(), {});
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
  saved.reserve(f.x, !f.residual.absent() && options.activation.kind != ActivationKind::kNone,
                nullptr);
  saved.keep(f);
  saved.info[0] = info.count;
  saved.info[1] = fingerprint(identity, 0, Direction::kForward, channels, options.eps);
  merge_welford(info, all.data() + kHeaderWords, saved.mean, saved.var, saved.rstd, channels,
                communicator.size(), static_cast<std::int64_t>(record.size()), options.eps);
  normalize({f.x, f.mask, saved.mean, saved.rstd, f.weight, f.bias, f.residual, f.y,
             saved.activation_mask, options.activation},
            {});
  if (!f.running_mean.absent() && info.count > 0) {
    t.tracked += 1;
    update_running_statistics(f.running_mean, f.running_var, saved.mean, saved.var, channels,
                              info.count,
                              options.momentum.value_or(1.0 / static_cast<double>(t.tracked)));
  }
}

Doubles copied(const double* values, const Tensors& t) {
  return {values, values + t.weight.numel()};
}

BatchNorm::Options options_of(const LayerCase& c) {
  BatchNorm::Options options = c.options;
  options.channels = c.channels;
  return options;
}

void step_on_cpu(const LayerCase& c, Tensors& t, Communicator& communicator) {
  const MaskView mask = c.mask ? MaskView{t.mask.data(), mask_sizes(t.x.view())} : MaskView{};
  const TensorView residual = c.residual ? TensorView(t.residual.view()) : TensorView();
  BatchNorm::Forward forward{.x = t.x.view(),
                             .mask = mask,
                             .weight = t.weight.view(),
                             .bias = t.bias.view(),
                             .residual = residual,
                             .y = t.y.view()};
  BatchNorm::Evaluate evaluate{.x = forward.x,
                               .mask = mask,
                               .weight = forward.weight,
                               .bias = forward.bias,
                               .residual = residual,
                               .y = t.evaluated.view()};
  if (c.running) {
    forward.running_mean = t.running_mean.view();
    forward.running_var = t.running_var.view();
    forward.num_batches_tracked = &t.tracked;
    evaluate.running_mean = forward.running_mean;
    evaluate.running_var = forward.running_var;
  }
  const BatchNorm::Backward backward{
      .dy = t.dy.view(),
      .x = forward.x,
      .mask = mask,
      .weight = forward.weight,
      .bias = forward.bias,
      .dx = t.dx.view(),
      .dweight = t.dweight.view(),
      .dbias = t.dbias.view(),
      .dresidual = c.residual ? t.dresidual.view() : MutableTensorView(),
      .affine = c.which};
  BatchNorm layer(options_of(c), communicator);
  if (c.records_of_cuda) {
    LayerState state(options_of(c), {});
    state.on_cpu = &communicator;
    SavedState saved({});
    forward_from_records(state, forward, t, saved);
    backward_on_cpu(state, {state, 0, "backward", forward.x}, backward, saved, {});
    t.mean = copied(saved.mean, t);
    t.var = copied(saved.var, t);
    t.rstd = copied(saved.rstd, t);
    t.count = saved.info[0];
  } else {
    Saved saved;
    for (int step = 0; step < c.steps; ++step) {
      layer.forward(forward, saved);
      layer.backward(backward, saved);
    }
    t.mean = copied(saved.mean().data(), t);
    t.var = copied(saved.var().data(), t);
    t.rstd = copied(saved.rstd().data(), t);
    t.count = saved.count();
  }
  layer.evaluate(evaluate);
  if (c.running) {
    layer.evaluate_backward(
        {.dy = t.dy.view(),
         .x = forward.x,
         .mask = mask,
         .weight = forward.weight,
         .bias = forward.bias,
         .residual = residual,
         .running_mean = evaluate.running_mean,
         .running_var = evaluate.running_var,
         .dx = t.evaluated_dx.view(),
         .dweight = t.evaluated_dweight.view(),
         .dbias = t.evaluated_dbias.view(),
         .dresidual = c.residual ? t.evaluated_dresidual.view() : MutableTensorView()});
  }
}

Doubles fetched(std::span<const double> on_device) {
  Doubles values(on_device.size());
  copy_from_device(values.data(), on_device.data(), on_device.size_bytes());
  return values;
}

void step_on_cuda(const LayerCase& c, Tensors& t, cuda::Communicator& communicator) {
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
  const DeviceArray<std::int64_t> tracked(1, t.tracked);
  const BatchNorm::Forward forward{.x = x.view(),
                                   .mask = mask,
                                   .weight = weight.view(),
                                   .bias = bias.view(),
                                   .residual = residual.view(),
                                   .y = y.view(),
                                   .running_mean = running_mean.view(),
                                   .running_var = running_var.view(),
                                   .num_batches_tracked = c.running ? tracked.data() : nullptr};
  const BatchNorm::Backward backward{.dy = dy.view(),
                                     .x = forward.x,
                                     .mask = mask,
                                     .weight = forward.weight,
                                     .bias = forward.bias,
                                     .dx = dx.view(),
                                     .dweight = dweight.view(),
                                     .dbias = dbias.view(),
                                     .dresidual = dresidual.view(),
                                     .affine = c.which};
  BatchNorm layer(options_of(c), communicator);
  Saved saved;
  for (int step = 0; step < c.steps; ++step) {
    layer.forward(forward, saved);
    layer.backward(backward, saved);
  }
  layer.evaluate({.x = forward.x,
                  .mask = mask,
                  .weight = forward.weight,
                  .bias = forward.bias,
                  .residual = forward.residual,
                  .running_mean = forward.running_mean,
                  .running_var = forward.running_var,
                  .y = evaluated.view()});
  if (c.running) {
    layer.evaluate_backward({.dy = backward.dy,
                             .x = forward.x,
                             .mask = mask,
                             .weight = forward.weight,
                             .bias = forward.bias,
                             .residual = forward.residual,
                             .running_mean = forward.running_mean,
                             .running_var = forward.running_var,
                             .dx = evaluated_dx.view(),
                             .dweight = evaluated_dweight.view(),
                             .dbias = evaluated_dbias.view(),
                             .dresidual = evaluated_dresidual.view()});
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
  t.mean = fetched(saved.mean());
  t.var = fetched(saved.var());
  t.rstd = fetched(saved.rstd());
  t.tracked = tracked.values()[0];
  t.count = saved.count();
  layer.check();
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
  EXPECT_EQ(cuda.count, cpu.count);
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
