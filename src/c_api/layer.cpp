// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "c_api/arguments.hpp"
#include "c_api/groups.hpp"
#include "step/device.hpp"
#include "syncbn/batch_norm.hpp"

// The layer of the C interface; no arithmetic.

struct syncbn_batch_norm {
  std::string name;
  std::shared_ptr<syncbn::Communicator> communicator;
  syncbn::BatchNorm of_cpp;
};

struct syncbn_saved {
  syncbn::Saved of_cpp;
};

namespace syncbn::c_api {
namespace {

std::optional<double> momentum_of(double momentum, std::int32_t cumulative_average) {
  if (cumulative_average != 0 && cumulative_average != 1) {
    refuse("cumulative_average", std::to_string(cumulative_average), "0 or 1");
  }
  return cumulative_average != 0 ? std::nullopt : std::optional<double>(momentum);
}

BatchNorm::Options options_of(const syncbn_batch_norm_options* given) {
  const syncbn_batch_norm_options& from = sized("options", given);
  BatchNorm::Options options;
  options.channels = from.channels;
  options.name = from.name == nullptr ? "" : from.name;
  options.eps = from.eps;
  options.momentum = momentum_of(from.momentum, from.cumulative_average);
  options.activation = activation_of(from.activation);
  options.statistics = statistics_of(from.statistics);
  return options;
}

BatchNorm::Forward forward_of(const syncbn_forward_arguments* given) {
  const syncbn_forward_arguments& a = sized("arguments", given);
  return {.x = samples("x", a.x),
          .mask = mask_of(a.mask),
          .weight = tensor("weight", a.weight),
          .bias = tensor("bias", a.bias),
          .residual = tensor("residual", a.residual, kSampleAxes),
          .y = samples("y", a.y),
          .running_mean = tensor("running_mean", a.running_mean),
          .running_var = tensor("running_var", a.running_var),
          .num_batches_tracked = a.num_batches_tracked};
}

BatchNorm::Backward backward_of(const syncbn_backward_arguments* given) {
  const syncbn_backward_arguments& a = sized("arguments", given);
  return {.dy = samples("dy", a.dy),
          .x = samples("x", a.x),
          .mask = mask_of(a.mask),
          .weight = tensor("weight", a.weight),
          .bias = tensor("bias", a.bias),
          .dx = samples("dx", a.dx),
          .dweight = tensor("dweight", a.dweight),
          .dbias = tensor("dbias", a.dbias),
          .dresidual = tensor("dresidual", a.dresidual, kSampleAxes),
          .affine = enum_of("affine", a.affine, AffineGradients::kGlobal,
                            "SYNCBN_AFFINE_GRADIENTS_SHARE or SYNCBN_AFFINE_GRADIENTS_GLOBAL")};
}

BatchNorm::Evaluate evaluate_of(const syncbn_evaluate_arguments* given) {
  const syncbn_evaluate_arguments& a = sized("arguments", given);
  const BatchNorm::Evaluate of_cpp = {.x = samples("x", a.x),
                                      .mask = mask_of(a.mask),
                                      .weight = tensor("weight", a.weight),
                                      .bias = tensor("bias", a.bias),
                                      .residual = tensor("residual", a.residual, kSampleAxes),
                                      .running_mean = tensor("running_mean", a.running_mean),
                                      .running_var = tensor("running_var", a.running_var),
                                      .y = samples("y", a.y)};
  check_on_cpu(of_cpp.x.device);
  return of_cpp;
}

BatchNorm::EvaluateBackward evaluate_backward_of(const syncbn_evaluate_backward_arguments* given) {
  const syncbn_evaluate_backward_arguments& a = sized("arguments", given);
  const BatchNorm::EvaluateBackward of_cpp = {
      .dy = samples("dy", a.dy),
      .x = samples("x", a.x),
      .mask = mask_of(a.mask),
      .weight = tensor("weight", a.weight),
      .bias = tensor("bias", a.bias),
      .residual = tensor("residual", a.residual, kSampleAxes),
      .running_mean = tensor("running_mean", a.running_mean),
      .running_var = tensor("running_var", a.running_var),
      .dx = samples("dx", a.dx),
      .dweight = tensor("dweight", a.dweight),
      .dbias = tensor("dbias", a.dbias),
      .dresidual = tensor("dresidual", a.dresidual, kSampleAxes)};
  check_on_cpu(of_cpp.x.device);
  return of_cpp;
}

}  // namespace
}  // namespace syncbn::c_api

// What follows is C.
using namespace syncbn;
using namespace syncbn::c_api;

