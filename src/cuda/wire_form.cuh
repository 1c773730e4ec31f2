// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/primitives.cuh"
#include "statistics/format.hpp"
#include "statistics/scalar.hpp"
#include "statistics/slots.hpp"

// How the words of a channel lie in a peer's memory. A sum has up to 41 digits, of which few are in
// use: those below are zero, and those above repeat the sign. So the sender looks, for each
// channel, where a run of digits has all of a sum, and sends no more than that. Where a run is too
// short, or a flag is set, it sends the words as they are. The receiver adds the same integers
// either way.
namespace syncbn::cuda {

/// All functions are called by whole warps.
template <class T>
class WireForm {
  static constexpr Format kFormat = FormatTraits<T>::kFormat;
  static constexpr int kFirst = kFormat.first.digits;
  static constexpr int kSecond = kFormat.second.digits;
  static constexpr int kWords = FormatTraits<T>::kWords;
  /// Words of the short form, a part of a warp: the head, a run of the first sum, one of the
  /// second.
  static constexpr int kShort = sizeof(T) == 8 ? 16 : 8;
  static constexpr int kFirstRun = kShort / 2 - 1;
  static constexpr int kSecondRun = kShort / 2;
  static constexpr bool kHasShort = kWords > kShort;  // float16 has six words
  static constexpr std::int64_t kWhole = -1;          ///< the head where all words follow
  static constexpr std::int64_t kBorrow = 1 << 8;     ///< above where a run begins
  static constexpr int kOfSecond = 16;                ///< bits of the head that are the first run's

 public:
  /// Words of a peer's memory for each channel.
  static constexpr int kPlace = kHasShort ? 1 + kWords : kWords;

  /// words: of `channels` channels; runs: two words of shared memory for each of them. Calls
  /// send(where a word goes, the word).
  template <class Send>
  SYNCBN_DEVICE static void write(const std::int64_t* words, std::int64_t* runs,
                                  std::int64_t channels, const Send& send) {
    const unsigned lane = device::thread_index() % device::kWarp;
    if constexpr (!kHasShort) {
      for (std::int64_t i = lane; i < channels * kWords; i += device::kWarp) {
        send(i, words[i]);
      }
    } else {
      for (std::int64_t i = lane; i < 2 * channels; i += device::kWarp) {
        const std::int64_t* const of_channel = words + i / 2 * kWords;
        runs[i] = of_channel[kWords - 1] != 0 ? kWhole
                  : i % 2 == 0                ? run_of<kFirst, kFirstRun>(of_channel)
                                              : run_of<kSecond, kSecondRun>(of_channel + kFirst);
      }
      device::warp_barrier();  // the runs are known
      for (std::int64_t i = lane; i < channels * kShort; i += device::kWarp) {
        const std::int64_t k = i / kShort;
        const auto word = static_cast<int>(i % kShort);
        const std::int64_t* const of_channel = words + k * kWords;
        const std::int64_t first = runs[2 * k];
        const std::int64_t second = runs[2 * k + 1];
        if (first == kWhole || second == kWhole) {
          for (int w = word; w <= kWords; w += kShort) {
            send(k * kPlace + w, w == 0 ? kWhole : of_channel[w - 1]);
          }
        } else {
          const std::int64_t head = first | second << kOfSecond;
          send(k * kPlace + word, word == 0 ? head : of_channel[digit_at(head, word)]);
        }
      }
    }
  }

  /// Adds to the words of `channels` channels what the peers sent to place(peer).
  template <class Place>
  SYNCBN_DEVICE static void add(std::int64_t* words, std::int64_t channels, int ranks, int rank,
                                const Place& place) {
    constexpr int kAtOnce = 4;  // loads under way
    constexpr int kRead = kHasShort ? kShort : kWords;
    const unsigned lane = device::thread_index() % device::kWarp;
    for (std::int64_t begin = 0; begin < channels * kRead; begin += device::kWarp) {
      const std::int64_t i = begin + lane;
      const bool active = i < channels * kRead;
      const std::int64_t at = i / kRead * kPlace + i % kRead;
      for (int first = 0; first < ranks; first += kAtOnce) {
        std::int64_t got[kAtOnce] = {};
        SYNCBN_UNROLL(4)
        for (int p = 0; p < kAtOnce; ++p) {
          if (active && first + p < ranks && first + p != rank) {
            got[p] = device::load_peer(place(first + p) + at);
          }
        }
        SYNCBN_UNROLL(4)
        for (int p = 0; p < kAtOnce; ++p) {
          if (first + p >= ranks || first + p == rank) {
            continue;
          }
          if constexpr (kHasShort) {
            const std::int64_t head = device::shuffle_index(got[p], lane - lane % kShort);
            if (active) {
              add_word(words + i / kShort * kWords, head, static_cast<int>(i % kShort), got[p],
                       place(first + p) + i / kShort * kPlace);
            }
          } else if (active) {
            words[i] += got[p];
          }
          device::warp_barrier();  // other threads may add or read these words next
        }
      }
    }
  }

 private:
  /// Where a run of kLength digits has all of a sum, and whether the sign above it is a borrow; or
  /// kWhole.
  template <int kCount, int kLength>
  SYNCBN_DEVICE static std::int64_t run_of(const std::int64_t* digits) {
    const bool negative = digits[kCount - 1] < 0;
    std::uint64_t zero = 0;  // bit i: of digit i
    std::uint64_t sign = 0;
    SYNCBN_UNROLL(12)
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t repeated = !negative ? 0 : i == kCount - 1 ? -1 : kDigitMask;
      zero |= std::uint64_t{digits[i] == 0} << i;
      sign |= std::uint64_t{digits[i] == repeated} << i;
    }
    const std::uint64_t used = ~zero | std::uint64_t{1}
                                           << (kCount - kLength);  // it begins no later
    const int begin = 63 - leading_zeros(used & -used);
    const int end = begin + kLength;
    const std::uint64_t above = (std::uint64_t{1} << kCount) - (std::uint64_t{1} << end);
    return (sign & above) != above ? kWhole : begin + (negative && end < kCount ? kBorrow : 0);
  }
  /// The digit that a word of the short form is, the second sum's after the first's.
  SYNCBN_DEVICE static std::int64_t digit_at(std::int64_t head, int word) {
    return word <= kFirstRun ? (head & (kBorrow - 1)) + word - 1
                             : kFirst + (head >> kOfSecond & (kBorrow - 1)) + word - 1 - kFirstRun;
  }
  /// By the thread of a word of the short form; sent: all that the peer sent of the channel.
  SYNCBN_DEVICE static void add_word(std::int64_t* words, std::int64_t head, int word,
                                     std::int64_t got, const std::int64_t* sent) {
    if (head == kWhole) {
      for (int w = word; w < kWords; w += kShort) {
        words[w] += device::load_peer(sent + 1 + w);
      }
    } else if (word != 0) {
      words[digit_at(head, word)] += got;
    } else {  // digits that repeat a minus are -1 in the first of them
      if ((head & kBorrow) != 0) {
        words[digit_at(head, kFirstRun) + 1] -= 1;
      }
      if ((head >> kOfSecond & kBorrow) != 0) {
        words[digit_at(head, kShort - 1) + 1] -= 1;
      }
    }
  }
};

}  // namespace syncbn::cuda
