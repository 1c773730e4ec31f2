// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm_op.hpp"

#include <limits>
#include <string>

#include "channel_values.hpp"
#include "checks.hpp"
#include "cpu/float_environment.hpp"
#include "statistics/finalize.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"

// Checks, passes and exchange of the operator in their order.
namespace syncbn {
namespace {

/// Calls body(exchange) with the communicator's exchange. A rank that fails before it tells the
/// others, which would otherwise wait.
template <class Body>
auto with_communicator(Communicator& communicator, const Body& body) {
  bool exchanged = false;
  const Exchange exchange = [&](std::vector<std::int64_t>& message) {
    exchanged = true;
    communicator.all_reduce_sum(message);
    const MessageInfo info = read_header(message.data(), communicator.size());
    check_header(info);
    return info;
  };
  try {
    check_ranks(communicator.size());
    return body(exchange);
  } catch (const std::exception& error) {
    if (!exchanged) {
      communicator.refuse(error.what());
    }
    throw;
  } catch (...) {  // an executor is the caller's
    if (!exchanged) {
      communicator.refuse("an exception of an unknown type");
    }
    throw;
  }
}

void check_present(const char* name, const TensorView& tensor, const TensorView& x) {
  if (tensor.absent()) {
    throw InvalidArgument(std::string(name) + ": got none, expected one entry per channel of x");
  }
  check_per_channel(name, tensor, x.sizes[1], x.device);
}

void check_attributes(const BatchNormOpAttributes& attributes) {
  check_eps(attributes.epsilon, "epsilon");
  check_momentum(attributes.momentum);
}

void check_forward(const BatchNormOpInputs& inputs, const BatchNormOpOutputs& outputs,
                   const BatchNormOpAttributes& attributes) {
  const TensorView& x = inputs.x;
  check_samples("x", x);
  check_like("y", outputs.y, x);
  check_present("estimated_mean", inputs.estimated_mean, x);
  check_present("estimated_var", inputs.estimated_var, x);
  check_per_channel("scale", inputs.scale, x.sizes[1], x.device);
  check_per_channel("bias", inputs.bias, x.sizes[1], x.device);
  check_per_channel("batch_mean", outputs.batch_mean, x.sizes[1], x.device);
  check_per_channel("batch_var", outputs.batch_var, x.sizes[1], x.device);
  check_present("saved_mean", outputs.saved_mean, x);
  check_present("saved_var", outputs.saved_var, x);
  check_output("y", outputs.y);
  check_output("batch_mean", outputs.batch_mean);
  check_output("batch_var", outputs.batch_var);
  check_output("saved_mean", outputs.saved_mean);
  check_output("saved_var", outputs.saved_var);
  check_attributes(attributes);
  if (inputs.batches < 0) {
    throw InvalidArgument("batches: got " + std::to_string(inputs.batches) +
                          ", expected a number of at least 0");
  }
  if (inputs.batches == std::numeric_limits<std::int64_t>::max()) {
    throw InvalidArgument("batches: got 2^63 - 1, expected room for one batch more");
  }
  if (outputs.saved_batches == nullptr) {
    throw InvalidArgument("saved_batches: got null, expected a counter");
  }
  check_on_cpu(x.device);
}

/// What ranks must agree on, options of the operator included.
std::uint32_t operator_fingerprint(const BatchNormOpInputs& inputs,
                                   const BatchNormOpAttributes& attributes) {
  const std::int64_t channels = inputs.x.sizes[1];
  const std::uint32_t options = fingerprint(attributes.layer, attributes.use_global_est ? 2 : 1,
                                            Direction::kForward, channels, attributes.momentum);
  return fingerprint(options, static_cast<std::uint64_t>(inputs.batches), Direction::kForward,
                     channels, attributes.epsilon);
}

void store(const MutableTensorView& tensor, const std::vector<double>& values) {
  if (tensor.absent()) {
    return;
  }
  for (std::size_t c = 0; c < values.size(); ++c) {
    set_channel_value(tensor, static_cast<std::int64_t>(c), values[c]);
  }
}

/// The estimate as it will be saved: updated by a batch of `count` elements, and rounded once, to
/// the type of `saved`.
std::vector<double> updated(const TensorView& estimate, const std::vector<double>& batch,
                            std::int64_t count, std::int64_t batches, double momentum,
                            const MutableTensorView& saved) {
  double entry = 0;  // of the longest type
  const MutableTensorView place(&entry, saved.dtype, {1});
  const TensorView rounded = place;
  std::vector<double> values = channel_values(estimate, saved.sizes[0], 0.0);
  for (std::size_t c = 0; c < values.size(); ++c) {
    if (count > 0) {
      values[c] = batches == 0 ? batch[c] : running_update(values[c], batch[c], 1.0 - momentum);
    }
    set_channel_value(place, 0, values[c]);
    values[c] = channel_value(rounded, 0);
  }
  return values;
}

/// The statistics of these estimates.
void use_estimates(const std::vector<double>& mean, const std::vector<double>& var, double epsilon,
                   BatchNormOpStatistics& statistics) {
  const cpu::FloatEnvironment environment;
  statistics.mean = mean;
  statistics.var = var;
  statistics.rstd = var;
  for (double& value : statistics.rstd) {
    value = rstd_of(value, epsilon);
  }
}

/// What a training step saves; made before y, and written after it, so that a step that fails has
/// changed no estimate.
struct Updates {
  Updates(const BatchNormOpInputs& inputs, const BatchNormOpOutputs& outputs,
          const BatchNormOpAttributes& attributes, const BatchNormOpStatistics& batch)
      : batch_mean(batch.mean), batch_var(batch.var) {
    const cpu::FloatEnvironment environment;
    mean = updated(inputs.estimated_mean, batch.mean, batch.count, inputs.batches,
                   attributes.momentum, outputs.saved_mean);
    var = updated(inputs.estimated_var, batch.var, batch.count, inputs.batches, attributes.momentum,
                  outputs.saved_var);
    batches = inputs.batches + (batch.count > 0 ? 1 : 0);
  }
  void write(const BatchNormOpOutputs& outputs) const {
    const cpu::FloatEnvironment environment;
    store(outputs.batch_mean, batch_mean);
    store(outputs.batch_var, batch_var);
    store(outputs.saved_mean, mean);
    store(outputs.saved_var, var);
    *outputs.saved_batches = batches;
  }
  std::vector<double> batch_mean, batch_var, mean, var;
  std::int64_t batches = 0;
};

BatchNormOpStatistics infer(const BatchNormOpInputs& inputs, const BatchNormOpOutputs& outputs,
                            const BatchNormOpAttributes& attributes, const Execution& execution) {
  const cpu::FloatEnvironment environment;
  BatchNormOpStatistics statistics;
  const std::int64_t channels = inputs.x.sizes[1];
  use_estimates(channel_values(inputs.estimated_mean, channels, 0.0),
                channel_values(inputs.estimated_var, channels, 1.0), attributes.epsilon,
                statistics);
  normalize({inputs.x,
             {},
             statistics.mean.data(),
             statistics.rstd.data(),
             inputs.scale,
             inputs.bias,
             {},
             outputs.y},
            execution);
  store(outputs.batch_mean, statistics.mean);
  store(outputs.batch_var, statistics.var);
  store(outputs.saved_mean, statistics.mean);
  store(outputs.saved_var, statistics.var);
  *outputs.saved_batches = inputs.batches;
  return statistics;
}

}  // namespace

BatchNormOpStatistics batch_norm_op(const BatchNormOpInputs& inputs,
                                    const BatchNormOpOutputs& outputs,
                                    const BatchNormOpAttributes& attributes,
                                    const Exchange& exchange, const Execution& execution) {
  check_forward(inputs, outputs, attributes);
  if (attributes.is_infer) {
    return infer(inputs, outputs, attributes, execution);
  }
  const std::int64_t channels = inputs.x.sizes[1];
  const auto size = static_cast<std::size_t>(channels);
  BatchNormOpStatistics statistics;
  statistics.mean.resize(size);
  statistics.var.resize(size);
  statistics.rstd.resize(size);
  statistics.fingerprint = operator_fingerprint(inputs, attributes);
  std::vector<std::int64_t> message(
      static_cast<std::size_t>(message_words(inputs.x.dtype, channels)));
  local_moments(inputs.x, {}, message.data(), statistics.fingerprint, execution);
  const MessageInfo info = exchange(message);
  statistics.count = info.count;
  finalize_moments(info, message.data() + kHeaderWords, statistics.mean.data(),
                   statistics.var.data(), statistics.rstd.data(), channels, attributes.epsilon,
                   execution);
  const Updates saved(inputs, outputs, attributes, statistics);
  if (attributes.use_global_est) {
    use_estimates(saved.mean, saved.var, attributes.epsilon, statistics);
  }
  normalize({inputs.x,
             {},
             statistics.mean.data(),
             statistics.rstd.data(),
             inputs.scale,
             inputs.bias,
             {},
             outputs.y},
            execution);
  saved.write(outputs);
  return statistics;
}

BatchNormOpStatistics batch_norm_op(const BatchNormOpInputs& inputs,
                                    const BatchNormOpOutputs& outputs,
                                    const BatchNormOpAttributes& attributes,
                                    Communicator& communicator, const Execution& execution) {
  if (attributes.is_infer) {  // nobody waits for this rank
    return batch_norm_op(inputs, outputs, attributes, Exchange(), execution);
  }
  return with_communicator(communicator, [&](const Exchange& exchange) {
    check_layer("attributes.layer", attributes.layer, communicator.size());
    return batch_norm_op(inputs, outputs, attributes, exchange, execution);
  });
}

void batch_norm_op_backward(const TensorView& dy, const TensorView& x, const TensorView& scale,
                            const BatchNormOpStatistics& statistics,
                            const BatchNormOpAttributes& attributes, const MutableTensorView& dx,
                            const MutableTensorView& dscale, const MutableTensorView& dbias,
                            const Exchange& exchange, const Execution& execution) {
  check_samples("x", x);
  check_like("dy", dy, x);
  const std::int64_t channels = x.sizes[1];
  if (!dx.absent()) {
    check_like("dx", dx, x);
    check_output("dx", dx);
  }
  check_per_channel("scale", scale, channels, x.device);
  check_per_channel("dscale", dscale, channels, x.device);
  check_per_channel("dbias", dbias, channels, x.device);
  check_output("dscale", dscale);
  check_output("dbias", dbias);
  check_attributes(attributes);
  for (const auto* values : {&statistics.mean, &statistics.rstd}) {
    if (static_cast<std::int64_t>(values->size()) != channels) {
      throw InvalidArgument("statistics: got " + std::to_string(values->size()) +
                            " channels, expected those of x, " + std::to_string(channels));
    }
  }
  const double* mean = statistics.mean.data();
  const double* rstd = statistics.rstd.data();
  std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(x.dtype, channels)));
  local_gradients({dy, x, {}, mean, rstd}, message.data(),
                  backward_fingerprint(statistics.fingerprint), execution);
  const std::vector<std::int64_t> own = message;
  std::vector<double> coefficients(static_cast<std::size_t>(3 * channels));
  if (attributes.is_infer || attributes.use_global_est) {
    if (!dx.absent()) {
      evaluation_input_gradient_on_cpu(dy, {}, rstd, scale, dx, execution);
    }
  } else if (!dx.absent()) {
    const MessageInfo info = exchange(message);
    if (info.count != statistics.count) {
      throw DivergenceError("backward: the ranks bring " + std::to_string(info.count) +
                            " elements per channel, forward had " +
                            std::to_string(statistics.count));
    }
    finalize_gradients(info, message.data() + kHeaderWords,
                       {mean, rstd, scale, coefficients.data(), {}, {}, channels}, statistics.count,
                       execution);
    input_gradient({dy, x, {}, mean, rstd, coefficients.data(), {}, dx}, execution);
  }
  affine_gradient_shares(
      own.data() + kHeaderWords, x.dtype,
      {.mean = mean, .rstd = rstd, .dweight = dscale, .dbias = dbias, .channels = channels},
      execution);
}

void batch_norm_op_backward(const TensorView& dy, const TensorView& x, const TensorView& scale,
                            const BatchNormOpStatistics& statistics,
                            const BatchNormOpAttributes& attributes, const MutableTensorView& dx,
                            const MutableTensorView& dscale, const MutableTensorView& dbias,
                            Communicator& communicator, const Execution& execution) {
  if (attributes.is_infer || attributes.use_global_est || dx.absent()) {  // nobody waits
    batch_norm_op_backward(dy, x, scale, statistics, attributes, dx, dscale, dbias, Exchange(),
                           execution);
    return;
  }
  with_communicator(communicator, [&](const Exchange& exchange) {
    batch_norm_op_backward(dy, x, scale, statistics, attributes, dx, dscale, dbias, exchange,
                           execution);
  });
}

}  // namespace syncbn
