// SPDX-License-Identifier: Apache-2.0
#include "syncbn/c_api.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "c_api/arguments.hpp"
#include "syncbn/version.h"

// Errors and executors of the C interface.
namespace syncbn::c_api {
namespace {

std::optional<Error>& last_error() {
  thread_local std::optional<Error> error;
  return error;
}

syncbn_status keep(syncbn_status status, const char* text) noexcept {
  try {
    last_error().emplace(text);
  } catch (...) {  // no memory for the text; the code remains
    last_error().reset();
  }
  return status;
}

[[noreturn]] void raise(std::int32_t status, const std::string& text,
                        const std::vector<int>& ranks) {
  switch (status) {
    case SYNCBN_STATUS_INVALID_ARGUMENT:
      throw InvalidArgument(text, ranks);
    case SYNCBN_STATUS_DIVERGENCE:
      throw DivergenceError(text, ranks);
    case SYNCBN_STATUS_TIMEOUT:
      throw ExchangeTimeout(text, ranks);
    case SYNCBN_STATUS_PEER_LOST:
      throw PeerLost(text, ranks);
    case SYNCBN_STATUS_UNAVAILABLE:
      throw Unavailable(text, ranks);
    case SYNCBN_STATUS_OUT_OF_MEMORY:
      throw std::bad_alloc();
    default:
      throw Error(text, ranks);
  }
}

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

}  // namespace

syncbn_status keep_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    last_error() = error;
    static_assert(static_cast<int>(ErrorKind::kUnavailable) == SYNCBN_STATUS_UNAVAILABLE);
    return static_cast<syncbn_status>(error.kind());
  } catch (const std::bad_alloc&) {
    return keep(SYNCBN_STATUS_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return keep(SYNCBN_STATUS_ERROR, error.what());
  } catch (...) {
    return keep(SYNCBN_STATUS_ERROR, "an exception of an unknown type");
  }
}

void clear_last_error() { last_error().reset(); }

void raise_unless_ok(const char* name, std::int32_t status) {
  if (status == SYNCBN_STATUS_OK) {
    return;
  }
  const std::string unnamed =
      std::string(name) + ": got status " + std::to_string(status) + ", expected SYNCBN_STATUS_OK";
  const Error error = last_error().value_or(Error(unnamed));
  raise(status, error.what(), error.ranks());
}

}  // namespace syncbn::c_api

// What follows is C.
using namespace syncbn;
using namespace syncbn::c_api;

const char* syncbn_last_error(void) {
  const std::optional<Error>& error = last_error();
  return error.has_value() ? error->what() : "";
}

const char* syncbn_last_error_layer(void) {
  const std::optional<Error>& error = last_error();
  return error.has_value() ? error->layer().c_str() : "";
}

int32_t syncbn_last_error_ranks(const int32_t** ranks) {
  const std::optional<Error>& error = last_error();
  if (ranks != nullptr) {
    *ranks = error.has_value() ? error->ranks().data() : nullptr;
  }
  return error.has_value() ? static_cast<int32_t>(error->ranks().size()) : 0;
}

void syncbn_set_last_error(const char* text, const int32_t* ranks, int32_t count) {
  clear_last_error();
  if (text == nullptr || *text == '\0') {
    return;
  }
  guarded([&] {
    const auto known = static_cast<std::size_t>(ranks == nullptr ? 0 : std::max(count, 0));
    last_error().emplace(text, std::vector<int>(ranks, ranks + known));
  });
}

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
    out = new syncbn_executor{std::make_unique<CallbackExecutor>(sized("functions", functions))};
  });
}

void syncbn_executor_destroy(syncbn_executor* executor) { delete executor; }
