// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "bytes.hpp"
#include "cpu/finalize.hpp"
#include "statistics/dtype.hpp"
#include "statistics/finalize.hpp"
#include "step/passes.hpp"
#include "syncbn/diagnosis.hpp"
#include "wide_integer.hpp"

// Any words that ranks can bring become the statistics and gradients of docs/numerics.md, sections
// 3 and 6, with every vector code. The reference is written over one wide integer.
namespace syncbn::fuzz {
namespace {

using testing::Wide;
using Words = std::vector<std::int64_t>;

void require_same(double actual, double expected, const char* what) {
  if (std::isnan(actual) && std::isnan(expected)) {
    return;
  }
  if (bit_copy<std::uint64_t>(actual) != bit_copy<std::uint64_t>(expected)) {
    char text[200];
    std::snprintf(text, sizeof(text), "%s is %a, expected %a (%s)", what, actual, expected,
                  cpu_instruction_set());
    fail(text);
  }
}

/// Runs check with each vector code that this processor has.
template <class Check>
void with_each_level(const Check& check) {
  for (const char* level : {"avx512_bf16", "avx512", "avx2", "neon", "reference"}) {
    if (force_cpu_instruction_set(level)) {
      check();
    }
  }
}

/// R53: d * 2^k, from the bits.
double round53(Wide z, int& k) {
  const bool negative = z.negative();
  if (negative) {
    z = -z;
  }
  const int length = z.bit_length();
  k = length - 53;
  std::uint64_t d = 0;
  for (int i = 0; i < 53; ++i) {
    const int at = length - 1 - i;
    d = d << 1 | std::uint64_t{at >= 0 && z.bit(at)};
  }
  bool below_half = false;
  for (int at = length - 55; at >= 0 && !below_half; --at) {
    below_half = z.bit(at);
  }
  if (length > 53 && z.bit(length - 54) && (below_half || (d & 1) != 0)) {
    ++d;
  }
  return negative ? -static_cast<double>(d) : static_cast<double>(d);
}

/// One channel's sums over all ranks, as words and as integers.
struct Channel {
  Wide first, second;
  std::int64_t flags;
};

/// `ranks` times the words of one rank, or random words.
Channel channel_of(Bytes& bytes, const Format& format, bool squares, std::int64_t* words) {
  constexpr std::int64_t kRanks = 2048;
  const auto kind = bytes.take<std::uint8_t>();
  const std::int64_t ranks = (kind & 1) != 0 ? kRanks : 1;
  const auto sum = [&](const SumFormat& f, bool not_negative, std::int64_t* digits) {
    // Often small numbers, and long runs of zeros and ones.
    const int begin = bytes.take<std::uint8_t>() % f.digits;
    const int end = begin + bytes.take<std::uint8_t>() % 4;
    const bool ones = (bytes.take<std::uint8_t>() & 1) != 0;
    for (int i = 0; i < f.digits; ++i) {
      const bool top = i == f.digits - 1;
      std::int64_t digit = i < begin && ones ? kDigitMask : 0;
      if (i >= begin && i <= end) {
        digit = bytes.take<std::int64_t>() >> (kind >> 2);
      } else if (i > end && ones && !not_negative) {
        digit = top ? -1 : kDigitMask;
      }
      if (!top) {
        digit &= kDigitMask;
      } else {
        digit = not_negative ? digit & (kDigitMask >> 1) : digit >> 12;
      }
      digits[i] = ranks * digit;
    }
    return Wide::from_digits(digits, f.digits);
  };
  Channel channel;
  channel.first = sum(format.first, false, words);
  channel.second = sum(format.second, squares, words + format.first.digits);
  channel.flags = 0;
  if (bytes.seldom()) {
    for (const std::int64_t flag : {kFirstNan, kFirstPlusInf, kFirstMinusInf, kSecondNonFinite}) {
      channel.flags += flag * (bytes.take<std::uint16_t>() % (kRanks + 1)) * bytes.below(2);
    }
  }
  words[format.words() - 1] = channel.flags;
  return channel;
}

/// What the first sum is where a flag is set.
double flagged(std::int64_t flags, double otherwise) {
  const bool nan = (flags & 0x7fff) != 0;
  const bool plus = (flags >> 15 & 0x7fff) != 0;
  const bool minus = (flags >> 30 & 0x7fff) != 0;
  const double infinity = std::numeric_limits<double>::infinity();
  return nan || (plus && minus) ? std::nan("") : plus ? infinity : minus ? -infinity : otherwise;
}
bool first_flag(std::int64_t flags) { return (flags & ((std::int64_t{1} << 45) - 1)) != 0; }

struct Expected {
  double mean, var, rstd;
};

Expected moments(const Channel& c, const Format& format, std::int64_t count, double eps) {
  const auto n = static_cast<double>(count);
  int k = 0;
  const double s = round53(c.first, k);
  Expected out;
  out.mean = flagged(c.flags, std::ldexp(s / n, k - format.first.unit));
  const Wide difference =
      (c.second * Wide(count) << (2 * format.first.unit - format.second.unit)) - c.first * c.first;
  const double d = round53(difference.negative() ? Wide() : difference, k);
  out.var = std::ldexp(d / n / n, k - 2 * format.first.unit);
  if (c.flags != 0) {
    out.var = first_flag(c.flags) ? std::nan("") : std::numeric_limits<double>::infinity();
  }
  out.rstd = 1 / std::sqrt(out.var + eps);
  return out;
}

void check_moments(Bytes& bytes, DType dtype, std::int64_t channels) {
  const Format& format = format_of(dtype);
  const auto n = static_cast<std::size_t>(channels);
  const std::int64_t count =
      (1 + (bytes.take<std::int64_t>() & (kMaxCount - 1))) >> bytes.take<std::uint8_t>() % 37;
  const double eps = bytes.below(2) == 0 ? 1e-5 : 0.0;
  Words words(n * static_cast<std::size_t>(format.words()));
  std::vector<Expected> expected;
  for (std::int64_t c = 0; c < channels; ++c) {
    const Channel channel = channel_of(bytes, format, true, words.data() + c * format.words());
    expected.push_back(moments(channel, format, std::max<std::int64_t>(1, count), eps));
  }
  std::vector<double> mean(n);
  std::vector<double> var(n);
  std::vector<double> rstd(n);
  with_each_level([&] {
    const std::int64_t* from = words.data();
    cpu::finalize(dtype, from, 0, channels,
                  {std::max<std::int64_t>(1, count), eps, mean.data(), var.data(), rstd.data()});
    for (std::size_t c = 0; c < n; ++c) {
      require_same(mean[c], expected[c].mean, "mean");
      require_same(var[c], expected[c].var, "var");
      require_same(rstd[c], expected[c].rstd, "rstd");
    }
  });
}

void check_gradients(Bytes& bytes, DType dtype, std::int64_t channels) {
  const Format& format = format_of(dtype);
  const auto n = static_cast<std::size_t>(channels);
  Words words(n * static_cast<std::size_t>(format.words()));
  std::vector<double> mean(n);
  std::vector<double> rstd(n);
  std::vector<Channel> sums;
  for (std::size_t c = 0; c < n; ++c) {
    mean[c] = static_cast<double>(bytes.take<std::int16_t>()) / 256;
    rstd[c] = std::ldexp(1 + static_cast<double>(bytes.take<std::uint16_t>()) / 65536,
                         bytes.take<std::int8_t>());
    sums.push_back(channel_of(bytes, format, false,
                              words.data() + c * static_cast<std::size_t>(format.words())));
  }
  struct Sums {
    double a, b;
  };
  std::vector<Sums> rounded;
  for (const Channel& channel : sums) {
    int k = 0;
    const double a = round53(channel.first, k);
    rounded.push_back({std::ldexp(a, k - format.first.unit), 0});
    const double b = round53(channel.second, k);
    rounded.back().b = std::ldexp(b, k - format.second.unit);
  }
  constexpr std::int64_t kCount = 24;
  std::vector<double> out(5 * n);  // c1, c2, c3, dweight, dbias
  const auto place = [&](std::size_t i) {
    return MutableTensorView(out.data() + i * n, DType::kFloat64, {channels});
  };
  with_each_level([&] {
    const std::int64_t* from = words.data();
    cpu::finalize(dtype, from, 0, channels,
                  {kCount, mean.data(), rstd.data(), {}, out.data(), place(3), place(4), channels});
    for (std::size_t c = 0; c < n; ++c) {
      const auto [a, b] = rounded[c];
      const double g = std::fma(-mean[c], a, b);
      const double w = rstd[c];
      const bool any = sums[c].flags != 0;
      require_same(out[c], any ? std::nan("") : w, "c1");
      require_same(out[n + c], any ? std::nan("") : -(w * w * w * (g / kCount)), "c2");
      require_same(out[2 * n + c], any ? std::nan("") : -(w * (a / kCount)), "c3");
      require_same(out[3 * n + c], any ? std::nan("") : w * g, "dweight");
      require_same(out[4 * n + c], flagged(sums[c].flags, a), "dbias");
    }
  });
}

}  // namespace
}  // namespace syncbn::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace syncbn;
  using namespace syncbn::fuzz;
  Bytes bytes(data, size);
  static const DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};
  const DType dtype = kTypes[bytes.below(4)];
  const std::int64_t channels = 1 + bytes.below(9);  // a whole vector and a rest
  if (bytes.below(2) == 0) {
    check_moments(bytes, dtype, channels);
  } else {
    check_gradients(bytes, dtype, channels);
  }
  return 0;
}
