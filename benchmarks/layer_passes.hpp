// SPDX-License-Identifier: Apache-2.0
#pragma once

// One layer's data and its passes in the order in which the layer runs them, for the programs that
// time them or count their instructions.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <syncbn/batch_norm.hpp>
#include <syncbn/communicator.hpp>
#include <syncbn/diagnosis.hpp>
#include <syncbn/tensor.hpp>
#include <utility>
#include <vector>
#include "step/passes.hpp"

namespace syncbn::bench {

using Shape = std::vector<std::int64_t>;

[[noreturn]] inline void fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(2);
}

/// "8x64x56x56"
inline Shape parse_shape(const std::string& text) {
  Shape shape;
  const char* at = text.c_str();
  while (true) {
    char* end = nullptr;
    shape.push_back(std::strtoll(at, &end, 10));
    if (end == at || shape.back() < 1 || (*end != 'x' && *end != '\0')) {
      fail("shape: got " + text + ", expected sizes like 8x64x56x56");
    }
    if (*end == '\0') {
      break;
    }
    at = end + 1;
  }
  if (shape.size() < 2) {
    fail("shape: got " + text + ", expected at least 2 axes (N, C, spatial...)");
  }
  return shape;
}

/// Pages that nobody has touched yet. From 4 MiB on huge pages are asked for, as the PyTorch
/// operators do for their outputs.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) {
      throw std::bad_alloc();
    }
#if defined(MADV_HUGEPAGE)
    if (bytes >= std::size_t{4} << 20) {
      (void)madvise(data_, bytes, MADV_HUGEPAGE);
    }
#endif
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  void* data_;
};

/// Inputs, parameters, statistics and a message of one layer on one rank. Methods take a hook,
/// which is called as hook(pass's name, function that runs the pass).
class LayerPasses {
 public:
  LayerPasses(Shape shape, DType dtype, bool channels_last)
      : sizes_(std::move(shape)),
        strides_(sizes_.size()),
        dtype_(dtype),
        channels_(static_cast<std::size_t>(sizes_[1])),
        x_(bytes_of(sizes_, dtype)),
        dy_(x_.bytes()),
        message_(static_cast<std::size_t>(message_words(dtype, sizes_[1]))),
        mean_(channels_),
        var_(channels_),
        rstd_(channels_),
        coefficients_(3 * channels_),
        weight_(channels_, 1.25f),
        bias_(channels_, 0.5f),
        running_mean_(channels_),
        running_var_(channels_, 1.0f),
        dweight_(channels_),
        dbias_(channels_),
        layer_({.channels = sizes_[1]}) {
    std::int64_t step = channels_last ? sizes_[1] : 1;
    for (std::size_t axis = sizes_.size(); axis-- > 2; step *= sizes_[axis]) {
      strides_[axis] = step;
    }
    strides_[1] = channels_last ? 1 : step;
    strides_[0] = channels_last ? step : step * sizes_[1];
    fill(x_, 1, 0.5f);
    fill(dy_, 2, 0.0f);
  }

  std::size_t bytes() const { return x_.bytes(); }  ///< of x, dy, y and dx each
  const Pages& x_memory() const { return x_; }

  /// Bytes that a pass moves to or from memory, each pass of its own, statistics included.
  std::size_t moved(const std::string& pass) const {
    const std::size_t words = 8 * message_.size();
    const std::size_t vector = 8 * channels_;
    if (pass == "local_moments") {
      return bytes() + words;
    }
    if (pass == "finalize_moments") {
      return words + 3 * vector + 2 * vector;  // running statistics are read and written
    }
    if (pass == "normalize") {
      return 2 * bytes() + 3 * vector;
    }
    if (pass == "local_gradients") {
      return 2 * bytes() + words;
    }
    if (pass == "finalize_gradients") {
      return 2 * words + 8 * vector;
    }
    return 3 * bytes() + 5 * vector;  // input_gradient
  }

  template <class Hook>
  void forward(void* y, Executor& executor, const Hook& hook) {
    hook("local_moments", [&] { local_moments(x(), {}, message_.data(), 1, executor); });
    hook("finalize_moments", [&] {
      finalize_moments(info(), message_.data() + kHeaderWords, mean_.data(), var_.data(),
                       rstd_.data(), channels(), 1e-5, executor);
      update_running_statistics(floats(running_mean_), floats(running_var_), mean_.data(),
                                var_.data(), channels(), info().count, 0.1);
    });
    hook("normalize", [&] { normalize_with({}, y, executor); });
  }

  /// Both directions as a layer's caller runs them, each in one call.
  void layer_forward(void* y, Executor& executor) {
    layer_.forward({.x = x(),
                    .weight = floats(weight_),
                    .bias = floats(bias_),
                    .y = output(y),
                    .running_mean = floats(running_mean_),
                    .running_var = floats(running_var_)},
                   saved_, executor);
  }
  void layer_backward(void* dx, Executor& executor) {
    layer_.backward({.dy = dy(),
                     .x = x(),
                     .weight = floats(weight_),
                     .bias = floats(bias_),
                     .dx = output(dx),
                     .dweight = floats(dweight_),
                     .dbias = floats(dbias_)},
                    saved_, executor);
  }

  /// After forward. The parameters' gradients are the rank's own share, the layer's default.
  template <class Hook>
  void backward(void* dx, Executor& executor, const Hook& hook) {
    hook("local_gradients", [&] { gradients_with({}, executor); });
    hook("finalize_gradients", [&] {
      const std::int64_t* words = message_.data() + kHeaderWords;
      finalize_gradients(
          info(), words,
          {mean_.data(), rstd_.data(), floats(weight_), coefficients_.data(), {}, {}, channels()},
          info().count, executor);
      affine_gradient_shares(words, dtype_,
                             {.mean = mean_.data(),
                              .rstd = rstd_.data(),
                              .dweight = floats(dweight_),
                              .dbias = floats(dbias_),
                              .channels = channels()},
                             executor);
    });
    hook("input_gradient", [&] { input_gradient_with({}, dx, executor); });
  }

