#include "syncbn/cuda_batch_norm.hpp"

#include <cstddef>
#include <span>
#include <string>

#include "checks.hpp"
#include "layer_call.hpp"
#include "syncbn/error.hpp"
#include "syncbn/welford.hpp"

// Checks, passes and exchange on a stream in their order; the arithmetic is in the kernels. This
// file needs nothing of CUDA: the passes say so where they were not built.
namespace syncbn::cuda {

Communicator::~Communicator() = default;

namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// The caller's scratch memory, cut up.
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
  std::int64_t words = 0;

  /// ranks: those whose records are gathered; 0 without the welford mode.
  Workspace(std::int64_t* memory, DType dtype, std::int64_t channels, int ranks = 0) {
    const auto take = [&](std::int64_t count) {
      std::int64_t* from = memory == nullptr ? nullptr : memory + words;
      words += count;
      return from;
    };
    const auto take_doubles = [&](std::int64_t count) {
      static_assert(sizeof(double) == sizeof(std::int64_t));
      return reinterpret_cast<double*>(take(count));
    };
    const std::int64_t length = message_words(dtype, channels);
    sums = take(workspace_words(dtype, channels));
    message = {take(length), size(length)};
    merged = {take(length), size(length)};
    coefficients = take_doubles(3 * channels);
    mean = take_doubles(channels);
    var = take_doubles(channels);
    rstd = take_doubles(channels);
    info = take(kInfoWords);
    if (ranks > 0) {
      const std::int64_t of_one = kHeaderWords + welford_words(dtype, channels);
      record = {take(of_one), size(of_one)};
      records = {take(ranks * of_one), size(ranks * of_one)};
    }
  }
};

void check_given(const char* name, const void* pointer, const char* what) {
  if (pointer == nullptr) {
    throw InvalidArgument(std::string(name) + ": got null, expected " + what);
  }
}

void check_on_cuda(const TensorView& x) {
  require_built();
  if (x.device != Device::kCuda) {
    throw InvalidArgument(
        "x: got a tensor on CPU, expected one on CUDA; CPU tensors go to the functions of "
        "syncbn/batch_norm.hpp");
  }
}

void check_workspace(const std::int64_t* workspace) {
  check_given("workspace", workspace, "the words of batch_norm_workspace_words");
}

/// A rank without samples has a mask of no bytes, which may be null.
void check_activation_mask(const char* name, const std::uint8_t* mask, const TensorView& x) {
  if (activation_mask_bytes(x) > 0) {
    check_given(name, mask, "activation_mask_bytes(x) bytes (with a residual and an activation)");
  }
}

void check_statistics(const BatchStatistics& statistics) {
  check_given("statistics.mean", statistics.mean, "C entries");
  check_given("statistics.var", statistics.var, "C entries");
  check_given("statistics.rstd", statistics.rstd, "C entries");
  check_given("statistics.info", statistics.info, "kInfoWords words");
}

int gathered_ranks(Statistics statistics, int ranks) {
  return statistics == Statistics::kWelford ? ranks : 0;
}

bool activated(const Activation& activation) { return activation.kind != ActivationKind::kNone; }

}  // namespace

std::int64_t batch_norm_workspace_words(DType dtype, std::int64_t channels, Statistics statistics,
                                        int ranks) {
  check_ranks(ranks);
  return Workspace(nullptr, dtype, channels, gathered_ranks(statistics, ranks)).words;
}

void batch_norm_forward(const TensorView& x, const MaskView& mask, const TensorView& weight,
                        const TensorView& bias, const TensorView& residual,
                        const MutableTensorView& y, const RunningStatistics& running,
                        const BatchStatistics& statistics, const BatchNormOptions& options,
                        Communicator& communicator, std::int64_t* workspace, const Stream& stream) {
  const bool keeps_mask = activated(options.activation) && !residual.absent();
  const bool welford = options.statistics == Statistics::kWelford;
  const int ranks = communicator.size();
  before_exchange(communicator, [&] {
    check_forward(x, mask, weight, bias, residual, y, running.mean, running.var,
                  running.num_batches_tracked, options, ranks);
    check_on_cuda(x);
    check_workspace(workspace);
    check_statistics(statistics);
    if (keeps_mask) {
      check_activation_mask("statistics.activation_mask", statistics.activation_mask, x);
    }
    if (options.call != 0) {
      throw InvalidArgument("options.call: got " + std::to_string(options.call) +
                            ", expected 0 (on CUDA running.call counts the calls)");
    }
    const Workspace w(workspace, x.dtype, x.sizes[1], gathered_ranks(options.statistics, ranks));
    const ForwardCall call{
        layer_identity(options.layer, options.activation, options.statistics, !residual.absent()),
        running.call, options.eps};
    if (welford) {
      local_welford(x, mask, call, w.record.data(), stream);
    } else {
      local_moments(x, mask, call, w.message.data(), w.sums, stream);
    }
  });
  const std::int64_t channels = x.sizes[1];
  const Workspace w(workspace, x.dtype, channels, gathered_ranks(options.statistics, ranks));
  if (welford) {
    communicator.all_gather(std::as_bytes(w.record), std::as_writable_bytes(w.records), stream);
    merge_welford(w.records.data(), x.dtype, ranks, statistics.mean, statistics.var,
                  statistics.rstd, statistics.info, channels, options.eps, stream);
    update_running_statistics(running, statistics.mean, statistics.var, statistics.info, channels,
                              options.momentum, stream);
  } else {
    communicator.all_reduce_sum(w.message, w.merged, stream);
    finalize_moments(w.merged.data(), x.dtype, ranks, statistics.mean, statistics.var,
                     statistics.rstd, statistics.info, channels, options.eps, running,
                     options.momentum, stream);
  }
  normalize(x, mask, statistics.mean, statistics.rstd, weight, bias, residual, y,
            keeps_mask ? statistics.activation_mask : nullptr, options.activation, stream);
}

