// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>

#include "syncbn/step.hpp"
#include "xla/ffi/api/ffi.h"

// The doors of a step (syncbn/step.hpp) as handlers of XLA's FFI, for the CPU and for CUDA. XLA
// sums the messages between them. Programs without 64-bit types carry statistics and info as
// uint32.
namespace syncbn::jax {
namespace {

namespace ffi = xla::ffi;
using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

/// XLA's threads. The caller works, too, and waits only for parts that a thread has begun: all
/// other threads may be waiting for callers like it.
class Pool final : public Executor {
 public:
  explicit Pool(ffi::ThreadPool pool) : pool_(pool) {}

  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const Body& body) override {
    const std::int64_t largest = (end - begin) / std::max<std::int64_t>(1, grain);
    const std::int64_t parts = std::min(largest, threads_ == 1 ? 1 : 4 * threads_);
    if (parts < 2) {
      return serial_executor().parallel_for(begin, end, grain, body);
    }
    const std::shared_ptr<Work> work(new Work{begin, end - begin, parts, &body});
    for (std::int64_t helper = 1; helper < std::min(parts, threads_); ++helper) {
      pool_.Schedule([work] { work->run(); });
    }
    work->run();
    work->wait();
  }
  int concurrency() const override { return static_cast<int>(threads_); }

 private:
  struct Work {
    const std::int64_t begin, items, parts;
    const Body* const body;  // valid while parts are left
    std::atomic<std::int64_t> next = 0, done = 0;
    std::mutex mutex = {};
    std::exception_ptr error = nullptr;
    std::int64_t bound(std::int64_t part) const {  // the first parts are longer by one
      return begin + part * (items / parts) + std::min(part, items % parts);
    }
    void run() {
      for (std::int64_t part = next++; part < parts; part = next++) {
        try {
          (*body)(bound(part), bound(part + 1));
        } catch (...) {
          const std::lock_guard lock(mutex);
          error = std::current_exception();
        }
        if (++done == parts) {
          done.notify_all();
        }
      }
    }
    void wait() const {
      for (std::int64_t seen = done; seen < parts; seen = done) {
        done.wait(seen);
      }
      if (error) {
        std::rethrow_exception(error);
      }
    }
  };