  /// After backward: what fused activations and the other modes add.
  template <class Hook>
  void variants(void* out, Executor& executor, const Hook& hook) {
    const Activation leaky{ActivationKind::kLeakyRelu, 0.01};
    std::vector<std::int64_t> record(kHeaderWords +
                                     static_cast<std::size_t>(welford_words(dtype_, channels())));
    hook("local_welford", [&] { local_welford(x(), {}, record.data(), 1, executor); });
    hook("local_gradients, leaky_relu", [&] { gradients_with(leaky, executor); });
    hook("input_gradient, leaky_relu", [&] { input_gradient_with(leaky, out, executor); });
    hook("normalize, leaky_relu", [&] { normalize_with(leaky, out, executor); });
    std::vector<std::uint8_t> bits(static_cast<std::size_t>(activation_mask_bytes(x())));
    hook("recover_input", [&] {
      recover_input({output(out), mean_.data(), rstd_.data(), floats(weight_), floats(bias_),
                     output(out), bits.data(), leaky.negative_slope},
                    executor);
    });
  }

  /// Ends the program unless this executor and instruction set give the bits of the plain loops.
  void check(Executor& executor) {
    const std::string level = cpu_instruction_set();
    const Pages out(bytes());
    force_cpu_instruction_set("reference");
    const auto expected = results(out.data(), serial_executor());
    force_cpu_instruction_set(level.c_str());
    if (results(out.data(), executor) != expected) {
      fail("wrong result: " + level + " differs from the reference");
    }
  }

 private:
  static std::size_t bytes_of(const Shape& shape, DType dtype) {
    std::size_t bytes = size_of(dtype);
    for (const std::int64_t size : shape) {
      bytes *= static_cast<std::size_t>(size);
    }
    return bytes;
  }

  TensorView x() const { return {x_.data(), dtype_, sizes_, strides_}; }
  TensorView dy() const { return {dy_.data(), dtype_, sizes_, strides_}; }
  MutableTensorView output(void* data) const { return {data, dtype_, sizes_, strides_}; }
  std::int64_t channels() const { return sizes_[1]; }
  MessageInfo info() const { return read_header(message_.data(), 1); }
  static MutableTensorView floats(std::vector<float>& values) {
    return {values.data(), DType::kFloat32, {static_cast<std::int64_t>(values.size())}};
  }

  void normalize_with(const Activation& activation, void* y, Executor& executor) {
    normalize({x(),
               {},
               mean_.data(),
               rstd_.data(),
               floats(weight_),
               floats(bias_),
               {},
               output(y),
               nullptr,
               activation},
              executor);
  }
  void gradients_with(const Activation& activation, Executor& executor) {
    local_gradients(
        {dy(), x(), {}, mean_.data(), rstd_.data(), {activation, floats(weight_), floats(bias_)}},
        message_.data(), 2, executor);
  }
  void input_gradient_with(const Activation& activation, void* dx, Executor& executor) {
    input_gradient({dy(),
                    x(),
                    {},
                    mean_.data(),
                    rstd_.data(),
                    coefficients_.data(),
                    {activation, floats(weight_), floats(bias_)},
                    output(dx)},
                   executor);
  }

  void fill(const Pages& pages, std::uint64_t seed, float mean) const {
    const std::size_t elements = pages.bytes() / size_of(dtype_);
    for (std::size_t i = 0; i < elements; ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
      const float value =
          mean + static_cast<float>(static_cast<std::int64_t>(seed) >> 40) * 0x1p-22f;
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      if (dtype_ == DType::kBFloat16) {
        const auto high = static_cast<std::uint16_t>(bits >> 16);
        std::memcpy(static_cast<std::byte*>(pages.data()) + 2 * i, &high, 2);
      } else {
        std::memcpy(static_cast<std::byte*>(pages.data()) + 4 * i, &bits, 4);
      }
    }
  }

  /// All that forward and backward write, as bytes.
  std::vector<std::byte> results(void* out, Executor& executor) {
    std::vector<std::byte> all;
    const auto add = [&](const void* data, std::size_t size) {
      const auto* begin = static_cast<const std::byte*>(data);
      all.insert(all.end(), begin, begin + size);
    };
    const auto run = [&](const char*, const auto& pass) { pass(); };
    forward(out, executor, run);
    add(out, bytes());
    add(message_.data(), 8 * message_.size());
    backward(out, executor, run);
    add(out, bytes());
    add(message_.data(), 8 * message_.size());
    for (const auto* values : {&mean_, &var_, &rstd_, &coefficients_}) {
      add(values->data(), 8 * values->size());
    }
    layer_forward(out, executor);
    add(out, bytes());
    layer_backward(out, executor);
    add(out, bytes());
    for (const auto* values : {&dweight_, &dbias_}) {
      add(values->data(), 4 * values->size());
    }
    return all;
  }

  Shape sizes_;
  Shape strides_;
  DType dtype_;
  std::size_t channels_;
  Pages x_;
  Pages dy_;
  std::vector<std::int64_t> message_;
  std::vector<double> mean_;
  std::vector<double> var_;
  std::vector<double> rstd_;
  std::vector<double> coefficients_;
  std::vector<float> weight_;
  std::vector<float> bias_;
  std::vector<float> running_mean_;
  std::vector<float> running_var_;
  std::vector<float> dweight_;
  std::vector<float> dbias_;
  BatchNorm layer_;
  Saved saved_;
};

}  // namespace syncbn::bench