syncbn_status syncbn_batch_norm_create(const syncbn_batch_norm_options* options,
                                       const syncbn_communicator* communicator,
                                       syncbn_batch_norm** layer) {
  return guarded([&] {
    const std::shared_ptr<Communicator> group = communicator_of(communicator);
    BatchNorm::Options given;
    std::unique_ptr<syncbn_batch_norm> made;
    try {
      required("layer", layer);
      given = options_of(options);
      made.reset(  // its layer follows, which tells the others itself
          new syncbn_batch_norm{std::string(given.name), group, BatchNorm({.channels = 0})});
    } catch (const std::exception& error) {  // the others would wait for a layer that is not there
      group->refuse(error.what());
      throw;
    }
    made->of_cpp = BatchNorm(given, *group);
    *layer = made.release();
  });
}

void syncbn_batch_norm_destroy(syncbn_batch_norm* layer) { delete layer; }

syncbn_status syncbn_batch_norm_set_momentum(syncbn_batch_norm* layer, double momentum,
                                             int32_t cumulative_average) {
  return guarded([&] {
    required("layer", layer).of_cpp.set_momentum(momentum_of(momentum, cumulative_average));
  });
}

syncbn_status syncbn_saved_create(syncbn_saved** saved) {
  return guarded([&] {
    syncbn_saved*& out = required("saved", saved);
    out = new syncbn_saved;
  });
}

void syncbn_saved_destroy(syncbn_saved* saved) { delete saved; }

int64_t syncbn_saved_channels(const syncbn_saved* saved) {
  return saved == nullptr ? 0 : static_cast<int64_t>(saved->of_cpp.mean().size());
}
int64_t syncbn_saved_count(const syncbn_saved* saved) {
  return saved == nullptr ? 0 : saved->of_cpp.count();
}
const double* syncbn_saved_mean(const syncbn_saved* saved) {
  return saved == nullptr ? nullptr : saved->of_cpp.mean().data();
}
const double* syncbn_saved_var(const syncbn_saved* saved) {
  return saved == nullptr ? nullptr : saved->of_cpp.var().data();
}
const double* syncbn_saved_rstd(const syncbn_saved* saved) {
  return saved == nullptr ? nullptr : saved->of_cpp.rstd().data();
}

syncbn_status syncbn_batch_norm_forward(syncbn_batch_norm* layer,
                                        const syncbn_forward_arguments* arguments,
                                        syncbn_saved* saved, syncbn_executor* executor) {
  return guarded([&] {
    syncbn_batch_norm& of = required("layer", layer);
    BatchNorm::Forward forward;
    try {
      in_call(of.name, static_cast<std::int64_t>(of.of_cpp.calls()), "forward", [&] {
        required("saved", saved);
        forward = forward_of(arguments);
      });
    } catch (const std::exception& error) {
      of.of_cpp.abandon_forward(error.what());
      if (saved != nullptr) {
        saved->of_cpp = Saved();
      }
      throw;
    }
    of.of_cpp.forward(forward, saved->of_cpp, execution_of(executor));
  });
}

syncbn_status syncbn_batch_norm_backward(syncbn_batch_norm* layer,
                                         const syncbn_backward_arguments* arguments,
                                         const syncbn_saved* saved, syncbn_executor* executor) {
  return guarded([&] {
    syncbn_batch_norm& of = required("layer", layer);
    BatchNorm::Backward backward;
    try {
      in_call(of.name, -1, "backward", [&] {
        required("saved", saved);
        backward = backward_of(arguments);
      });
    } catch (const std::exception& error) {
      if (Communicator* const group = of.of_cpp.group()) {
        group->refuse(error.what());
      }
      throw;
    }
    of.of_cpp.backward(backward, saved->of_cpp, execution_of(executor));
  });
}

syncbn_status syncbn_batch_norm_evaluate(syncbn_batch_norm* layer,
                                         const syncbn_evaluate_arguments* arguments,
                                         syncbn_executor* executor) {
  return guarded([&] {
    syncbn_batch_norm& of = required("layer", layer);
    BatchNorm::Evaluate evaluate;
    in_call(of.name, -1, "evaluation", [&] { evaluate = evaluate_of(arguments); });
    of.of_cpp.evaluate(evaluate, execution_of(executor));
  });
}

syncbn_status syncbn_batch_norm_evaluate_backward(
    syncbn_batch_norm* layer, const syncbn_evaluate_backward_arguments* arguments,
    syncbn_executor* executor) {
  return guarded([&] {
    syncbn_batch_norm& of = required("layer", layer);
    BatchNorm::EvaluateBackward backward;
    in_call(of.name, -1, "backward of an evaluation",
            [&] { backward = evaluate_backward_of(arguments); });
    of.of_cpp.evaluate_backward(backward, execution_of(executor));
  });
}
