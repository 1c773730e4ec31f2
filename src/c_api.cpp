#include "syncbn/c_api.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "c_api_arguments.hpp"
#include "c_api_groups.hpp"
#include "layer_call.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/version.hpp"

// Errors, objects and the layer of the C interface; no arithmetic.

struct syncbn_batch_statistics {
  syncbn::BatchStatistics values;
};

namespace syncbn::c_api {
namespace {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

[[noreturn]] void raise(std::int32_t status, const std::string& text) {
  switch (status) {
    case SYNCBN_INVALID_ARGUMENT:
      throw InvalidArgument(text);
    case SYNCBN_DIVERGENCE:
      throw DivergenceError(text);
    case SYNCBN_TIMEOUT:
      throw ExchangeTimeout(text);
    case SYNCBN_PEER_LOST:
      throw PeerLost(text);
    case SYNCBN_UNAVAILABLE:
      throw Unavailable(text);
    case SYNCBN_OUT_OF_MEMORY:
      throw std::bad_alloc();
    default:
      throw Error(text);
  }
}

BatchNormOptions options_of(const syncbn_batch_norm_options* given) {
  const syncbn_batch_norm_options& from = required("options", given);
  BatchNormOptions options;
  options.eps = from.eps;
  options.momentum =
      from.cumulative_average != 0 ? std::nullopt : std::optional<double>(from.momentum);
  options.layer = from.layer;
  options.call = from.call;
  options.activation = activation_of(from.activation);
  options.statistics = enum_of("statistics", from.statistics, Statistics::kWelford,
                               "SYNCBN_REPRODUCIBLE or SYNCBN_WELFORD");
  return options;
}

/// A group whose exchanges are the caller's functions.
class Callbacks final : public Communicator {
 public:
  explicit Callbacks(const syncbn_communicator* given) : given_(required("communicator", given)) {
    if (given_.size < 1 || given_.size > kMaxRanks) {
      refuse("communicator.size", std::to_string(given_.size), "1 to 2048");
    }
    if (given_.rank < 0 || given_.rank >= given_.size) {
      refuse("communicator.rank", std::to_string(given_.rank), "0 to size - 1");
    }
    if (given_.all_reduce_sum == nullptr) {
      refuse("communicator.all_reduce_sum", "NULL", "a function");
    }
  }
  int rank() const override { return given_.rank; }
  int size() const override { return given_.size; }

  void all_reduce_sum(std::span<std::int64_t> words) override {
    raise_unless_ok("communicator.all_reduce_sum", [&] {
      return given_.all_reduce_sum(given_.user_data, words.data(),
                                   static_cast<std::int64_t>(words.size()));
    });
  }
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override {
    raise_unless_ok("communicator.all_gather", [&] {
      return given_.all_gather(given_.user_data, in.data(), static_cast<std::int64_t>(in.size()),
                               out.data());
    });
  }
  void abandon(const std::string& reason) override {
    if (given_.abandon != nullptr) {
      given_.abandon(given_.user_data, reason.c_str());
    }
  }
  bool gathers() const { return given_.all_gather != nullptr; }
  /// A group of the library's has sums in parts.
  SumInParts* parts() override {
    Communicator* const ours = communicator_of(given_);
    return ours == nullptr ? nullptr : ours->parts();
  }

 private:
  const syncbn_communicator given_;
};

/// Threads of the caller's.
class CallbackExecutor final : public Executor {
 public:
  explicit CallbackExecutor(const syncbn_executor_functions& given) : given_(given) {
    if (given_.concurrency < 1) {
      refuse("functions.concurrency", std::to_string(given_.concurrency), "1 or more");
    }
    if (given_.parallel_for == nullptr) {
      refuse("functions.parallel_for", "NULL", "a function");
    }
  }
  int concurrency() const override { return given_.concurrency; }

  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const Body& body) override {
    Job job{body, {}, nullptr};
    given_.parallel_for(given_.user_data, begin, end, grain, run, &job);
    if (job.error != nullptr) {
      std::rethrow_exception(job.error);
    }
  }

 private:
  /// The caller's code, which an exception must not pass, lies between parallel_for and run.
  struct Job {
    const Body& body;
    std::mutex mutex;
    std::exception_ptr error;
  };
  static void run(void* data, std::int64_t begin, std::int64_t end) {
    Job& job = *static_cast<Job*>(data);
    try {
      job.body(begin, end);
    } catch (...) {
      const std::lock_guard lock(job.mutex);
      job.error = std::current_exception();
    }
  }

