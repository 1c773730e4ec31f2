// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "statistics/finalize.hpp"

// Finalize by 16 threads for each channel: thread i of them holds digit i of an integer. The steps
// are those of statistics/finalize.hpp, which one thread takes in turn, with its integers in local
// memory. All functions are called by whole warps.
namespace syncbn::cuda {

inline constexpr unsigned kDigitThreads = 16;

/// Threads for each channel. The integers of float64 have more digits than a warp has threads.
template <class T>
inline constexpr unsigned kChannelThreads = sizeof(T) == 8 ? 1 : kDigitThreads;

/// The digits of one integer, as one thread sees them.
class Digits {
 public:
  /// digit: this thread's, of any size; count: how many there are, the last one signed.
  SYNCBN_DEVICE Digits(std::int64_t digit, unsigned count) : digit_(digit), last_(count - 1) {
    carry();
  }
  /// Makes a negative integer positive; returns whether it was negative.
  SYNCBN_DEVICE bool take_magnitude() {
    const bool negative = of(last_) < 0;
    digit_ = negative ? -digit_ : digit_;
    carry();
    return negative;
  }
  /// Of an integer that is not negative.
  SYNCBN_DEVICE Rounded53 rounded() const {
    const unsigned nonzero =
        device::ballot(digit_ != 0) >> (first_thread() % device::kWarp) & 0xffffu;
    const int top = nonzero == 0 ? 0 : 63 - leading_zeros(nonzero);
    const auto high = static_cast<std::uint64_t>(of(static_cast<unsigned>(top)));
    const std::uint64_t middle = below(top, 1);
    const std::uint64_t low = below(top, 2);
    if (nonzero == 0) {
      return {0.0, 0};
    }
    const std::uint64_t next = middle << 12 | low >> 40;  // the 64 bits below those of `high`
    const int zeros = leading_zeros(high);
    const std::uint64_t bits = high << zeros | (zeros == 0 ? 0 : next >> (64 - zeros));
    const bool rest = next << zeros != 0 || low << 24 != 0 ||
                      (top > 2 && (nonzero & ((1u << (top - 2)) - 1)) != 0);
    const std::uint64_t kept = bits >> 11;
    const std::uint64_t dropped = bits & 0x7ffu;
    const bool up = dropped > 0x400u || (dropped == 0x400u && (rest || (kept & 1u) != 0));
    return {static_cast<double>(kept + (up ? 1u : 0u)), kDigitBits * top - zeros + 11};
  }
  /// max(0, factor * squares - sum * sum), sum of `kSumDigits` digits. Both not negative.
  template <int kSumDigits>
  SYNCBN_DEVICE static Digits difference(const Digits& squares, std::int64_t factor,
                                         const Digits& sum) {
    const auto me = static_cast<int>(device::thread_index() % kDigitThreads);
    __int128 column = static_cast<__int128>(squares.digit_) * factor;
    for (int i = 0; i < kSumDigits; ++i) {
      const std::int64_t a = sum.of(static_cast<unsigned>(i));
      const std::int64_t b = sum.of(static_cast<unsigned>(me - i) % kDigitThreads);
      column -= me >= i && me - i < kSumDigits ? static_cast<__int128>(a) * b : 0;
    }
    const auto high = static_cast<std::int64_t>(column >> kDigitBits);
    const std::int64_t carry = from_below(high);
    Digits out((static_cast<std::int64_t>(column) & kDigitMask) + carry, kDigitThreads);
    out.digit_ = out.of(kDigitThreads - 1) < 0 ? 0 : out.digit_;
    return out;
  }

