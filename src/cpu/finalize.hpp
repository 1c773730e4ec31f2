#pragma once

#include <cstdint>

#include "statistics/finalize.hpp"
#include "syncbn/tensor.hpp"

namespace syncbn::cpu {

/// One channel's words to statistics; count >= 1.
ChannelMoments finalize_moments(DType dtype, const std::int64_t* words, std::int64_t count,
                                double eps);
ChannelGradients finalize_gradients(DType dtype, const std::int64_t* words, double mean,
                                    double rstd);

}  // namespace syncbn::cpu
