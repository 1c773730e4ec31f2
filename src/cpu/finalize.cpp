#include "cpu/finalize.hpp"

#include <algorithm>

#include "cpu/kernels.hpp"
#include "statistics/dtype.hpp"

// Vector code rounds the channels whose rounding it can be certain of, integers the others.
namespace syncbn::cpu {
namespace {

constexpr std::int64_t kBlock = 64;

/// Null if only the integers serve.
const Kernels* rounding_kernels(DType dtype) {
  return is_vectorized(dtype) ? active_kernels() : nullptr;
}

ChannelMoments moments_of(DType dtype, const std::int64_t* words, std::int64_t count, double eps) {
  return dispatch_dtype(dtype, [&](auto type) {
    return finalize_channel<typename ElementTraits<decltype(type)>::SameFormat>(words, count, eps);
  });
}

ChannelGradients gradients_of(DType dtype, const std::int64_t* words, double mean, double rstd) {
  return dispatch_dtype(dtype, [&](auto type) {
    return finalize_channel_gradients<typename ElementTraits<decltype(type)>::SameFormat>(
        words, mean, rstd);
  });
}

}  // namespace

void finalize_moments(DType dtype, const std::int64_t* words, std::int64_t channels,
                      std::int64_t count, double eps, double* mean, double* var, double* rstd) {
  const Format& format = format_of(dtype);
  const Kernels* kernels = rounding_kernels(dtype);
  for (std::int64_t begin = 0; begin < channels; begin += kBlock) {
    const std::int64_t some = std::min(kBlock, channels - begin);
    const std::int64_t* from = words + begin * format.words();
    bool done[kBlock] = {};
    if (kernels != nullptr) {
      kernels->round_moments(format, from, some, static_cast<double>(count), eps, mean + begin,
                             var + begin, rstd + begin, done);
    }
    for (std::int64_t i = 0; i < some; ++i) {
      if (!done[i]) {
        const ChannelMoments moments = moments_of(dtype, from + i * format.words(), count, eps);
        mean[begin + i] = moments.mean;
        var[begin + i] = moments.var;
        rstd[begin + i] = moments.rstd;
      }
    }
  }
}

void finalize_gradients(DType dtype, const std::int64_t* words, std::int64_t channels,
                        const double* mean, const double* rstd, ChannelGradients* out) {
  const Format& format = format_of(dtype);
  const Kernels* kernels = rounding_kernels(dtype);
  for (std::int64_t begin = 0; begin < channels; begin += kBlock) {
    const std::int64_t some = std::min(kBlock, channels - begin);
    const std::int64_t* from = words + begin * format.words();
    bool done[kBlock] = {};
    double sums[2][kBlock];
    if (kernels != nullptr) {
      kernels->round_sums(format, from, some, sums[0], sums[1], done);
    }
    for (std::int64_t i = 0; i < some; ++i) {
      const std::int64_t c = begin + i;
      out[c] = done[i] ? channel_gradients(sums[0][i], sums[1][i], {0}, mean[c], rstd[c])
                       : gradients_of(dtype, from + i * format.words(), mean[c], rstd[c]);
    }
  }
}

}  // namespace syncbn::cpu
