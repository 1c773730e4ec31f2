// SPDX-License-Identifier: Apache-2.0
#include "layer/layer.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>

#include "layer/layer_exchange.hpp"
#include "step/device.hpp"
#include "syncbn/step.hpp"
#include "tensors/checks.hpp"
#include "tensors/scratch.hpp"

// A layer's checks, exchange and memory around the step, on the CPU and on CUDA.
namespace syncbn {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

bool activated(const LayerState& layer) {
  return layer.options.activation.kind != ActivationKind::kNone;
}

/// Memory for one call, cut up: the layer's on CUDA, its thread's on the CPU.
struct Workspace {
  double* mean = nullptr;
  double* var = nullptr;
  double* rstd = nullptr;
  double* coefficients = nullptr;
  std::int64_t* info = nullptr;
  std::int64_t* sums = nullptr;  ///< CUDA: of the passes, which leave it zero
  std::span<std::int64_t> message;
  std::span<std::int64_t> merged;

  Workspace() = default;
  Workspace(LayerState& layer, const TensorView& x, void* stream, int messages)
      : Workspace(layer, x, stream, messages, message_words(x.dtype, x.sizes[1])) {}
  /// messages: of message and merged, how many are needed, of `length` words each.
  Workspace(LayerState& layer, const TensorView& x, void* stream, int messages,
            std::int64_t length) {
    const std::int64_t channels = x.sizes[1];
    const std::int64_t all = messages * length + 6 * channels + kInfoWords;
    std::int64_t* words = nullptr;
    if (x.device == Device::kCuda) {
      const auto reserved = [&](Block& block, std::int64_t count) {
        return static_cast<std::int64_t*>(
            block.reserve(size(count) * sizeof(std::int64_t), Device::kCuda, stream));
      };
      // Of its own: another dtype has other places in the rest.
      sums = reserved(layer.sums, workspace_words(x.dtype, channels));
      words = reserved(layer.scratch, all);
    } else {
      words = of_thread_.emplace(size(all)).data();
    }
    const auto take = [&](std::int64_t count) {
      std::int64_t* from = words;
      words += count;
      return from;
    };
    const auto take_doubles = [&](std::int64_t count) {
      static_assert(sizeof(double) == sizeof(std::int64_t));
      return reinterpret_cast<double*>(take(count));
    };
    mean = take_doubles(channels);
    var = take_doubles(channels);
    rstd = take_doubles(channels);
    coefficients = take_doubles(3 * channels);
    info = take(kInfoWords);
    for (auto* const words_of : {&message, &merged}) {
      if (messages-- > 0) {
        *words_of = {take(length), size(length)};
      }
    }
  }