  const syncbn_executor_functions given_;
};

std::int32_t sum_of_one(void*, std::int64_t*, std::int64_t) { return SYNCBN_OK; }

std::int32_t gather_of_one(void*, const void* in, std::int64_t bytes, void* out) {
  const auto* from = static_cast<const std::byte*>(in);
  std::copy(from, from + bytes, static_cast<std::byte*>(out));
  return SYNCBN_OK;
}

}  // namespace

syncbn_status fail(syncbn_status status, const char* text) noexcept {
  try {
    last_error() = text;
  } catch (...) {  // no memory for the text; the code remains
    last_error().clear();
  }
  return status;
}

void clear_last_error() { last_error().clear(); }

void raise_unless_ok(const char* name, std::int32_t status) {
  if (status != SYNCBN_OK) {
    raise(status, last_error().empty() ? std::string(name) + ": got status " +
                                             std::to_string(status) + ", expected SYNCBN_OK"
                                       : last_error());
  }
}

}  // namespace syncbn::c_api

// What follows is C.
using namespace syncbn;
using namespace syncbn::c_api;

const char* syncbn_last_error(void) { return last_error().c_str(); }

void syncbn_set_last_error(const char* text) { fail(SYNCBN_ERROR, text == nullptr ? "" : text); }

const char* syncbn_version(void) { return kVersion; }

syncbn_status syncbn_thread_pool_create(int32_t threads, syncbn_executor** executor) {
  return guarded([&] {
    syncbn_executor*& out = required("executor", executor);
    out = new syncbn_executor{std::make_unique<ThreadPool>(threads)};
  });
}

syncbn_status syncbn_executor_create(const syncbn_executor_functions* functions,
                                     syncbn_executor** executor) {
  return guarded([&] {
    syncbn_executor*& out = required("executor", executor);
    out = new syncbn_executor{std::make_unique<CallbackExecutor>(required("functions", functions))};
  });
}

void syncbn_executor_destroy(syncbn_executor* executor) { delete executor; }

const syncbn_communicator* syncbn_self_communicator(void) {
  static constexpr syncbn_communicator kSelf = {nullptr, 0, 1, sum_of_one, gather_of_one, nullptr};
  return &kSelf;
}

void syncbn_batch_norm_options_init(syncbn_batch_norm_options* options) {
  if (options != nullptr) {
    *options = {};
    options->eps = BatchNormOptions().eps;
    options->momentum = BatchNormOptions().momentum.value_or(0.0);
    options->activation.negative_slope = Activation().negative_slope;
  }
}

void syncbn_batch_statistics_destroy(syncbn_batch_statistics* statistics) { delete statistics; }

int64_t syncbn_batch_statistics_channels(const syncbn_batch_statistics* statistics) {
  return statistics == nullptr ? 0 : static_cast<int64_t>(statistics->values.mean.size());
}
int64_t syncbn_batch_statistics_count(const syncbn_batch_statistics* statistics) {
  return statistics == nullptr ? 0 : statistics->values.count;
}
const double* syncbn_batch_statistics_mean(const syncbn_batch_statistics* statistics) {
  return statistics == nullptr ? nullptr : statistics->values.mean.data();
}
const double* syncbn_batch_statistics_var(const syncbn_batch_statistics* statistics) {
  return statistics == nullptr ? nullptr : statistics->values.var.data();
}
const double* syncbn_batch_statistics_rstd(const syncbn_batch_statistics* statistics) {
  return statistics == nullptr ? nullptr : statistics->values.rstd.data();
}

