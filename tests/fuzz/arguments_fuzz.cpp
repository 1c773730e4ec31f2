// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "bytes.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "syncbn/c_api.h"
#include "syncbn/error.hpp"

// Any arguments of the C interface: what must be refused is, with a clear text and without an
// access to the caller's memory; everything else runs within that memory.
namespace syncbn::fuzz {
namespace {

void expect(syncbn_status status, bool accepted, bool may_diverge = false) {
  const std::string text = syncbn_last_error();
  if (status == SYNCBN_STATUS_OK || (may_diverge && status == SYNCBN_STATUS_DIVERGENCE)) {
    require(accepted, "arguments that should be refused were accepted");
    return;
  }
  if (accepted) {
    fail("refused: " + text);
  }
  if (status == SYNCBN_STATUS_INVALID_ARGUMENT) {
    if (text.find(": got ") == std::string::npos || text.find(", expected ") == std::string::npos) {
      fail("an unclear text: " + text);
    }
  } else if (status != SYNCBN_STATUS_UNAVAILABLE || text.find("CUDA") == std::string::npos) {
    fail("status " + std::to_string(status) + ": " + text);
  }
}

double number(Bytes& bytes, double usual) {
  if (!bytes.seldom()) {
    return usual;
  }
  const double kNumbers[] = {0, 1, -1, std::nan(""), INFINITY, 1e-300, 1.5};
  return kNumbers[bytes.below(7)];
}

bool good_activation(const syncbn_activation& a) {
  return is_member(a.kind, 3) &&
         (a.kind != SYNCBN_ACTIVATION_LEAKY_RELU || std::isfinite(a.negative_slope));
}
bool good_eps(double eps) { return eps >= 0 && std::isfinite(eps); }

syncbn_activation activation_of(Bytes& bytes) {
  return {enumeration(bytes, 3), number(bytes, 0.1)};
}

syncbn_batch_norm_options options_of(Bytes& bytes, const Argument& x) {
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.struct_size += bytes.seldom() ? 8 : 0;
  options.channels = bytes.seldom() ? odd_number(bytes) : x.channels();
  options.eps = number(bytes, 1e-5);
  options.momentum = number(bytes, 0.1);
  options.cumulative_average = bytes.below(4) == 3 ? 1 : 0;
  options.statistics = enumeration(bytes, 2);
  options.activation = activation_of(bytes);
  return options;
}

bool good_options(const syncbn_batch_norm_options& options, const Argument& x) {
  return options.struct_size == sizeof(options) && options.channels == x.channels() &&
         good_eps(options.eps) && is_member(options.statistics, 2) &&
         good_activation(options.activation) &&
         (options.cumulative_average != 0 || (options.momentum >= 0 && options.momentum <= 1));
}

/// A layer of one rank, and what a forward of it saves.
struct Layer {
  explicit Layer(const syncbn_batch_norm_options& options)
      : status(syncbn_batch_norm_create(&options, syncbn_self_communicator(), &layer)) {
    require(syncbn_saved_create(&saved) == SYNCBN_STATUS_OK, "an object was refused");
    require((layer != nullptr) == (status == SYNCBN_STATUS_OK), "a layer that was refused");
  }
  ~Layer() {
    syncbn_batch_norm_destroy(layer);
    syncbn_saved_destroy(saved);
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  syncbn_batch_norm* layer = nullptr;
  syncbn_saved* saved = nullptr;
  syncbn_status status;
};

/// x, y or dy, and what all calls have beside it.
struct Common {
  explicit Common(Bytes& bytes)
      : x(Argument::samples(bytes)),
        mask(bytes, x),
        other(Argument::like(bytes, x)),
        out(Argument::like(bytes, x)),
        residual(Argument::maybe(bytes, Argument::like(bytes, x))),
        weight(Argument::per_channel(bytes, x.channels())),
        bias(Argument::per_channel(bytes, x.channels())),
        a(Argument::per_channel(bytes, x.channels())),
        b(Argument::per_channel(bytes, x.channels())) {}
  bool good_samples() const { return x.good_samples() && mask.good(x); }
  bool good_residual() const {
    return residual.well_formed() && (residual.absent() || residual.good_like(x));
  }
  bool good_parameters() const {
    return weight.good_per_channel(x.channels()) && bias.good_per_channel(x.channels());
  }
  bool good_pair() const {
    return a.good_per_channel(x.channels()) && b.good_per_channel(x.channels());
  }
  /// Nothing for a fuzzer; on CUDA a message is made before the device is refused.
  bool too_large(bool accepted) const {
    if (!accepted) {
      return x.device == SYNCBN_DEVICE_CUDA && x.channels() > kMostElements;
    }
    return x.large() || other.large() || out.large() || residual.large() || weight.large() ||
           bias.large() || a.large() || b.large();
  }
  Argument x;
  Mask mask;
  Argument other, out, residual, weight, bias, a, b;
};

void forward(Bytes& bytes) {
  Common c(bytes);
  const syncbn_batch_norm_options options = options_of(bytes, c.x);
  const bool counter = bytes.below(2) == 0;
  const bool cumulative = options.cumulative_average != 0;
  const bool accepted = c.good_samples() && c.out.good_like(c.x) && c.good_residual() &&
                        c.good_parameters() && c.good_pair() && c.out.good_output() &&
                        c.a.good_output() && c.b.good_output() && good_options(options, c.x) &&
                        c.a.absent() == c.b.absent() &&
                        (!cumulative || counter || (c.a.absent() && c.b.absent()));
  if (c.too_large(accepted)) {
    return;
  }
  std::int64_t tracked = 3;
  const syncbn_forward_arguments arguments = {.struct_size = sizeof(arguments),
                                              .x = c.x.make(accepted),
                                              .mask = c.mask.make(accepted),
                                              .weight = c.weight.make(accepted),
                                              .bias = c.bias.make(accepted),
                                              .residual = c.residual.make(accepted),
                                              .y = c.out.make(accepted),
                                              .running_mean = c.a.make(accepted),
                                              .running_var = c.b.make(accepted),
                                              .num_batches_tracked = counter ? &tracked : nullptr};
  const Layer of(options);
  const syncbn_status status =
      of.layer == nullptr ? of.status
                          : syncbn_batch_norm_forward(of.layer, &arguments, of.saved, nullptr);
  expect(status, accepted);
  require(syncbn_saved_channels(of.saved) == (status == SYNCBN_STATUS_OK ? c.x.channels() : 0),
          "statistics without a forward");
  require(status == SYNCBN_STATUS_OK || tracked == 3, "a refused forward counted");
}

/// Makes the forward that a backward with these arguments belongs to, or one of a batch of these
/// sizes alone.
void fill(const Layer& of, const std::vector<std::int64_t>& sizes, std::int32_t dtype,
          const syncbn_backward_arguments* accepted) {
  std::size_t count = 1;
  for (const std::int64_t size : sizes) {
    count *= static_cast<std::size_t>(size);
  }
  std::vector<double> values(count + 1, 0.5);
  const syncbn_tensor tensor = {values.data(),
                                is_member(dtype, 4) ? dtype : 0,
                                0,
                                static_cast<std::int32_t>(sizes.size()),
                                sizes.data(),
                                nullptr};
  syncbn_forward_arguments arguments{};
  arguments.struct_size = sizeof(arguments);
  arguments.x = arguments.y = &tensor;
  if (accepted != nullptr) {
    arguments.x = accepted->x;
    arguments.mask = accepted->mask;
    arguments.weight = accepted->weight;
    arguments.bias = accepted->bias;
    arguments.residual = accepted->dresidual == nullptr ? nullptr : accepted->x;
  }
  require(syncbn_batch_norm_forward(of.layer, &arguments, of.saved, nullptr) == SYNCBN_STATUS_OK,
          syncbn_last_error());
}

void backward(Bytes& bytes) {
  Common c(bytes);
  const std::int32_t affine = enumeration(bytes, 2);
  const auto activation = static_cast<std::int32_t>(bytes.below(3));
  if (c.x.good_samples() && c.x.large()) {
    return;
  }
  const std::vector<std::int64_t> sizes =
      c.x.good_samples() ? c.x.sizes : std::vector<std::int64_t>{2, 3};
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = sizes[1];
  options.activation.kind = activation;
  const Layer of(options);
  const bool accepted = c.good_samples() && c.other.good_like(c.x) && c.out.good_like(c.x) &&
                        c.good_residual() && c.good_parameters() && c.good_pair() &&
                        c.out.good_output() && c.residual.good_output() && c.a.good_output() &&
                        c.b.good_output() && is_member(affine, 2);
  if (!c.too_large(accepted)) {
    const syncbn_backward_arguments arguments = {.struct_size = sizeof(arguments),
                                                 .dy = c.other.make(accepted),
                                                 .x = c.x.make(accepted),
                                                 .mask = c.mask.make(accepted),
                                                 .weight = c.weight.make(accepted),
                                                 .bias = c.bias.make(accepted),
                                                 .dx = c.out.make(accepted),
                                                 .dweight = c.a.make(accepted),
                                                 .dbias = c.b.make(accepted),
                                                 .dresidual = c.residual.make(accepted),
                                                 .affine = affine};
    fill(of, sizes, c.x.dtype, accepted ? &arguments : nullptr);
    expect(syncbn_batch_norm_backward(of.layer, &arguments, of.saved, nullptr), accepted, true);
  }
}

void evaluate(Bytes& bytes) {
  Common c(bytes);
  const syncbn_batch_norm_options options = options_of(bytes, c.x);
  const bool accepted = c.good_samples() && c.out.good_like(c.x) && c.good_residual() &&
                        c.good_parameters() && c.good_pair() && c.out.good_output() &&
                        good_options(options, c.x) && c.a.absent() == c.b.absent();
  if (c.too_large(accepted)) {
    return;
  }
  const syncbn_evaluate_arguments arguments = {.struct_size = sizeof(arguments),
                                               .x = c.x.make(accepted),
                                               .mask = c.mask.make(accepted),
                                               .weight = c.weight.make(accepted),
                                               .bias = c.bias.make(accepted),
                                               .residual = c.residual.make(accepted),
                                               .running_mean = c.a.make(accepted),
                                               .running_var = c.b.make(accepted),
                                               .y = c.out.make(accepted)};
  const Layer of(options);
  expect(
      of.layer == nullptr ? of.status : syncbn_batch_norm_evaluate(of.layer, &arguments, nullptr),
      accepted);
}

/// A header as another program could bring it.
void headers(Bytes& bytes) {
  std::int64_t header[kHeaderWords];
  for (std::int64_t& word : header) {
    word = bytes.take<std::int64_t>();
  }
  const auto ranks = bytes.below(3) == 2 ? bytes.take<std::int32_t>() : 2;
  bool accepted = true;
  try {
    check_header(read_header(header, ranks));
  } catch (const DivergenceError&) {
  } catch (const InvalidArgument& error) {
    accepted = std::string(error.what()).find("ranks: got") != 0;
  }
  require(accepted == (ranks >= 1 && ranks <= 2048), "a number of ranks");
}

}  // namespace
}  // namespace syncbn::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace syncbn::fuzz;
  Bytes bytes(data, size);
  static constexpr void (*kCalls[])(Bytes&) = {forward, backward, evaluate, headers};
  kCalls[bytes.below(4)](bytes);
  return 0;
}