 private:
  std::optional<cpu::ScratchArray<std::int64_t>> of_thread_;
};

/// The sum of all ranks' messages; alone, this rank's own.
Merged summed(cuda::Communicator& communicator, int ranks, const Workspace& w, DType dtype,
              const cuda::Stream& stream) {
  const std::int64_t* header = w.message.data();
  if (ranks > 1) {
    communicator.all_reduce_sum(w.message, w.merged, stream);
    header = w.merged.data();
  }
  return {header, header + kHeaderWords, dtype, ranks};
}

/// What a layer keeps on the device: how many calls it had, and the last one's info.
struct Counters {
  std::int64_t* call;
  std::int64_t* info;
  Counters(LayerState& layer, void* stream)
      : call(static_cast<std::int64_t*>(layer.counters.reserve(
            (1 + kInfoWords) * sizeof(std::int64_t), Device::kCuda, stream))),
        info(call + 1) {}
};

void check_on_cpu(const TensorView& x) {
  if (x.device != Device::kCpu) {
    throw InvalidArgument(
        "x: got a tensor on CUDA, expected one on the CPU, as the layer's communicator is; "
        "cuda::staged_communicator makes a communicator for CUDA from it");
  }
}
void check_on_cuda(const TensorView& x) {
  cuda_passes();
  if (x.device != Device::kCuda) {
    throw InvalidArgument(
        "x: got a tensor on the CPU, expected one on CUDA, as the layer's communicator is");
  }
}

AgreedCall agreed(const LayerCall& call, Direction direction, const TensorView& weight,
                  const TensorView& bias) {
  AgreedCall agreed;
  agreed.options = &call.layer.options;
  agreed.place = call.layer.place;
  agreed.direction = direction;
  agreed.name = call.layer.name;
  agreed.layer = call.layer.number;
  agreed.call = call.number.value_or(0);
  agreed.channels = call.x.sizes[1];
  agreed.dtype = call.x.dtype;
  agreed.elements = std::find(call.x.sizes.begin(), call.x.sizes.end(), 0) == call.x.sizes.end();
  agreed.weight = !weight.absent();
  agreed.bias = !bias.absent();
  return agreed;
}

template <class Arguments>
ForwardPass pass_of(const LayerState& layer, const Arguments& a, const MutableTensorView& y,
                    std::uint8_t* activation_mask, double* mean, double* var, double* rstd) {
  return {a.x,        a.mask, a.weight,          a.bias,
          a.residual, y,      activation_mask,   mean,
          var,        rstd,   layer.options.eps, layer.options.activation};
}

/// Has room in `saved` for what the step leaves there.
ForwardStep step_of(const LayerState& layer, const BatchNorm::Forward& f, SavedState& saved,
                    void* stream) {
  const BatchNorm::Options& options = layer.options;
  const bool residual = !f.residual.absent();
  saved.reserve(f.x, residual && activated(layer), stream);
  return {
      pass_of(layer, f, f.y, saved.activation_mask, saved.mean, saved.var, saved.rstd),
      options.statistics,
      layer_identity(layer.number, options.activation, options.statistics, residual,
                     !f.weight.absent(), !f.bias.absent()),
      nullptr,
      0,
      {f.running_mean, f.running_var, f.num_batches_tracked, nullptr, nullptr, options.momentum},
      saved.info};
}

BackwardStep step_of(const LayerState& layer, const BatchNorm::Backward& b,
                     const SavedState& saved) {
  return {{b.dy,
           b.x,
           b.mask,
           saved.mean,
           saved.rstd,
           {layer.options.activation, b.weight, b.bias, saved.activation_mask},
           b.weight,
           b.dresidual,
           b.dx,
           b.dweight,
           b.dbias,
           b.affine == AffineGradients::kShare},
          saved.info};
}

}  // namespace

void forward_on_cpu(LayerState& layer, const LayerCall& call, const BatchNorm::Forward& f,
                    SavedState& saved, const Execution& execution) {
  Communicator& communicator = *layer.on_cpu;
  const auto number = static_cast<std::int64_t>(call.number.value_or(0));
  AgreedCall forward;
  ForwardStep step;
  std::optional<SummedRecords> records;
  std::optional<LayerSum> sum;
  before_exchange(communicator, call, [&] {
    check_layer_forward(layer.options, f);
    check_on_cpu(f.x);
    forward = agreed(call, Direction::kForward, f.weight, f.bias);
    forward.residual = !f.residual.absent();
    step = step_of(layer, f, saved, nullptr);
    step.call = &number;
    step.rank = layer.place.rank;
    step.ranks = layer.place.ranks;
    if (step.statistics == Statistics::kWelford) {
      records.emplace(step, execution);
    } else if (layer.place.ranks > 1) {
      sum.emplace(f.x, communicator, layer.place.ranks);
    }
  });
  if (records.has_value()) {
    ForwardStep updating = step;
    step.running = {};
    forward_finish(step, records->sum(forward, communicator), execution);
    // Last: a step that fails has updated nothing, and can be made again.
    forward_update(updating, execution);
  } else if (sum.has_value()) {
    sum->run(call, forward,
             [&](GroupSum& group) { return forward_at_once(step, group, execution); });
  } else {
    GroupSum alone;
    forward_at_once(step, alone, execution);
  }
}

void forward_on_cuda(LayerState& layer, const LayerCall& call, const BatchNorm::Forward& f,
                     SavedState& saved, const Execution& execution) {
  cuda::Communicator& communicator = *layer.on_cuda;
  const cuda::Stream stream{execution.stream};
  std::optional<Workspace> made;
  const Workspace* w = nullptr;
  ForwardStep step;
  before_exchange(communicator, call, [&] {
    check_layer_forward(layer.options, f);
    check_on_cuda(f.x);
    step = step_of(layer, f, saved, stream.handle);
    const Counters counters(layer, stream.handle);
    step.call = step.running.call = counters.call;
    step.running.count = counters.info;
    step.rank = layer.place.rank;
    step.ranks = layer.place.ranks;
    const std::int64_t length = forward_words(step.statistics, f.x.dtype, f.x.sizes[1], step.ranks);
    w = &made.emplace(layer, f.x, stream.handle, 2, length);
    step.workspace = w->sums;
    forward_begin(step, w->message.data(), execution);
  });
  forward_finish(step, summed(communicator, layer.place.ranks, *w, f.x.dtype, stream), execution);
}

