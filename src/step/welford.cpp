// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "cpu/cpu_passes.hpp"
#include "statistics/finalize.hpp"
#include "statistics/float_environment.hpp"
#include "statistics/header.hpp"
#include "statistics/welford.hpp"
#include "step/passes.hpp"
#include "tensors/sample_view.hpp"

// The welford mode's passes, and the merge of ranks.
namespace syncbn {

std::int64_t welford_words(DType dtype, std::int64_t channels) {
  return 1 + channels * record_words(dtype);
}

void local_welford(const TensorView& x, const MaskView& mask, std::int64_t* message,
                   std::uint32_t fingerprint, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView samples(x, mask);
  const std::int64_t count = samples.count();
  write_header(message, count, fingerprint, count == 0 ? 0 : dtype_flag(x.dtype));
  std::int64_t* record = message + kHeaderWords;
  std::fill_n(record, welford_words(x.dtype, samples.channels), 0);
  record[0] = count;
  if (count > 0 && samples.channels > 0) {
    cpu::welford_records(samples, record + 1, executor);
  }
}

void merge_welford(const MessageInfo& info, const std::int64_t* records, double* mean, double* var,
                   double* rstd, std::int64_t channels, int ranks, std::int64_t stride,
                   double eps) {
  const cpu::FloatEnvironment environment;
  const std::int64_t of_channel = record_words(info.dtype);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (std::int64_t c = 0; c < channels; ++c) {
    WelfordMoments<double> all;
    for (int r = 0; r < ranks && info.count > 0; ++r) {  // else there may be no records
      const std::int64_t* record = records + r * stride;
      all.merge(read_record(record + 1 + c * of_channel, record[0], of_channel == 2));
    }
    const bool valid = usable(info);
    mean[c] = valid ? all.mean : nan;
    var[c] = !valid ? nan : all.count == 0 ? 0.0 : all.m2 / static_cast<double>(all.count);
    rstd[c] = !valid ? nan : all.count == 0 ? 0.0 : rstd_of(var[c], eps);
  }
}

}  // namespace syncbn
