// SPDX-License-Identifier: Apache-2.0
#include "statistics/header.hpp"

#include <string>

#include "statistics/dtype.hpp"
#include "syncbn/error.hpp"
#include "syncbn/message.hpp"
#include "tensors/checks.hpp"

namespace syncbn {
int words_per_channel(DType dtype) { return format_of(dtype).words(); }

std::int64_t message_words(DType dtype, std::int64_t channels) {
  check_dtype("dtype", dtype);
  check_channels(channels);
  return kHeaderWords + channels * words_per_channel(dtype);
}

MessageInfo read_header(const std::int64_t* merged, int ranks) {
  check_ranks(ranks);
  check_array("merged", merged, kHeaderWords);
  return header_info(merged, ranks);
}

void check_header(const MessageInfo& info) {
  if (info.any_rejected) {
    throw DivergenceError("a rank of the group refused its input; that rank's error says why");
  }
  if (!info.agree) {
    throw DivergenceError(
        "the ranks of the group did not make the same call: layer, call number, direction, "
        "channels, "
        "eps and dtype must be equal on all of them");
  }
  if (info.count < 0 || info.count > kMaxCount) {
    throw InvalidArgument("x: got " + std::to_string(info.count) +
                          " elements per channel over all ranks, expected 0 to 2^36");
  }
}

void check_count(std::int64_t backward, std::int64_t forward) {
  if (backward != forward) {
    throw DivergenceError("backward: the ranks bring " + std::to_string(backward) +
                          " elements per channel, forward had " + std::to_string(forward));
  }
}

}  // namespace syncbn
