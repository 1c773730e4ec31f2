// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm_op.hpp"

#include <array>
#include <functional>
#include <limits>
#include <string>

#include "statistics/finalize.hpp"
#include "statistics/float_environment.hpp"
#include "statistics/header.hpp"
#include "step/device.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/step.hpp"
#include "tensors/channel_values.hpp"
#include "tensors/checks.hpp"

// The operator around the step: its checks, its exchange and what it saves.
namespace syncbn {
namespace {

/// Sums a message over the ranks, in place.
using Exchange = std::function<Merged(std::vector<std::int64_t>& message)>;

/// Calls body(exchange, ranks) with the communicator's exchange. A rank that fails before it tells
/// the others, which would otherwise wait.
template <class Body>
auto with_communicator(Communicator& communicator, const Body& body) {
  bool exchanged = false;
  Place place;
  try {  // also around what allocates
    const Exchange exchange = [&](std::vector<std::int64_t>& message) -> Merged {
      exchanged = true;
      communicator.all_reduce_sum(message);
      const MessageInfo info = read_header(message.data(), place.ranks);
      if (!info.agree && !info.any_rejected) {
        throw DivergenceError(
            "the ranks did not make the same call (layer, batches, direction, channels, dtype, "
            "epsilon, momentum, use_global_est, and whether there are scale and bias must be equal "
            "on all of them)");
      }
      check_header(info);
      return {message.data(), message.data() + kHeaderWords, info.dtype, place.ranks};
    };
    place = place_of(communicator);
    return body(exchange, place.ranks);
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

/// What ranks must agree on besides channels, epsilon and the number of batches, as the step's
/// layer.
std::uint64_t identity(const BatchNormOpInputs& inputs, const BatchNormOpAttributes& attributes) {
  const std::uint64_t layer = layer_identity(attributes.layer, {}, Statistics::kReproducible, false,
                                             !inputs.scale.absent(), !inputs.bias.absent());
  return mix(mix(layer, option_bits(attributes.momentum)),
             std::uint64_t{attributes.use_global_est});
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

void map(const BatchNormOpInputs& inputs, const BatchNormOpOutputs& outputs,
         BatchNormOpStatistics& statistics, const Execution& execution) {
  forward_finish({.pass = {.x = inputs.x,
                           .weight = inputs.scale,
                           .bias = inputs.bias,
                           .y = outputs.y,
                           .mean = statistics.mean.data(),
                           .rstd = statistics.rstd.data()}},
                 {}, execution);
}

/// Whether a backward does; estimates are constants.
bool exchanges(const BatchNormOpGradients& gradients, const BatchNormOpAttributes& attributes) {
  return !attributes.is_infer && !attributes.use_global_est && !gradients.dx.absent();
}

BatchNormOpStatistics infer(const BatchNormOpInputs& inputs, const BatchNormOpOutputs& outputs,
                            const BatchNormOpAttributes& attributes, const Execution& execution) {
  const cpu::FloatEnvironment environment;
  BatchNormOpStatistics statistics;
  const std::int64_t channels = inputs.x.sizes[1];
  use_estimates(channel_values(inputs.estimated_mean, channels, 0.0),
                channel_values(inputs.estimated_var, channels, 1.0), attributes.epsilon,
                statistics);
  map(inputs, outputs, statistics, execution);
  store(outputs.batch_mean, statistics.mean);
  store(outputs.batch_var, statistics.var);
  store(outputs.saved_mean, statistics.mean);
  store(outputs.saved_var, statistics.var);
  *outputs.saved_batches = inputs.batches;
  return statistics;
}

BatchNormOpStatistics train(const BatchNormOpInputs& inputs, const BatchNormOpOutputs& outputs,
                            const BatchNormOpAttributes& attributes, const Exchange& exchange,
                            const Execution& execution) {
  const std::int64_t channels = inputs.x.sizes[1];
  const auto size = static_cast<std::size_t>(channels);
  BatchNormOpStatistics statistics;
  statistics.mean.resize(size);
  statistics.var.resize(size);
  statistics.rstd.resize(size);
  std::array<std::int64_t, kInfoWords> info{};
  const ForwardStep step{.pass = {.x = inputs.x,
                                  .mean = statistics.mean.data(),
                                  .var = statistics.var.data(),
                                  .rstd = statistics.rstd.data(),
                                  .eps = attributes.epsilon},
                         .layer = identity(inputs, attributes),
                         .call = &inputs.batches,
                         .running = {.momentum = attributes.momentum},
                         .info = info.data()};
  std::vector<std::int64_t> message(
      static_cast<std::size_t>(message_words(inputs.x.dtype, channels)));
  forward_begin(step, message.data(), execution);
  forward_finish(step, exchange(message), execution);
  statistics.count = info[0];
  statistics.fingerprint = static_cast<std::uint32_t>(info[1]);
  const Updates saved(inputs, outputs, attributes, statistics);
  if (attributes.use_global_est) {
    use_estimates(saved.mean, saved.var, attributes.epsilon, statistics);
  }
  map(inputs, outputs, statistics, execution);
  saved.write(outputs);
  return statistics;
}

/// exchange: empty where there is none.
void backward(const BatchNormOpGradients& g, const BatchNormOpStatistics& statistics,
              const BatchNormOpAttributes& attributes, const Exchange& exchange,
              const Execution& execution) {
  check_samples("x", g.x);  // dy: by the first door
  const std::int64_t channels = g.x.sizes[1];
  if (!g.dx.absent()) {
    check_whole_output("dx", g.dx, g.x);
  }
  check_per_channel("scale", g.scale, channels, g.x.device);
  check_entries("dscale", g.dscale, g.x);
  check_entries("dbias", g.dbias, g.x);
  check_attributes(attributes);
  for (const auto* values : {&statistics.mean, &statistics.rstd}) {
    if (static_cast<std::int64_t>(values->size()) != channels) {
      throw InvalidArgument("statistics: got " + std::to_string(values->size()) +
                            " channels, expected those of x, " + std::to_string(channels));
    }
  }
  check_elements_over_ranks("statistics.count", statistics.count);
  check_on_cpu(g.x.device);
  const std::array<std::int64_t, kInfoWords> info{statistics.count, statistics.fingerprint};
  std::vector<double> coefficients(static_cast<std::size_t>(3 * channels));
  const BackwardStep step{{.dy = g.dy,
                           .x = g.x,
                           .mean = statistics.mean.data(),
                           .rstd = statistics.rstd.data(),
                           .weight = g.scale,
                           .dx = g.dx,
                           .dweight = g.dscale,
                           .dbias = g.dbias},
                          info.data(),
                          coefficients.data()};
  std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(g.x.dtype, channels)));
  backward_begin(step, message.data(), nullptr, execution);
  const std::vector<std::int64_t> own = message;
  backward_finish(step, own.data(), exchange ? exchange(message) : Merged(), execution);
}

}  // namespace

BatchNormOpStatistics batch_norm_op(const BatchNormOpInputs& inputs,
                                    const BatchNormOpOutputs& outputs,
                                    const BatchNormOpAttributes& attributes,
                                    Communicator& communicator, const Execution& execution) {
  if (attributes.is_infer) {  // nobody waits for this rank
    check_forward(inputs, outputs, attributes);
    return infer(inputs, outputs, attributes, execution);
  }
  return with_communicator(communicator, [&](const Exchange& exchange, int ranks) {
    check_layer("attributes.layer", attributes.layer, ranks);
    check_forward(inputs, outputs, attributes);
    return train(inputs, outputs, attributes, exchange, execution);
  });
}

void batch_norm_op_backward(const BatchNormOpGradients& gradients,
                            const BatchNormOpStatistics& statistics,
                            const BatchNormOpAttributes& attributes, Communicator& communicator,
                            const Execution& execution) {
  if (!exchanges(gradients, attributes)) {  // nobody waits
    backward(gradients, statistics, attributes, {}, execution);
    return;
  }
  with_communicator(communicator, [&](const Exchange& exchange, int) {
    backward(gradients, statistics, attributes, exchange, execution);
  });
}

}  // namespace syncbn
