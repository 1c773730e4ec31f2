// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/host_device.hpp"
#include "tensors/sample_view.hpp"

namespace syncbn {

/// Which bit of a mask belongs to element e of plane (n, c), counted from the first byte's lowest.
SYNCBN_HD inline std::int64_t mask_bit(bool by_rows, std::int64_t run_bytes,
                                       std::int64_t sample_bytes, std::int64_t n, std::int64_t c,
                                       std::int64_t e) {
  const std::int64_t run = by_rows ? e : c;
  return 8 * (n * sample_bytes + run * run_bytes) + (by_rows ? c : e);
}

/// One bit per element of x, set where an activation hands the output's gradient on unchanged. The
/// bits of a run (a row of channels where x lies in rows, else a plane) begin at a byte of their
/// own. The order depends on x alone, so that forward and backward agree whatever the layouts of
/// the other tensors.
struct ActivationMaskLayout {
  bool by_rows;
  std::int64_t run_bytes;
  std::int64_t sample_bytes;
  std::int64_t bytes;

  explicit ActivationMaskLayout(const SampleView& x)
      : by_rows(common_layout(x, x) == Layout::kRows),
        run_bytes(((by_rows ? x.channels : x.plane) + 7) / 8),
        sample_bytes((by_rows ? x.plane : x.channels) * run_bytes),
        bytes(x.samples * sample_bytes) {}

  std::int64_t bit(std::int64_t n, std::int64_t c, std::int64_t e) const {
    return mask_bit(by_rows, run_bytes, sample_bytes, n, c, e);
  }
};

}  // namespace syncbn
