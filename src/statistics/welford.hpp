// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "statistics/dtype.hpp"
#include "statistics/elements.hpp"
#include "statistics/host_device.hpp"

// Count, mean and M2 of a set of numbers, and how two sets are joined (Chan, Golub and LeVeque,
// "Algorithms for computing the sample variance", 1983).
namespace syncbn {

template <class R>
struct WelfordMoments {
  std::int64_t count = 0;
  R mean = 0;
  R m2 = 0;

  SYNCBN_HD void add(R value) {
    ++count;
    const R delta = value - mean;
    mean += delta * (R(1) / static_cast<R>(count));
    m2 += delta * (value - mean);
  }
  SYNCBN_HD void merge(const WelfordMoments& other) {
    if (other.count == 0) {
      return;
    }
    if (count == 0) {
      *this = other;
      return;
    }
    const R total = static_cast<R>(count + other.count);
    const R delta = other.mean - mean;
    const R share = static_cast<R>(other.count) / total;
    mean += delta * share;
    m2 += other.m2 + delta * delta * (static_cast<R>(count) * share);
    count += other.count;
  }
};

/// Words of a channel in a record: mean below M2.
template <class R>
SYNCBN_HD constexpr std::int64_t record_words() {
  return sizeof(R) == 8 ? 2 : 1;
}
inline std::int64_t record_words(DType dtype) {
  return dispatch_dtype(dtype, [](auto type) { return record_words<Wide<decltype(type)>>(); });
}

SYNCBN_HD inline void write_record(const WelfordMoments<double>& moments, std::int64_t* record) {
  record[0] = bit_copy<std::int64_t>(moments.mean);
  record[1] = bit_copy<std::int64_t>(moments.m2);
}
SYNCBN_HD inline void write_record(const WelfordMoments<float>& moments, std::int64_t* record) {
  const auto low = static_cast<std::uint64_t>(bit_copy<std::uint32_t>(moments.mean));
  const auto high = static_cast<std::uint64_t>(bit_copy<std::uint32_t>(moments.m2));
  record[0] = static_cast<std::int64_t>(high << 32 | low);
}

/// wide: two binary64 numbers.
SYNCBN_HD inline WelfordMoments<double> read_record(const std::int64_t* record, std::int64_t count,
                                                    bool wide) {
  if (wide) {
    return {count, bit_copy<double>(record[0]), bit_copy<double>(record[1])};
  }
  const auto word = static_cast<std::uint64_t>(record[0]);
  return {count, to_double(bit_copy<float>(static_cast<std::uint32_t>(word))),
          to_double(bit_copy<float>(static_cast<std::uint32_t>(word >> 32)))};
}

}  // namespace syncbn