 private:
  SYNCBN_DEVICE static unsigned first_thread() {
    return device::thread_index() / kDigitThreads * kDigitThreads;
  }
  SYNCBN_DEVICE std::int64_t of(unsigned digit) const {
    return device::shuffle_index(digit_, (first_thread() + digit) % device::kWarp);
  }
  SYNCBN_DEVICE std::uint64_t below(int top, int by) const {
    const std::int64_t digit = of(static_cast<unsigned>(top >= by ? top - by : 0));
    return top >= by ? static_cast<std::uint64_t>(digit) : 0;
  }
  /// What the thread of the digit below has.
  SYNCBN_DEVICE static std::int64_t from_below(std::int64_t value) {
    const std::int64_t other =
        device::shuffle_index(value, (device::thread_index() - 1) % device::kWarp);
    return device::thread_index() % kDigitThreads == 0 ? 0 : other;
  }
  /// Brings all digits but the last into [0, 2^52). Carries of ranks end after two rounds, almost
  /// always.
  SYNCBN_DEVICE void carry() {
    const bool hands_on = device::thread_index() % kDigitThreads < last_;
    while (true) {
      const std::int64_t carry = hands_on ? digit_ >> kDigitBits : 0;
      if (!device::any(carry != 0)) {
        return;
      }
      digit_ = (hands_on ? digit_ & kDigitMask : digit_) + from_below(carry);
    }
  }

  std::int64_t digit_;
  unsigned last_;
};

/// The digits of a channel's first or second sum. words: of the channel.
template <class T>
SYNCBN_DEVICE Digits digits_of(const std::int64_t* words, bool first) {
  constexpr Format kFormat = FormatTraits<T>::kFormat;
  static_assert(kFormat.second.digits < static_cast<int>(kDigitThreads) - 1);
  const auto count = static_cast<unsigned>(first ? kFormat.first.digits : kFormat.second.digits);
  const unsigned me = device::thread_index() % kDigitThreads;
  const std::int64_t* const from = first ? words : words + kFormat.first.digits;
  return Digits(me < count ? from[me] : 0, count);
}

/// finalize_channel(); the same for all 16 threads.
template <class T>
SYNCBN_DEVICE ChannelMoments finalize_channel_by_digits(const std::int64_t* words,
                                                        std::int64_t count, double eps) {
  constexpr Format kFormat = FormatTraits<T>::kFormat;
  static_assert(FormatTraits<T>::kShift == 0);
  Digits sum = digits_of<T>(words, true);
  const bool negative = sum.take_magnitude();
  Digits squares = digits_of<T>(words, false);
  squares.take_magnitude();
  const Digits difference = Digits::difference<kFormat.first.digits>(squares, count, sum);
  return channel_moments<T>(negative, sum.rounded(), difference.rounded(), count,
                            {words[FormatTraits<T>::kWords - 1]}, eps);
}

/// finalize_channel_gradients(); the same for all 16 threads.
template <class T>
SYNCBN_DEVICE ChannelGradients finalize_channel_gradients_by_digits(const std::int64_t* words,
                                                                    double mean, double rstd) {
  constexpr Format kFormat = FormatTraits<T>::kFormat;
  Digits first = digits_of<T>(words, true);
  const bool first_negative = first.take_magnitude();
  Digits second = digits_of<T>(words, false);
  const bool second_negative = second.take_magnitude();
  return channel_gradients(value_of(first_negative, first.rounded(), kFormat.first.unit),
                           value_of(second_negative, second.rounded(), kFormat.second.unit),
                           {words[FormatTraits<T>::kWords - 1]}, mean, rstd);
}

/// The one of both that kChannelThreads<T> threads take, which are whole warps of them.
template <class T>
SYNCBN_DEVICE ChannelMoments finalize_moments_of(const std::int64_t* words, std::int64_t count,
                                                 double eps) {
  if constexpr (kChannelThreads<T> == 1) {
    return finalize_channel<T>(words, count, eps);
  } else {
    return finalize_channel_by_digits<T>(words, count, eps);
  }
}
template <class T>
SYNCBN_DEVICE ChannelGradients finalize_gradients_of(const std::int64_t* words, double mean,
                                                     double rstd) {
  if constexpr (kChannelThreads<T> == 1) {
    return finalize_channel_gradients<T>(words, mean, rstd);
  } else {
    return finalize_channel_gradients_by_digits<T>(words, mean, rstd);
  }
}

/// c1, c2 and c3 of all channels follow one another.
SYNCBN_DEVICE void store_coefficients(const Coefficients& k, double* coefficients, std::int64_t c,
                                      std::int64_t channels) {
  coefficients[c] = k.c1;
  coefficients[channels + c] = k.c2;
  coefficients[2 * channels + c] = k.c3;
}

}  // namespace syncbn::cuda
