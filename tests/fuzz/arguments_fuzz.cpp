// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "bytes.hpp"
#include "syncbn/c_api.h"

// Any arguments of the C interface: what must be refused is, with a clear text and without an
// access to the caller's memory; everything else runs within that memory.
namespace syncbn::fuzz {
namespace {

template <class T>
using Array = std::unique_ptr<T[]>;

/// An array of this many entries, or one that must not be looked at.
template <class T>
T* array_of(Array<T>& memory, bool accepted, std::int64_t size) {
  if (!accepted) {
    return static_cast<T*>(forbidden());
  }
  memory.reset(new T[static_cast<std::size_t>(size)]);
  std::fill_n(memory.get(), size, T(1));
  return memory.get();
}

void expect(syncbn_status status, bool accepted, bool may_diverge = false) {
  const std::string text = syncbn_last_error();
  if (status == SYNCBN_OK || (may_diverge && status == SYNCBN_DIVERGENCE)) {
    require(accepted, "arguments that should be refused were accepted");
    return;
  }
  if (accepted) {
    fail("refused: " + text);
  }
  if (status == SYNCBN_INVALID_ARGUMENT) {
    if (text.find(": got ") == std::string::npos || text.find(", expected ") == std::string::npos) {
      fail("an unclear text: " + text);
    }
  } else if (status != SYNCBN_UNAVAILABLE || text.find("CUDA") == std::string::npos) {
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
  return is_member(a.kind, 3) && (a.kind != SYNCBN_LEAKY_RELU || std::isfinite(a.negative_slope));
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
    require(syncbn_saved_create(&saved) == SYNCBN_OK, "an object was refused");
    require((layer != nullptr) == (status == SYNCBN_OK), "a layer that was refused");
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
      return x.device == SYNCBN_CUDA && x.channels() > kMostElements;
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
  require(syncbn_saved_channels(of.saved) == (status == SYNCBN_OK ? c.x.channels() : 0),
          "statistics without a forward");
  require(status == SYNCBN_OK || tracked == 3, "a refused forward counted");
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
  require(syncbn_batch_norm_forward(of.layer, &arguments, of.saved, nullptr) == SYNCBN_OK,
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

/// The passes, with arrays of the caller's beside the tensors.
void passes(Bytes& bytes) {
  Common c(bytes);
  const auto which = bytes.below(4);
  const syncbn_activation activation = activation_of(bytes);
  const bool bits = bytes.below(4) == 3;
  bool accepted = c.good_samples();
  if (which == 1) {
    accepted = accepted && c.out.good_like(c.x) && c.out.good_output() && c.good_residual();
  } else if (which == 2) {
    accepted = accepted && c.other.good_like(c.x) && c.good_residual() && c.residual.good_output();
  } else if (which == 3) {
    accepted = accepted && c.other.good_like(c.x) && c.out.good_like(c.x) && c.out.good_output();
  }
  accepted = accepted && (which == 0 || (c.good_parameters() && good_activation(activation)));
  if (c.too_large(accepted)) {
    return;
  }
  const std::int64_t channels = accepted ? c.x.channels() : 0;
  const syncbn_tensor* x = c.x.make(accepted);
  std::int64_t mask_bytes = 0;
  std::int64_t words = 0;
  if (accepted) {
    require(syncbn_activation_mask_bytes(x, &mask_bytes) == SYNCBN_OK, "bytes of a mask");
    require(syncbn_message_words(c.x.dtype, channels, &words) == SYNCBN_OK, "words");
  }
  Array<double> memory[3];
  const double* mean = array_of(memory[0], accepted, channels);
  const double* rstd = array_of(memory[1], accepted, channels);
  const double* coefficients = array_of(memory[2], accepted, 3 * channels);
  Array<std::uint8_t> bits_memory;
  std::uint8_t* activation_mask = bits ? array_of(bits_memory, accepted, mask_bytes) : nullptr;
  Array<std::int64_t> message_memory;
  std::int64_t* message = array_of(message_memory, accepted, words);
  const syncbn_mask* mask = c.mask.make(accepted);
  const syncbn_activation_gradient through = {activation, c.weight.make(accepted),
                                              c.bias.make(accepted), activation_mask};
  syncbn_status status = SYNCBN_OK;
  if (which == 0) {
    status = syncbn_local_moments(x, mask, message, 1, nullptr);
  } else if (which == 1) {
    status = syncbn_normalize(x, mask, mean, rstd, through.weight, through.bias,
                              c.residual.make(accepted), c.out.make(accepted), activation_mask,
                              &activation, nullptr);
  } else if (which == 2) {
    status = syncbn_local_gradients(c.other.make(accepted), x, mask, mean, rstd, &through,
                                    c.residual.make(accepted), message, 1, nullptr);
  } else {
    status = syncbn_input_gradient(c.other.make(accepted), x, mask, mean, rstd, coefficients,
                                   &through, c.out.make(accepted), nullptr);
  }
  expect(status, accepted);
}

/// Headers and sums as another program could bring them.
void headers(Bytes& bytes) {
  std::int64_t header[SYNCBN_HEADER_WORDS];
  for (std::int64_t& word : header) {
    word = bytes.take<std::int64_t>();
  }
  syncbn_message_info info{};
  const auto ranks =
      static_cast<std::int32_t>(bytes.below(3) == 2 ? bytes.take<std::int32_t>() : 2);
  if (syncbn_read_header(header, ranks, &info) == SYNCBN_OK) {
    require(ranks >= 1 && ranks <= 2048, "a number of ranks that should be refused");
    syncbn_check_header(&info);
  }
  info = {bytes.seldom() ? odd_number(bytes) : bytes.take<std::uint16_t>(), 1, 0, 1,
          enumeration(bytes, 4)};
  const std::int64_t channels = bytes.below(6);
  std::int32_t words = 0;
  if (syncbn_words_per_channel(info.dtype, &words) != SYNCBN_OK) {
    require(!is_member(info.dtype, 4), "a dtype was refused");
    words = 1;
  }
  std::vector<std::int64_t> sums(static_cast<std::size_t>(words * channels));
  for (std::int64_t& word : sums) {
    word = bytes.take<std::int64_t>() >> 12;
  }
  std::vector<double> results(static_cast<std::size_t>(3 * channels));
  double* const mean = results.data();
  expect(syncbn_finalize_moments(&info, sums.data(), mean, mean + channels, mean + 2 * channels,
                                 channels, 1e-5, nullptr),
         is_member(info.dtype, 4));
}

}  // namespace
}  // namespace syncbn::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace syncbn::fuzz;
  Bytes bytes(data, size);
  static constexpr void (*kCalls[])(Bytes&) = {forward, backward, evaluate, passes, headers};
  kCalls[bytes.below(5)](bytes);
  return 0;
}