void batch_norm_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                         const TensorView& weight, const TensorView& bias,
                         const BatchStatistics& statistics, const MutableTensorView& dx,
                         const MutableTensorView& dweight, const MutableTensorView& dbias,
                         const MutableTensorView& dresidual, const Activation& activation,
                         AffineGradients which, Communicator& communicator, std::int64_t* workspace,
                         const Stream& stream) {
  const ActivationGradient through{activation, weight, bias, statistics.activation_mask};
  before_exchange(communicator, [&] {
    check_backward(dy, x, mask, weight, dx, dweight, dbias, dresidual, which, communicator.size());
    check_on_cuda(x);
    check_workspace(workspace);
    check_statistics(statistics);
    const Workspace w(workspace, x.dtype, x.sizes[1]);
    local_gradients(dy, x, mask, statistics.mean, statistics.rstd, through, dresidual,
                    statistics.info, w.message.data(), w.sums, stream);
  });
  const std::int64_t channels = x.sizes[1];
  const Workspace w(workspace, x.dtype, channels);
  communicator.all_reduce_sum(w.message, w.merged, stream);
  finalize_gradients(w.merged.data(), x.dtype, communicator.size(),
                     which == AffineGradients::kShare ? w.message.data() : nullptr, statistics.info,
                     statistics.mean, statistics.rstd, weight, w.coefficients, dweight, dbias,
                     channels, stream);
  if (dresidual.absent()) {
    input_gradient(dy, x, mask, statistics.mean, statistics.rstd, w.coefficients, through, dx,
                   stream);
  } else {  // what came back through the activation is there already
    input_gradient(dresidual, x, mask, statistics.mean, statistics.rstd, w.coefficients, {}, dx,
                   stream);
  }
}

void batch_norm_evaluate(const TensorView& x, const MaskView& mask, const TensorView& weight,
                         const TensorView& bias, const TensorView& residual,
                         const TensorView& running_mean, const TensorView& running_var,
                         const MutableTensorView& y, const BatchNormOptions& options,
                         std::int64_t* workspace, const Stream& stream) {
  const bool tracked = check_running(running_mean, running_var, true);
  check_forward(x, mask, weight, bias, residual, y, {}, {}, nullptr,
                {.eps = options.eps, .activation = options.activation}, 1);
  const std::int64_t channels = x.sizes[1];
  check_per_channel("running_mean", running_mean, channels, x.device);
  check_per_channel("running_var", running_var, channels, x.device);
  check_on_cuda(x);
  check_workspace(workspace);
  const Workspace w(workspace, x.dtype, channels);
  if (tracked) {
    evaluation_statistics(running_mean, running_var, w.mean, w.rstd, options.eps, stream);
  } else {
    local_moments(x, mask, {0, nullptr, options.eps}, w.message.data(), w.sums, stream);
    finalize_moments(w.message.data(), x.dtype, 1, w.mean, w.var, w.rstd, w.info, channels,
                     options.eps, stream);
  }
  normalize(x, mask, w.mean, w.rstd, weight, bias, residual, y, nullptr, options.activation,
            stream);
}

void batch_norm_evaluate_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                                  const TensorView& weight, const TensorView& bias,
                                  const TensorView& residual, const TensorView& running_mean,
                                  const TensorView& running_var, const MutableTensorView& dx,
                                  const MutableTensorView& dweight, const MutableTensorView& dbias,
                                  const MutableTensorView& dresidual,
                                  const BatchNormOptions& options, std::uint8_t* activation_mask,
                                  std::int64_t* workspace, const Stream& stream) {
  check_running(running_mean, running_var, false);
  check_evaluate_backward(dy, x, mask, residual, dx, dweight, dbias, dresidual, options);
  const std::int64_t channels = x.sizes[1];
  check_per_channel("running_mean", running_mean, channels, x.device);
  check_per_channel("running_var", running_var, channels, x.device);
  check_on_cuda(x);
  check_workspace(workspace);
  const Workspace w(workspace, x.dtype, channels);
  ActivationGradient through{options.activation, weight, bias};
  const bool from_mask = activated(options.activation) && !residual.absent();
  if (from_mask) {
    check_activation_mask("activation_mask", activation_mask, x);
    through.activation_mask = activation_mask;
  }
  evaluation_statistics(running_mean, running_var, w.mean, w.rstd, options.eps, stream);
  if (from_mask) {  // for the bits; dx is written again below
    normalize(x, mask, w.mean, w.rstd, weight, bias, residual, dx, activation_mask,
              options.activation, stream);
  }
  const bool keep = activated(options.activation) || !dresidual.absent();
  const MutableTensorView& u = dresidual.absent() ? dx : dresidual;
  local_gradients(dy, x, mask, w.mean, w.rstd, through, keep ? u : MutableTensorView(), nullptr,
                  w.message.data(), w.sums, stream);
  evaluation_input_gradient(keep ? TensorView(u) : dy, mask, w.rstd, weight, dx, stream);
  finalize_gradients(w.message.data(), x.dtype, 1, w.message.data(), nullptr, w.mean, w.rstd,
                     weight, w.coefficients, dweight, dbias, channels, stream);
}

}  // namespace syncbn::cuda
