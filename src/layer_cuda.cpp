// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <span>
#include <string>

#include "checks.hpp"
#include "layer.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/error.hpp"
#include "syncbn/step.hpp"
#include "syncbn/welford.hpp"

// A layer's checks, passes and exchange on a stream in their order; the arithmetic is in the
// kernels. This file needs nothing of CUDA: the passes say so where they were not built.
namespace syncbn::cuda {

namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Memory of the layer for one call, cut up.
struct Workspace {
  std::int64_t* sums = nullptr;  ///< of the passes, which leave it zero
  std::span<std::int64_t> message;
  std::span<std::int64_t> merged;
  double* coefficients = nullptr;
  double* mean = nullptr;
  double* var = nullptr;
  double* rstd = nullptr;
  std::int64_t* info = nullptr;
  std::span<std::int64_t> record;  ///< welford: of this rank, and those of all ranks
  std::span<std::int64_t> records;

  Workspace() = default;
  /// ranks: those whose records are gathered; 0 without the welford mode.
  Workspace(LayerState& layer, const TensorView& x, void* stream, int ranks = 0) {
    const std::int64_t channels = x.sizes[1];
    const std::int64_t length = message_words(x.dtype, channels);
    const std::int64_t record_words =
        ranks > 0 ? kHeaderWords + welford_words(x.dtype, channels) : 0;
    const auto reserved = [&](Block& block, std::int64_t words) {
      return static_cast<std::int64_t*>(
          block.reserve(size(words) * sizeof(std::int64_t), Device::kCuda, stream));
    };
    // Of its own: another dtype has other places in the rest.
    sums = reserved(layer.sums, workspace_words(x.dtype, channels));
    std::int64_t* words = reserved(
        layer.scratch, 2 * length + 6 * channels + kInfoWords + (1 + ranks) * record_words);
    const auto take = [&](std::int64_t count) {
      std::int64_t* from = words;
      words += count;
      return from;
    };
    const auto take_doubles = [&](std::int64_t count) {
      static_assert(sizeof(double) == sizeof(std::int64_t));
      return reinterpret_cast<double*>(take(count));
    };
    message = {take(length), size(length)};
    merged = {take(length), size(length)};
    coefficients = take_doubles(3 * channels);
    mean = take_doubles(channels);
    var = take_doubles(channels);
    rstd = take_doubles(channels);
    info = take(kInfoWords);
    record = {take(record_words), size(record_words)};
    records = {take(ranks * record_words), size(ranks * record_words)};
  }
};

/// The sum of all ranks' messages; alone, this rank's own.
Merged summed(Communicator& communicator, const Workspace& w, DType dtype, const Stream& stream) {
  const std::int64_t* header = w.message.data();
  if (communicator.size() > 1) {
    communicator.all_reduce_sum(w.message, w.merged, stream);
    header = w.merged.data();
  }
  return {header, header + kHeaderWords, dtype, communicator.size()};
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

void check_on_cuda(const TensorView& x) {
  require_built();
  if (x.device != Device::kCuda) {
    throw InvalidArgument(
        "x: got a tensor on the CPU, expected one on CUDA, as the layer's communicator is");
  }
}

bool activated(const LayerState& layer) {
  return layer.options.activation.kind != ActivationKind::kNone;
}

}  // namespace

void forward(LayerState& layer, const LayerCall& call, const BatchNorm::Forward& f,
             SavedState& saved, const Execution& execution) {
  const BatchNorm::Options& options = layer.options;
  const bool welford = options.statistics == Statistics::kWelford;
  Communicator& communicator = *layer.on_cuda;
  const int ranks = communicator.size();
  const Stream stream{execution.stream};
  Workspace w;
  ForwardStep step;
  before_exchange(communicator, call, [&] {
    check_layer_forward(options, f);
    check_on_cuda(f.x);
    saved.reserve(f.x, activated(layer) && !f.residual.absent(), stream.handle);
    const Counters counters(layer, stream.handle);
    w = Workspace(layer, f.x, stream.handle, welford ? ranks : 0);
    step = {{f.x, f.mask, f.weight, f.bias, f.residual, f.y, saved.activation_mask, saved.mean,
             saved.var, saved.rstd, options.eps, options.activation},
            options.statistics,
            layer_identity(layer.number, options.activation, options.statistics,
                           !f.residual.absent(), !f.weight.absent(), !f.bias.absent()),
            counters.call,
            0,
            {f.running_mean, f.running_var, f.num_batches_tracked, counters.call, counters.info,
             options.momentum},
            saved.info,
            w.sums};
    forward_begin(step, welford ? w.record.data() : w.message.data(), execution);
  });
  if (welford) {
    communicator.all_gather(std::as_bytes(w.record), std::as_writable_bytes(w.records), stream);
    forward_finish(step, {w.records.data(), w.records.data(), f.x.dtype, ranks}, execution);
  } else {
    forward_finish(step, summed(communicator, w, f.x.dtype, stream), execution);
  }
}

void backward(LayerState& layer, const LayerCall& call, const BatchNorm::Backward& b,
              const SavedState& saved, const Execution& execution) {
  Communicator& communicator = *layer.on_cuda;
  const Stream stream{execution.stream};
  Workspace w;
  BackwardStep step;
  before_exchange(communicator, call, [&] {
    check_backward(b);
    check_on_cuda(b.x);
    check_saved(saved, layer, b);
    w = Workspace(layer, b.x, stream.handle);
    step = {{b.dy,
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
             b.affine == AffineGradients::kShare && communicator.size() > 1},
            saved.info,
            w.coefficients,
            w.sums};
    backward_begin(step, w.message.data(), nullptr, execution);
  });
  backward_finish(step, w.message.data(), summed(communicator, w, b.x.dtype, stream), execution);
}

void evaluate(LayerState& layer, const BatchNorm::Evaluate& e, const Execution& execution) {
  check_evaluate(layer.options, e);
  check_on_cuda(e.x);
  const Workspace w(layer, e.x, execution.stream);
  ForwardStep step{{e.x, e.mask, e.weight, e.bias, e.residual, e.y, nullptr, w.mean, w.var, w.rstd,
                    layer.options.eps, layer.options.activation}};
  if (e.running_mean.absent()) {
    step.info = w.info;
    step.workspace = w.sums;
    forward_begin(step, w.message.data(), execution);
    forward_finish(step, {w.message.data(), w.message.data() + kHeaderWords, e.x.dtype, 1},
                   execution);
    return;
  }
  evaluation_statistics(e.running_mean, e.running_var, w.mean, w.rstd, layer.options.eps,
                        Stream{execution.stream});
  forward_map(step.pass, execution);
}

void evaluate_backward(LayerState& layer, const BatchNorm::EvaluateBackward& e,
                       const Execution& execution) {
  check_evaluate_backward(layer.options, e);
  check_on_cuda(e.x);
  const Stream stream{execution.stream};
  const Workspace w(layer, e.x, stream.handle);
  ActivationGradient through{layer.options.activation, e.weight, e.bias};
  evaluation_statistics(e.running_mean, e.running_var, w.mean, w.rstd, layer.options.eps, stream);
  if (activated(layer) && !e.residual.absent()) {
    auto* const bits = static_cast<std::uint8_t*>(layer.activation_mask.reserve(
        size(activation_mask_bytes(e.x)), Device::kCuda, stream.handle));
    through.activation_mask = bits;  // dx is written again below
    normalize({e.x, e.mask, w.mean, w.rstd, e.weight, e.bias, e.residual, e.dx, bits,
               layer.options.activation},
              stream);
  }
  const bool keep = activated(layer) || !e.dresidual.absent();
  const MutableTensorView& u = e.dresidual.absent() ? e.dx : e.dresidual;
  local_gradients({e.dy, e.x, e.mask, w.mean, w.rstd, through, keep ? u : MutableTensorView()},
                  nullptr, w.message.data(), w.sums, stream);
  evaluation_input_gradient(keep ? TensorView(u) : e.dy, e.mask, w.rstd, e.weight, e.dx, stream);
  finalize_gradients(
      w.message.data(), e.x.dtype, 1, w.message.data(), nullptr,
      {w.mean, w.rstd, e.weight, w.coefficients, e.dweight, e.dbias, layer.options.channels},
      stream);
}

void check_last_call(LayerState& layer, const Execution& execution) {
  if (layer.on_cuda != nullptr && layer.calls > 0) {
    read_count(Counters(layer, execution.stream).info, Stream{execution.stream});
  }
}

}  // namespace syncbn::cuda