  ffi::ThreadPool pool_;
  std::int64_t threads_ = std::max<std::int64_t>(1, pool_.num_threads());
};

DType dtype_of(const In& buffer) {  // of the four that Python lets through
  const ffi::DataType type = buffer.element_type();
  return type == ffi::F16    ? DType::kFloat16
         : type == ffi::BF16 ? DType::kBFloat16
         : type == ffi::F64  ? DType::kFloat64
                             : DType::kFloat32;
}

std::int64_t* words(const In& buffer) { return static_cast<std::int64_t*>(buffer.untyped_data()); }

Merged merged_of(const In& merged, DType dtype, std::int64_t ranks) {
  return {words(merged), words(merged) + kHeaderWords, dtype, static_cast<int>(ranks)};
}
/// Buffers as views and steps, on this device.
template <Device kDevice>
struct Views {
  /// The samples, whose channels are on this axis, as (N, C, spatial...), without a copy.
  static MutableTensorView samples(const In& buffer, std::int64_t axis) {
    const auto dims = buffer.dimensions();
    const MutableTensorView all(nullptr, dtype_of(buffer), Extents(dims.begin(), dims.end()));
    MutableTensorView view(buffer.untyped_data(), all.dtype, {}, {}, kDevice);
    const auto channels = static_cast<std::size_t>(axis), first = std::size_t{channels == 0};
    const auto add = [&](std::size_t from) {
      view.sizes.push_back(all.sizes[from]);
      view.strides.push_back(all.strides[from]);
    };
    add(first);
    add(channels);
    for (std::size_t other = first + 1; other < dims.size(); ++other) {
      if (other != channels) {
        add(other);
      }
    }
    return view;
  }
  /// A parameter or statistic, and a mask: absent without entries.
  static MutableTensorView entries(const In& buffer) {
    const auto count = static_cast<std::int64_t>(buffer.element_count());
    return count == 0
               ? MutableTensorView()
               : MutableTensorView(buffer.untyped_data(), dtype_of(buffer), {count}, {1}, kDevice);
  }
  static MaskView elements(const In& mask) {
    const Extents sizes(mask.dimensions().begin(), mask.dimensions().end());
    const auto* const data = static_cast<const std::uint8_t*>(mask.untyped_data());
    return mask.element_count() == 0 ? MaskView() : MaskView(data, sizes, kDevice);
  }
  /// A forward that reads no samples, only mean, var and rstd, one after another.
  static ForwardStep of_moments(const In& stats, const In& info, DType dtype) {
    const auto channels = static_cast<std::int64_t>(stats.size_bytes() / (3 * sizeof(double)));
    ForwardStep step{.info = words(info)};
    step.pass.x = {nullptr, dtype, {0, channels}, {channels, 1}, kDevice};
    step.pass.mean = static_cast<double*>(stats.untyped_data());
    step.pass.var = step.pass.mean + channels;
    step.pass.rstd = step.pass.var + channels;
    return step;
  }
  static BackwardStep backward(const In& dy, const In& x, const In& mask, const In& stats,
                               const In& info, std::int64_t axis) {
    const ForwardPass forward = of_moments(stats, info, dtype_of(x)).pass;
    return {.pass = {.dy = samples(dy, axis),
                     .x = samples(x, axis),
                     .mask = elements(mask),
                     .mean = forward.mean,
                     .rstd = forward.rstd},
            .info = words(info)};
  }
};

/// A device that returned an error would take no part in later sums, for which the others wait. So
/// on the CPU a refusal goes to all devices in the message, and what cannot be computed is NaN.
struct OnCpu : Views<Device::kCpu> {
  using Context = ffi::ThreadPool;
  explicit OnCpu(ffi::ThreadPool threads) : pool(threads), execution(pool) {}
  template <class Body>
  ffi::Error run(const Body& body, std::initializer_list<In> nan, const In* message = nullptr) {
    try {
      body();
    } catch (const std::exception&) {
      for (const In& output : nan) {  // all bits set: NaN in each dtype, -1 elements in info
        std::memset(output.untyped_data(), 0xff, output.size_bytes());
      }
      if (message != nullptr) {
        std::memset(message->untyped_data(), 0, message->size_bytes());
        rejection_header(words(*message));
      }
    }
    return ffi::Error::Success();
  }
  static std::int64_t* workspace(const TensorView&) { return nullptr; }
  Pool pool;
  Execution execution;
};

struct OnCuda : Views<Device::kCuda> {
  using Context = ffi::PlatformStream<void*>;
  explicit OnCuda(void* stream) : execution(Execution::on_stream(stream)) {}
  template <class Body>
  ffi::Error run(const Body& body, std::initializer_list<In>, const In* = nullptr) {
    try {
      body();
    } catch (const std::exception& error) {
      return ffi::Error::Internal(error.what());
    }
    return ffi::Error::Success();
  }
  std::int64_t* workspace(const TensorView& x) const {
    return stream_workspace(x.dtype, x.sizes[1], execution.stream);
  }
  Execution execution;
};

template <class Where>
ffi::Error sums(Where& on, In x, In mask, In call, Out message, double eps, std::int64_t axis,
                std::int64_t layer) {
  const auto body = [&] {
    ForwardStep step{.pass = {.x = on.samples(x, axis), .mask = on.elements(mask), .eps = eps}};
    step.layer = static_cast<std::uint64_t>(layer);
    step.call = words(call);
    step.workspace = on.workspace(step.pass.x);
    forward_begin(step, words(*message), on.execution);
  };
  return on.run(body, {}, &*message);
}

template <class Where>
ffi::Error statistics(Where& on, In merged, Out stats, Out info, double eps, std::int64_t dtype,
                      std::int64_t ranks) {
  const auto body = [&] {
    ForwardStep step = on.of_moments(*stats, *info, static_cast<DType>(dtype));
    step.pass.eps = eps;
    forward_finish(step, merged_of(merged, step.pass.x.dtype, ranks), on.execution);
  };
  return on.run(body, {*stats, *info});
}

/// The new statistics lie in the memory of the old ones, and stay so where devices disagree.
template <class Where>
ffi::Error update(Where& on, In stats, In info, In, In, Out mean, Out var, double factor) {
  const auto body = [&] {
    ForwardStep step = on.of_moments(stats, info, DType::kFloat32);
    step.running = {.mean = on.entries(*mean), .var = on.entries(*var), .momentum = factor};
    forward_update(step, on.execution);
  };
  return on.run(body, {});
}

template <class Where>
ffi::Error normalize(Where& on, In x, In mask, In scale, In bias, In stats, Out y,
                     std::int64_t axis) {
  const auto body = [&] {
    ForwardStep step = on.of_moments(stats, stats, dtype_of(x));
    step.pass.x = on.samples(x, axis);
    step.pass.mask = on.elements(mask);
    step.pass.weight = on.entries(scale);
    step.pass.bias = on.entries(bias);
    step.pass.y = on.samples(*y, axis);
    forward_finish(step, {}, on.execution);
  };
  return on.run(body, {*y});
}

template <class Where>
ffi::Error gradient_sums(Where& on, In dy, In x, In mask, In stats, In info, Out message,
                         std::int64_t axis) {
  const auto body = [&] {
    BackwardStep step = on.backward(dy, x, mask, stats, info, axis);
    step.workspace = on.workspace(step.pass.x);
    backward_begin(step, words(*message), nullptr, on.execution);
  };
  return on.run(body, {}, &*message);
}

/// Of the samples, the parameters, or both: what has no entries is left out.
template <class Where>
ffi::Error gradients(Where& on, In dy, In x, In mask, In scale, In own, In merged, In stats,
                     In info, Out dx, Out dscale, Out dbias, Out coefficients, std::int64_t axis,
                     std::int64_t ranks) {
  const auto body = [&] {
    BackwardStep step = on.backward(dy, x, mask, stats, info, axis);
    step.pass.weight = on.entries(scale);
    step.pass.dx = on.samples(*dx, axis);
    step.pass.dweight = on.entries(*dscale);
    step.pass.dbias = on.entries(*dbias);
    step.coefficients = static_cast<double*>(coefficients->untyped_data());
    backward_finish(step, own.element_count() == 0 ? nullptr : words(own),
                    merged_of(merged, step.pass.x.dtype, ranks), on.execution);
  };
  return on.run(body, {*dx, *dscale, *dbias});
}

}  // namespace

