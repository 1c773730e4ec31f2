#include "cpu/finalize.hpp"

namespace syncbn::cpu {

// bfloat16 shares float32's format.
ChannelMoments finalize_moments(DType dtype, const std::int64_t* words, std::int64_t count,
                                double eps) {
  switch (dtype) {
    case DType::kFloat16:
      return finalize_channel<DType::kFloat16>(words, count, eps);
    case DType::kFloat64:
      return finalize_channel<DType::kFloat64>(words, count, eps);
    case DType::kBFloat16:
    case DType::kFloat32:
      break;
  }
  return finalize_channel<DType::kFloat32>(words, count, eps);
}

ChannelGradients finalize_gradients(DType dtype, const std::int64_t* words, double mean,
                                    double rstd) {
  switch (dtype) {
    case DType::kFloat16:
      return finalize_channel_gradients<DType::kFloat16>(words, mean, rstd);
    case DType::kFloat64:
      return finalize_channel_gradients<DType::kFloat64>(words, mean, rstd);
    case DType::kBFloat16:
    case DType::kFloat32:
      break;
  }
  return finalize_channel_gradients<DType::kFloat32>(words, mean, rstd);
}

}  // namespace syncbn::cpu