void backward_on_cpu(LayerState& layer, const LayerCall& call, const BatchNorm::Backward& b,
                     const SavedState& saved, const Execution& execution) {
  Communicator& communicator = *layer.on_cpu;
  AgreedCall backward;
  BackwardStep step;
  std::optional<LayerSum> sum;
  before_exchange(communicator, call, [&] {
    check_backward(b);
    check_on_cpu(b.x);
    check_saved(saved, layer, b);
    step = step_of(layer, b, saved);
    backward = agreed(call, Direction::kBackward, b.weight, b.bias);
    backward.forward = static_cast<std::uint32_t>(saved.info[1]);
    if (layer.place.ranks > 1) {
      sum.emplace(b.x, communicator, layer.place.ranks);
    }
  });
  if (sum.has_value()) {
    const std::int64_t count = sum->run(
        call, backward, [&](GroupSum& group) { return backward_at_once(step, group, execution); });
    check_count(count, saved.info[0]);
  } else {
    GroupSum alone;
    backward_at_once(step, alone, execution);
  }
}

void backward_on_cuda(LayerState& layer, const LayerCall& call, const BatchNorm::Backward& b,
                      const SavedState& saved, const Execution& execution) {
  cuda::Communicator& communicator = *layer.on_cuda;
  const int ranks = layer.place.ranks;
  const cuda::Stream stream{execution.stream};
  std::optional<Workspace> made;
  const Workspace* w = nullptr;
  BackwardStep step;
  before_exchange(communicator, call, [&] {
    check_backward(b);
    check_on_cuda(b.x);
    check_saved(saved, layer, b);
    w = &made.emplace(layer, b.x, stream.handle, 2);
    step = step_of(layer, b, saved);
    step.pass.share = step.pass.share && ranks > 1;
    step.coefficients = w->coefficients;
    step.workspace = w->sums;
    backward_begin(step, w->message.data(), nullptr, execution);
  });
  backward_finish(step, w->message.data(), summed(communicator, ranks, *w, b.x.dtype, stream),
                  execution);
}

void evaluate(LayerState& layer, const BatchNorm::Evaluate& e, const Execution& execution) {
  check_evaluate(layer.options, e);
  const bool of_batch = e.running_mean.absent();
  const Workspace w(layer, e.x, execution.stream, of_batch ? 1 : 0);
  ForwardStep step{pass_of(layer, e, e.y, nullptr, w.mean, w.var, w.rstd)};
  if (of_batch) {
    step.info = w.info;
    step.workspace = w.sums;
    GroupSum alone{.message = w.message};
    forward_at_once(step, alone, execution);
  } else {
    evaluation_statistics(e.running_mean, e.running_var, w.mean, nullptr, w.rstd, step.pass.eps,
                          execution);
    forward_finish(step, {}, execution);
  }
}

void evaluate_backward(LayerState& layer, const BatchNorm::EvaluateBackward& e,
                       const Execution& execution) {
  check_evaluate_backward(layer.options, e);
  const Workspace w(layer, e.x, execution.stream, 1);
  ActivationGradient through{layer.options.activation, e.weight, e.bias};
  evaluation_statistics(e.running_mean, e.running_var, w.mean, nullptr, w.rstd, layer.options.eps,
                        execution);
  if (activated(layer) && !e.residual.absent()) {
    auto* const bits = static_cast<std::uint8_t*>(layer.activation_mask.reserve(
        size(activation_mask_bytes(e.x)), e.x.device, execution.stream));
    through.activation_mask = bits;  // dx is written again below
    forward_finish({pass_of(layer, e, e.dx, bits, w.mean, w.var, w.rstd)}, {}, execution);
  }
  const bool keep = activated(layer) || !e.dresidual.absent();
  const MutableTensorView& u = e.dresidual.absent() ? e.dx : e.dresidual;
  BackwardStep step{{e.dy, e.x, e.mask, w.mean, w.rstd, through, e.weight,
                     keep ? u : MutableTensorView(), e.dx, e.dweight, e.dbias}};
  step.coefficients = w.coefficients;
  step.workspace = w.sums;
  backward_begin(step, w.message.data(), nullptr, execution);
  backward_finish(step, w.message.data(), {}, execution);
}

void check_last_call(LayerState& layer, const Execution& execution) {
  if (layer.on_cuda != nullptr && layer.calls > 0) {
    cuda::read_count(Counters(layer, execution.stream).info, cuda::Stream{execution.stream});
  }
}

}  // namespace syncbn