#define SYNCBN_HANDLER_ON(Where, symbol, name, signature)                                    \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(                   \
      XLA_FFI_CallFrame* frame) {                                                            \
    static const auto handler =                                                              \
        ffi::Ffi::Bind().Ctx<Where::Context>() signature.To([](auto context, auto... rest) { \
          Where on(context);                                                                 \
          return name(on, rest...);                                                          \
        });                                                                                  \
    return handler->Call(frame);                                                             \
  }
#define SYNCBN_HANDLER(name, signature)                          \
  SYNCBN_HANDLER_ON(OnCpu, syncbn_##name##_cpu, name, signature) \
  SYNCBN_HANDLER_ON(OnCuda, syncbn_##name##_cuda, name, signature)
#define IN .Arg<ffi::AnyBuffer>()
#define OUT .Ret<ffi::AnyBuffer>()
#define NUMBER(name) .Attr<std::int64_t>(#name)
#define REAL(name) .Attr<double>(#name)
SYNCBN_HANDLER(sums, IN IN IN OUT REAL(eps) NUMBER(axis) NUMBER(layer))
SYNCBN_HANDLER(statistics, IN OUT OUT REAL(eps) NUMBER(dtype) NUMBER(ranks))
SYNCBN_HANDLER(update, IN IN IN IN OUT OUT REAL(factor))
SYNCBN_HANDLER(normalize, IN IN IN IN IN OUT NUMBER(axis))
SYNCBN_HANDLER(gradient_sums, IN IN IN IN IN OUT NUMBER(axis))
SYNCBN_HANDLER(gradients, IN IN IN IN IN IN IN IN OUT OUT OUT OUT NUMBER(axis) NUMBER(ranks))

}  // namespace syncbn::jax