syncbn_status syncbn_batch_norm_forward(
    const syncbn_tensor* x, const syncbn_mask* mask, const syncbn_tensor* weight,
    const syncbn_tensor* bias, const syncbn_tensor* residual, const syncbn_tensor* y,
    const syncbn_tensor* running_mean, const syncbn_tensor* running_var,
    int64_t* num_batches_tracked, syncbn_batch_statistics** statistics,
    const syncbn_batch_norm_options* options, const syncbn_communicator* communicator,
    syncbn_executor* executor) {
  return guarded([&] {
    Callbacks group(communicator);
    struct Arguments {
      TensorView x, weight, bias, residual;
      MaskView mask;
      MutableTensorView y;
      RunningStatistics running;
      BatchNormOptions options;
      std::unique_ptr<syncbn_batch_statistics> statistics;
    } a;
    before_exchange(group, [&] {
      required("statistics", statistics);
      a = {samples("x", x),
           tensor("weight", weight),
           tensor("bias", bias),
           tensor("residual", residual),
           mask_of(mask),
           samples("y", y),
           {tensor("running_mean", running_mean), tensor("running_var", running_var),
            num_batches_tracked},
           options_of(options),
           std::make_unique<syncbn_batch_statistics>()};
      if (a.options.statistics == Statistics::kWelford && !group.gathers()) {
        refuse("communicator.all_gather", "NULL", "a function (statistics is SYNCBN_WELFORD)");
      }
    });
    a.statistics->values = batch_norm_forward(a.x, a.mask, a.weight, a.bias, a.residual, a.y,
                                              a.running, a.options, group, execution_of(executor));
    *statistics = a.statistics.release();
  });
}

syncbn_status syncbn_batch_norm_backward(const syncbn_tensor* dy, const syncbn_tensor* x,
                                         const syncbn_mask* mask, const syncbn_tensor* weight,
                                         const syncbn_tensor* bias,
                                         const syncbn_batch_statistics* statistics,
                                         const syncbn_tensor* dx, const syncbn_tensor* dweight,
                                         const syncbn_tensor* dbias, const syncbn_tensor* dresidual,
                                         int32_t affine, const syncbn_communicator* communicator,
                                         syncbn_executor* executor) {
  return guarded([&] {
    Callbacks group(communicator);
    struct Arguments {
      TensorView dy, x, weight, bias;
      MaskView mask;
      MutableTensorView dx, dweight, dbias, dresidual;
      AffineGradients which;
    } a;
    before_exchange(group, [&] {
      required("statistics", statistics);
      a = {samples("dy", dy),
           samples("x", x),
           tensor("weight", weight),
           tensor("bias", bias),
           mask_of(mask),
           samples("dx", dx),
           tensor("dweight", dweight),
           tensor("dbias", dbias),
           tensor("dresidual", dresidual),
           enum_of("affine", affine, AffineGradients::kGlobal, "SYNCBN_SHARE or SYNCBN_GLOBAL")};
    });
    batch_norm_backward(a.dy, a.x, a.mask, a.weight, a.bias, statistics->values, a.dx, a.dweight,
                        a.dbias, a.dresidual, a.which, group, execution_of(executor));
  });
}

syncbn_status syncbn_batch_norm_evaluate(const syncbn_tensor* x, const syncbn_mask* mask,
                                         const syncbn_tensor* weight, const syncbn_tensor* bias,
                                         const syncbn_tensor* residual,
                                         const syncbn_tensor* running_mean,
                                         const syncbn_tensor* running_var, const syncbn_tensor* y,
                                         const syncbn_batch_norm_options* options,
                                         syncbn_executor* executor) {
  return guarded([&] {
    batch_norm_evaluate(samples("x", x), mask_of(mask), tensor("weight", weight),
                        tensor("bias", bias), tensor("residual", residual),
                        tensor("running_mean", running_mean), tensor("running_var", running_var),
                        samples("y", y), options_of(options), execution_of(executor));
  });
}

syncbn_status syncbn_batch_norm_evaluate_backward(
    const syncbn_tensor* dy, const syncbn_tensor* x, const syncbn_mask* mask,
    const syncbn_tensor* weight, const syncbn_tensor* bias, const syncbn_tensor* residual,
    const syncbn_tensor* running_mean, const syncbn_tensor* running_var, const syncbn_tensor* dx,
    const syncbn_tensor* dweight, const syncbn_tensor* dbias, const syncbn_tensor* dresidual,
    const syncbn_batch_norm_options* options, syncbn_executor* executor) {
  return guarded([&] {
    batch_norm_evaluate_backward(
        samples("dy", dy), samples("x", x), mask_of(mask), tensor("weight", weight),
        tensor("bias", bias), tensor("residual", residual), tensor("running_mean", running_mean),
        tensor("running_var", running_var), samples("dx", dx), tensor("dweight", dweight),
        tensor("dbias", dbias), tensor("dresidual", dresidual), options_of(options),
        execution_of(executor));
  });
}
