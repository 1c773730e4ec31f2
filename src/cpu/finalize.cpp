// SPDX-License-Identifier: Apache-2.0
#include "cpu/finalize.hpp"

#include <algorithm>

#include "cpu/kernels.hpp"
#include "statistics/dtype.hpp"
#include "tensors/channel_values.hpp"

// Vector code rounds the channels whose rounding it can be certain of, integers the others.
namespace syncbn::cpu {
namespace {

constexpr std::int64_t kBlock = 64;
constexpr int kMostWords = kDoubleFormat.words();

/// Null if only the integers serve.
const Kernels* rounding_kernels(DType dtype) {
  return is_vectorized(dtype) ? active_kernels() : nullptr;
}

/// Sums of channels, counted from one that the caller knows.
class InWords {
 public:
  InWords(DType dtype, const std::int64_t* words) : format_(&format_of(dtype)), words_(words) {}
  SumsAt at(std::int64_t channel) const { return {format_, words_, nullptr, channel}; }
  bool in_vectors(std::int64_t) const { return true; }
  const std::int64_t* words(std::int64_t channel) { return words_ + channel * format_->words(); }

 private:
  const Format* format_;
  const std::int64_t* words_;
};

class InWindows {
 public:
  InWindows(DType, Windows& windows) : windows_(&windows) {}
  SumsAt at(std::int64_t channel) const { return {nullptr, nullptr, &windows_->arrays(), channel}; }
  bool in_vectors(std::int64_t channel) const { return !windows_->has_slots(channel); }
  const std::int64_t* words(std::int64_t channel) {
    windows_->write_words(channel, words_);
    return words_;
  }

 private:
  Windows* windows_;
  std::int64_t words_[kMostWords];
};

template <class Sums>
void round_moments(DType dtype, Sums sums, std::int64_t channels, const Moments& to) {
  const Kernels* kernels = rounding_kernels(dtype);
  for (std::int64_t begin = 0; begin < channels; begin += kBlock) {
    const std::int64_t some = std::min(kBlock, channels - begin);
    bool done[kBlock] = {};
    if (kernels != nullptr) {
      kernels->round_moments(sums.at(begin), some, static_cast<double>(to.count), to.eps,
                             to.mean + begin, to.var + begin, to.rstd + begin, done);
    }
    for (std::int64_t i = 0; i < some; ++i) {
      const std::int64_t c = begin + i;
      if (done[i] && sums.in_vectors(c)) {
        continue;
      }
      const ChannelMoments moments = dispatch_dtype(dtype, [&](auto type) {
        using Same = typename ElementTraits<decltype(type)>::SameFormat;
        return finalize_channel<Same>(sums.words(c), to.count, to.eps);
      });
      to.mean[c] = moments.mean;
      to.var[c] = moments.var;
      to.rstd[c] = moments.rstd;
    }
  }
}

/// Channel c of the sums is channel first + c of the arrays.
template <class Sums>
void round_gradients(DType dtype, Sums sums, std::int64_t first, std::int64_t channels,
                     const Gradients& to) {
  const Kernels* kernels = rounding_kernels(dtype);
  for (std::int64_t begin = 0; begin < channels; begin += kBlock) {
    const std::int64_t some = std::min(kBlock, channels - begin);
    const std::int64_t at = first + begin;
    bool done[kBlock] = {};
    if (kernels != nullptr) {
      double rounded[2][kBlock];
      double weight[kBlock];
      double results[4][kBlock];
      for (double* of : rounded) {  // up to three are not written
        std::fill(of + std::max<std::int64_t>(some - 3, 0), of + some, 0.0);
      }
      kernels->round_sums(sums.at(begin), some, rounded[0], rounded[1], done);
      load_channel_values(to.weight, at, some, 1.0, weight);
      const bool wanted = to.coefficients != nullptr;
      const auto array = [&](int i) {
        return wanted ? to.coefficients + i * to.channels + at : results[i];
      };
      kernels->coefficients({rounded[0], rounded[1], to.mean + at, to.rstd + at, weight, array(0),
                             array(1), array(2), results[3]},
                            some, to.count);
      store_channel_values(to.dweight, at, some, results[3]);
      store_channel_values(to.dbias, at, some, rounded[0]);
    }
    for (std::int64_t i = 0; i < some; ++i) {
      const std::int64_t c = begin + i;
      if (done[i] && sums.in_vectors(c)) {
        continue;
      }
      to.store(dispatch_dtype(dtype,
                              [&](auto type) {
                                using Same = typename ElementTraits<decltype(type)>::SameFormat;
                                return finalize_channel_gradients<Same>(
                                    sums.words(c), to.mean[first + c], to.rstd[first + c]);
                              }),
               first + c);
    }
  }
}

}  // namespace

void Gradients::store(const ChannelGradients& of, std::int64_t channel) const {
  if (coefficients != nullptr) {
    const double of_weight = weight.absent() ? 1.0 : channel_value(weight, channel);
    const Coefficients k = coefficients_of(of, of_weight, rstd[channel], count);
    coefficients[channel] = k.c1;
    coefficients[channels + channel] = k.c2;
    coefficients[2 * channels + channel] = k.c3;
  }
  store_channel_values(dweight, channel, 1, &of.dweight);
  store_channel_values(dbias, channel, 1, &of.dbias);
}

void finalize(DType dtype, const std::int64_t* words, std::int64_t begin, std::int64_t end,
              const Moments& to) {
  round_moments(dtype, InWords(dtype, words + begin * format_of(dtype).words()), end - begin,
                {to.count, to.eps, to.mean + begin, to.var + begin, to.rstd + begin});
}

void finalize(DType dtype, Windows& windows, std::int64_t begin, const Moments& to) {
  round_moments(dtype, InWindows(dtype, windows), windows.channels(),
                {to.count, to.eps, to.mean + begin, to.var + begin, to.rstd + begin});
}

void finalize(DType dtype, const std::int64_t* words, std::int64_t begin, std::int64_t end,
              const Gradients& to) {
  round_gradients(dtype, InWords(dtype, words + begin * format_of(dtype).words()), begin,
                  end - begin, to);
}

void finalize(DType dtype, Windows& windows, std::int64_t begin, const Gradients& to) {
  round_gradients(dtype, InWindows(dtype, windows), begin, windows.channels(), to);
}

void update_running(const MutableTensorView& running, const double* values, std::int64_t channels,
                    double factor, double correction) {
  const Kernels* kernels = active_kernels();
  if (kernels != nullptr && running.dtype == DType::kFloat32 &&
      (running.strides[0] == 1 || channels == 1)) {
    kernels->update_running(static_cast<float*>(running.data), values, channels, factor,
                            correction);
    return;
  }
  const TensorView old = running;
  for (std::int64_t c = 0; c < channels; ++c) {
    set_channel_value(running, c,
                      running_update(channel_value(old, c), values[c] * correction, factor));
  }
}

}  // namespace syncbn::cpu
