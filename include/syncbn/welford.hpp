// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "syncbn/export.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/tensor.hpp"

/// The statistics of the "welford" mode (docs/options.md), in place of local_moments and
/// finalize_moments: 8 bytes a channel and rank (16 for float64), gathered and not summed. The same
/// on every rank and from run to run, but not independent of how samples lie on ranks.
namespace syncbn {

/// Words of one rank's record: its count, then mean and M2 = sum of (x - mean)^2 per channel, as
/// two binary32 numbers in one word (two binary64 numbers in two words for float64).
SYNCBN_API std::int64_t welford_words(DType dtype, std::int64_t channels);

/// Count, mean and M2 of this rank's samples by Welford's recurrence; mask as in
/// passes.hpp.
/// message: kHeaderWords + welford_words(x.dtype, C) words, written whole.
SYNCBN_API void local_welford(const TensorView& x, const MaskView& mask, std::int64_t* message,
                              std::uint32_t fingerprint, const Execution& execution);

/// mean, biased var and rstd of all ranks' samples from their records, in rank order (Chan, Golub
/// and LeVeque 1983), identical on every rank. records: of rank r from stride * r on. A count of 0
/// gives zeros; a header that disagrees, NaN.
SYNCBN_API void merge_welford(const MessageInfo& info, const std::int64_t* records, double* mean,
                              double* var, double* rstd, std::int64_t channels, int ranks,
                              std::int64_t stride, double eps);

}  // namespace syncbn
