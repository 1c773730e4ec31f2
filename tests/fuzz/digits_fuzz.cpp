// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "bytes.hpp"
#include "cpu/windows.hpp"
#include "statistics/big_uint.hpp"
#include "statistics/finalize.hpp"
#include "statistics/lanes.hpp"
#include "statistics/slots.hpp"
#include "wide_integer.hpp"

// Partial sums of several ranks, merged in any order, by slots and by windows: one exact integer.
namespace syncbn::fuzz {
namespace {

using testing::Wide;
using Words = std::vector<std::int64_t>;

/// A multiple of the format's unit as kernels produce them, or an infinity or NaN.
double partial_of(Bytes& bytes, const SumFormat& sum, int top) {
  const auto kind = bytes.take<std::uint8_t>();
  if (kind >= 252) {
    const double infinity = std::numeric_limits<double>::infinity();
    return kind == 252 ? -infinity : kind == 253 ? infinity : std::nan("");
  }
  const auto bits = bytes.take<std::uint64_t>() >> kind % 64;
  const auto mantissa = static_cast<double>(bits >> 11) * ((kind & 64) != 0 ? -1 : 1);
  const int exponent = bytes.take<std::uint16_t>() % (top + sum.unit + 1) - sum.unit;
  const double value = std::ldexp(mantissa, exponent);
  const bool fits = std::isfinite(value) && std::fabs(value) < std::ldexp(1.0, top);
  return fits ? value : std::ldexp(std::fmod(mantissa, 0x1p20), -sum.unit);
}

/// The sums of one rank: in slots, in windows, and as integers.
class Rank {
 public:
  explicit Rank(const Format& format)
      : format_(format),
        slots_(static_cast<std::size_t>(format.slots())),
        windows_(std::make_unique<cpu::Windows>(format, 1)),
        other_windows_(std::make_unique<cpu::Windows>(format, 1)) {}

  void place(int top, int sum) { windows_->place(0, sum, top); }
  void add(int sum, double partial, bool elsewhere) {
    merge(elsewhere ? *other_windows_ : *windows_, sum, partial);
    if (!is_finite(partial)) {
      flags_ |= partial_flag(partial, sum == 0);
      return;
    }
    const ExactSum to = exact_sum(slots_.data(), format_, sum == 0);
    to.add(partial);
    exact[sum] += Wide::in_units(partial, to.format.unit);
  }
  void flush() { windows_->flush(0, 1); }
  Words words() {
    Words out(static_cast<std::size_t>(format_.words()));
    exact_sum(slots_.data(), format_, true).write(out.data());
    exact_sum(slots_.data(), format_, false).write(out.data() + format_.first.digits);
    out.back() = flags_;
    windows_->absorb(*other_windows_, 0, 1);
    Words by_windows(out.size());
    windows_->write_words(0, by_windows.data());
    require(by_windows == out, "windows and slots give other words");
    return out;
  }
  Wide exact[2];

 private:
  /// As the vector code does it: two magic additions, or outside.
  static void merge(cpu::Windows& windows, int sum, double partial) {
    const cpu::WindowArrays& w = windows.arrays();
    const double high = partial + w.magic_high[sum][0];
    const double rest = partial - (high - w.magic_high[sum][0]);
    const double low = rest + w.magic_low[sum][0];
    if (!(std::fabs(partial) < w.bound[sum][0]) || low - w.magic_low[sum][0] != rest) {
      windows.add_outside(0, sum, partial);
      return;
    }
    w.high[sum][0] += bit_copy<std::int64_t>(high) - bit_copy<std::int64_t>(w.magic_high[sum][0]);
    w.low[sum][0] += bit_copy<std::int64_t>(low) - bit_copy<std::int64_t>(w.magic_low[sum][0]);
  }

  const Format& format_;
  Words slots_;
  std::int64_t flags_ = 0;
  std::unique_ptr<cpu::Windows> windows_, other_windows_;
};

void check_sum(const std::int64_t* words, const SumFormat& f, const Wide& expected) {
  Words canonical(static_cast<std::size_t>(f.digits));
  propagate_carries(words, canonical.data(), f.digits);
  for (int i = 0; i + 1 < f.digits; ++i) {
    const std::int64_t digit = canonical[static_cast<std::size_t>(i)];
    require(digit >= 0 && digit <= kDigitMask, "a digit that is not canonical");
  }
  require(Wide::from_digits(canonical.data(), f.digits) == expected, "not the exact sum");
  constexpr int kLimbs = 36;
  BigUint<kLimbs> magnitude;
  const bool negative = magnitude_of(canonical.data(), f.digits, magnitude);
  require(negative == expected.negative(), "another sign");
  require(Wide::from_limbs(magnitude.limb, kLimbs) == (negative ? -expected : expected),
          "another magnitude");
}

}  // namespace
}  // namespace syncbn::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace syncbn;
  using namespace syncbn::fuzz;
  struct NamedFormat {
    const Format& format;
    int top[2];  ///< a partial of 512 elements is below 2^top
  };
  // Partials of float64 may be of any finite size.
  static const NamedFormat kFormats[] = {
      {kSingleFormat, {138, 266}}, {kHalfFormat, {26, 42}}, {kDoubleFormat, {1023, 1023}}};
  Bytes bytes(data, size);
  const NamedFormat& chosen = kFormats[bytes.below(3)];
  const Format& format = chosen.format;
  std::vector<Rank> ranks;
  for (std::int64_t r = bytes.below(6); r >= 0; --r) {
    ranks.emplace_back(format);
    for (int sum : {0, 1}) {
      if (bytes.below(2) != 0) {
        ranks.back().place(bytes.take<std::uint16_t>() % 1200 - 600, sum);
      }
    }
  }
  while (!bytes.empty()) {
    const auto choice = bytes.take<std::uint8_t>();
    Rank& rank = ranks[choice % ranks.size()];
    const int sum = choice >> 7;
    rank.add(sum, partial_of(bytes, sum == 0 ? format.first : format.second, chosen.top[sum]),
             (choice & 64) != 0);
    if ((choice & 48) == 48) {
      rank.flush();
    }
  }
  Words merged(static_cast<std::size_t>(format.words()));
  testing::Wide exact[2];
  for (Rank& rank : ranks) {
    const Words words = rank.words();
    for (std::size_t i = 0; i < words.size(); ++i) {
      merged[i] += words[i];
    }
    exact[0] += rank.exact[0];
    exact[1] += rank.exact[1];
  }
  check_sum(merged.data(), format.first, exact[0]);
  check_sum(merged.data() + format.first.digits, format.second, exact[1]);
  return 0;
}
