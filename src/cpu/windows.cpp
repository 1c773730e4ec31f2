// SPDX-License-Identifier: Apache-2.0
#include "cpu/windows.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "statistics/scalar.hpp"
#include "statistics/slots.hpp"

namespace syncbn::cpu {
namespace {

int exponent_above(double v) {
  int exponent = 0;
  std::frexp(v, &exponent);
  return exponent;
}

/// digits of limbs * 2^position, canonical; digits are all written.
void limbs_to_digits(__int128 limbs, int position, std::int64_t* digits, int count) {
  if (position < 0) {  // zero bits below the unit
    limbs = position <= -127 ? (limbs < 0 ? -1 : 0) : limbs >> -position;
    position = 0;
  }
  const int first = position / kDigitBits;
  const int shift = position % kDigitBits;
  for (int i = 0; i < first && i < count; ++i) {
    digits[i] = 0;
  }
  if (first >= count - 1) {
    if (first < count) {
      digits[count - 1] = static_cast<std::int64_t>(limbs << shift);
    }
    return;
  }
  digits[first] =
      static_cast<std::int64_t>(static_cast<std::uint64_t>(limbs) << shift) & kDigitMask;
  limbs >>= kDigitBits - shift;
  for (int i = first + 1; i < count - 1; ++i) {
    digits[i] = static_cast<std::int64_t>(limbs) & kDigitMask;
    limbs >>= kDigitBits;
  }
  digits[count - 1] = static_cast<std::int64_t>(limbs);
}

/// The same where all digits but four, which limbs may reach, are 0 or repeat the sign.
template <int kCount>
void limbs_to_digits(__int128 limbs, int position, std::int64_t* digits) {
  const int first = position / kDigitBits;
  if (position < 0 || first + 4 > kCount - 1) {
    limbs_to_digits(limbs, position, digits, kCount);
    return;
  }
  const int shift = position % kDigitBits;
  const std::int64_t sign = limbs < 0 ? -1 : 0;
  for (int i = 0; i < kCount - 1; ++i) {
    digits[i] = sign & kDigitMask;
  }
  digits[kCount - 1] = sign;
  for (int i = 0; i < first; ++i) {
    digits[i] = 0;
  }
  digits[first] =
      static_cast<std::int64_t>(static_cast<std::uint64_t>(limbs) << shift) & kDigitMask;
  const __int128 rest = limbs >> (kDigitBits - shift);
  const auto low = static_cast<std::uint64_t>(rest);
  const auto high = static_cast<std::uint64_t>(rest >> 64);
  digits[first + 1] = static_cast<std::int64_t>(low) & kDigitMask;
  digits[first + 2] =
      static_cast<std::int64_t>(low >> kDigitBits | high << (64 - kDigitBits)) & kDigitMask;
  digits[first + 3] = static_cast<std::int64_t>(rest >> (2 * kDigitBits)) & kDigitMask;
}

}  // namespace

/// Ten arrays of 8-byte entries, the slots, an array of 4-byte entries and one of bytes.
Windows::Windows(const Format& format, std::int64_t channels)
    : format_(format),
      channels_(channels),
      padded_((channels + kChannelPadding - 1) / kChannelPadding * kChannelPadding),
      storage_(static_cast<std::size_t>(padded_) *
               (10 * 8 + 8 * static_cast<std::size_t>(format.slots() + 1) + 4 + 1)) {
  const auto n = static_cast<std::size_t>(padded_);
  auto* next = static_cast<std::byte*>(storage_.data());
  for (int k = 0; k < 2; ++k) {
    for (double** array : {&arrays_.magic_high[k], &arrays_.magic_low[k], &arrays_.bound[k]}) {
      *array = reinterpret_cast<double*>(next);
      next += n * 8;
    }
    for (std::int64_t** array : {&arrays_.high[k], &arrays_.low[k]}) {
      *array = reinterpret_cast<std::int64_t*>(next);
      std::memset(next, 0, n * 8);
      next += n * 8;
    }
  }
  outside_ = reinterpret_cast<std::int64_t*>(next);  // without values: most are never used
  next += n * 8 * static_cast<std::size_t>(format.slots() + 1);
  misses_ = reinterpret_cast<std::int32_t*>(next);
  used_ = reinterpret_cast<bool*>(next + n * 4);
  std::memset(next, 0, n * (4 + 1));
  for (int k = 0; k < 2; ++k) {
    for (std::int64_t c = channels; c < padded_; ++c) {  // touched by vectors, never filled
      place(c, k, 0);
    }
  }
}

void Windows::place(std::int64_t channel, int sum, std::int32_t top) {
  const WindowPlace place(top);
  arrays_.magic_high[sum][channel] = place.magic_high;
  arrays_.magic_low[sum][channel] = place.magic_low;
  arrays_.bound[sum][channel] = place.bound;
}

int Windows::unit(std::int64_t channel, int sum) const {
  const auto bits = bit_copy<std::uint64_t>(arrays_.bound[sum][channel]);
  return static_cast<int>(bits >> 52) - 1023 - kHighBits;
}

std::int64_t* Windows::slots(std::int64_t channel) {
  const std::int64_t per_channel = format_.slots() + 1;
  std::int64_t* base = outside_ + channel * per_channel;
  if (!used_[channel]) {
    std::fill_n(base, per_channel, 0);
    used_[channel] = true;
  }
  return base;
}

void Windows::add_limbs(std::int64_t channel, int sum, std::int64_t high, std::int64_t low,
                        int unit) {
  const __int128 limbs = (static_cast<__int128>(high) << kLowBits) + low;
  if (limbs == 0) {
    return;
  }
  const bool negative = limbs < 0;
  const auto magnitude = static_cast<unsigned __int128>(negative ? -limbs : limbs);
  const ExactSum to = exact_sum(slots(channel), format_, sum == 0);
  const int position = unit - kLowBits + to.format.unit;
  // Two halves, so that each is below 2^96 after its shift.
  constexpr unsigned __int128 kLowHalf = (static_cast<unsigned __int128>(1) << 64) - 1;
  const int drop = position < 0 ? -position : 0;
  const unsigned __int128 kept = drop >= 128 ? 0 : magnitude >> drop;
  const int base = position < 0 ? 0 : position;
  to.add(kept & kLowHalf, base, negative);
  if (kept >> 64 != 0) {
    to.add(kept >> 64, base + 64, negative);
  }
}

void Windows::flush_one(std::int64_t channel, int sum) {
  std::int64_t& high = arrays_.high[sum][channel];
  std::int64_t& low = arrays_.low[sum][channel];
  add_limbs(channel, sum, high, low, unit(channel, sum));
  high = 0;
  low = 0;
}

void Windows::flush(std::int64_t begin, std::int64_t end) {
  for (std::int64_t c = begin; c < end; ++c) {
    flush_one(c, 0);
    flush_one(c, 1);
  }
}

void Windows::add_outside(std::int64_t channel, int sum, double partial) {
  if (partial == 0 || channel >= channels_) {
    return;
  }
  if (!is_finite(partial)) {
    slots(channel)[format_.slots()] |= sum == 0 ? first_sum_flag(partial) : kSecondNonFinite;
    return;
  }
  exact_sum(slots(channel), format_, sum == 0).add(partial);
  // A window that is too low is moved at once; one that is too high, after 1, 2, 4, ... misses.
  const std::int32_t misses = ++misses_[channel];
  if ((misses & (misses - 1)) == 0 || std::fabs(partial) >= arrays_.bound[sum][channel]) {
    flush_one(channel, sum);
    place(channel, sum, exponent_above(partial) + 6);
  }
}

void Windows::absorb(const Windows& other, std::int64_t begin, std::int64_t end) {
  for (std::int64_t c = begin; c < end; ++c) {
    for (int k = 0; k < 2; ++k) {
      if (unit(c, k) == other.unit(c, k)) {
        // Cannot overflow: both stay below 2^60 between flushes; the sum is flushed when large.
        arrays_.high[k][c] += other.arrays_.high[k][c];
        arrays_.low[k][c] += other.arrays_.low[k][c];
        if (std::max(std::abs(arrays_.high[k][c]), std::abs(arrays_.low[k][c])) > std::int64_t{1}
                                                                                      << 61) {
          flush_one(c, k);
        }
      } else {
        add_limbs(c, k, other.arrays_.high[k][c], other.arrays_.low[k][c], other.unit(c, k));
      }
    }
    if (other.has_slots(c)) {
      const int count = format_.slots();
      const std::int64_t* from = other.outside_ + c * (count + 1);
      std::int64_t* to = slots(c);
      for (int i = 0; i < count; ++i) {
        to[i] += from[i];
      }
      to[count] |= from[count];
    }
  }
}

void Windows::write_words(std::int64_t channel, std::int64_t* words) {
  const int first_digits = format_.first.digits;
  const int second_digits = format_.second.digits;
  if (!has_slots(channel)) {
    const auto limbs = [&](int k) {
      return (static_cast<__int128>(arrays_.high[k][channel]) << kLowBits) +
             arrays_.low[k][channel];
    };
    const int first_position = unit(channel, 0) - kLowBits + format_.first.unit;
    const int second_position = unit(channel, 1) - kLowBits + format_.second.unit;
    if (first_digits == kSingleFormat.first.digits) {
      limbs_to_digits<kSingleFormat.first.digits>(limbs(0), first_position, words);
      limbs_to_digits<kSingleFormat.second.digits>(limbs(1), second_position, words + first_digits);
    } else {
      limbs_to_digits(limbs(0), first_position, words, first_digits);
      limbs_to_digits(limbs(1), second_position, words + first_digits, second_digits);
    }
    words[first_digits + second_digits] = 0;
    return;
  }
  flush(channel, channel + 1);
  std::int64_t* const from = slots(channel);
  exact_sum(from, format_, true).write(words);
  exact_sum(from, format_, false).write(words + first_digits);
  words[first_digits + second_digits] = from[format_.slots()];
}

void add_outside_window(Windows& windows, std::int64_t channel, int sum, double partial) {
  windows.add_outside(channel, sum, partial);
}

}  // namespace syncbn::cpu
