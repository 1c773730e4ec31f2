#pragma once

#include <cstdint>

#include "statistics/finalize.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn::cpu {

/// Words of neighbouring channels to statistics; count >= 1.
void finalize_moments(DType dtype, const std::int64_t* words, std::int64_t channels,
                      std::int64_t count, double eps, double* mean, double* var, double* rstd);
void finalize_gradients(DType dtype, const std::int64_t* words, std::int64_t channels,
                        const double* mean, const double* rstd, ChannelGradients* out);

}  // namespace syncbn::cpu
