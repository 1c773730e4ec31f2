// SPDX-License-Identifier: Apache-2.0
// The sums of 2-D input, where every element is a partial, over the vector type of one level.
// Included inside a level file's unnamed namespace, after merge.hpp, whose rules hold here
// too.
//
// Up to kExactRows rows are added in floating point to accumulators that begin at the magic numbers
// of the window's limbs: an addition to one of them is exact if the element is a multiple of the
// limb's unit and below the window's bound. Whether all elements of a channel were is told
// afterwards by the largest and the smallest of them; if not, they are merged one by one.

// 2^6 lower limbs of at most 2^(kLowBits - 1) each stay within the magic number's binade.
constexpr std::int64_t kExactRows = 64;
/// Channels that kernels of rows take at a time.
constexpr std::int64_t kBlockChannels = 64;

/// Asks for a block of rows, of two tensors if kBoth, row after row and into the second cache: what
/// hardware prefetchers do not do where kernels go through the block in columns or lanes.
template <class T, bool kBoth>
class Ahead {
 public:
  Ahead() = default;
  Ahead(const T* u, std::int64_t u_step, const T* v, std::int64_t v_step, std::int64_t rows,
        std::int64_t channels)
      : rows_(rows),
        u_(u),
        v_(v),
        u_step_(step(u_step, channels)),
        v_step_(step(v_step, channels)) {}
  /// The next row.
  SYNCBN_INLINE void ask() {
    if (rows_ == 0) {
      return;
    }
    --rows_;
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kBlockChannels; i += kLine) {
      prefetch_second(u_ + i);
      if (kBoth) {
        prefetch_second(v_ + i);
      }
    }
    u_ += u_step_;
    v_ += kBoth ? v_step_ : 0;
  }

 private:
  static constexpr std::int64_t kLine = kCacheLine / static_cast<std::int64_t>(sizeof(T));
  /// Several rows where they are short and follow one another.
  static std::int64_t step(std::int64_t stride, std::int64_t channels) {
    return stride == channels ? kBlockChannels : stride;
  }

  std::int64_t rows_ = 0;
  const T* u_ = nullptr;
  const T* v_ = nullptr;
  std::int64_t u_step_ = 0;
  std::int64_t v_step_ = 0;
};

struct ExactBlock {
  alignas(64) double first[kBlockChannels];
  alignas(64) double high[kBlockChannels];  ///< of the second sum
  alignas(64) double low[kBlockChannels];
  /// Of |u| and |v|, as bits; the smallest is that of those that are not 0, or 0.
  alignas(64) std::uint32_t largest[2][kBlockChannels];
  alignas(64) std::uint32_t smallest[2][kBlockChannels];
};

/// The second sum of half a vector of floats.
struct SecondSum {
  DoubleV high;
  DoubleV low;
  void add(DoubleV x, DoubleV y) {
    const DoubleV sum = fused(x, y, high);
    low = low + fused_minus(x, y, sum - high);
    high = sum;
  }
};

/// Rows of a vector for one row of the next block that is asked for.
constexpr std::int64_t kRowsAsked = kBlockChannels / kFloatLanes;

struct Extremes {
  BitsV largest;
  BitsV smallest;
  void take(FloatV x) {
    const BitsV bits = magnitude_bits(x);
    largest = larger(largest, bits);
    smallest = smaller(smallest, minus_one(bits));
  }
};

/// Adds `rows` rows of one vector of channels, of which w is the windows'.
template <class T, bool kProduct, bool kWhole>
SYNCBN_INLINE void add_exactly(ExactBlock& block, const WindowArrays& w, std::int64_t channel,
                               std::int64_t c, std::int64_t channels, std::int64_t rows, const T* u,
                               std::int64_t u_step, const T* v, std::int64_t v_step,
                               const std::uint8_t* mask, Ahead<T, kProduct>& ahead) {
  DoubleV first[2];
  SecondSum second[2];
  Extremes of_u{broadcast_bits(0), broadcast_bits(0xffffffffu)};
  Extremes of_v = of_u;
  for (int i = 0; i < 2; ++i) {
    const std::int64_t at = channel + c + i * kDoubleLanes;
    first[i] = load_double(w.magic_high[0] + at);
    second[i].high = load_double(w.magic_high[1] + at);
    second[i].low = load_double(w.magic_low[1] + at);
  }
  for (std::int64_t k = 0; k < rows; ++k) {
    if (k % kRowsAsked == 0) {
      ahead.ask();
    }
    if (mask != nullptr && mask[k] == 0) {
      continue;
    }
    const T* from = u + k * u_step + c;
    const FloatV x = kWhole ? load(from) : load_partial(from, channels - c);
    of_u.take(x);
    FloatV y = x;
    if (kProduct) {
      const T* other = v + k * v_step + c;
      y = kWhole ? load(other) : load_partial(other, channels - c);
      of_v.take(y);
    }
    const DoubleV x_low = low_half(x);
    const DoubleV x_high = high_half(x);
    first[0] = first[0] + x_low;
    first[1] = first[1] + x_high;
    second[0].add(x_low, kProduct ? low_half(y) : x_low);
    second[1].add(x_high, kProduct ? high_half(y) : x_high);
  }
  for (int i = 0; i < 2; ++i) {
    store_double(block.first + c + i * kDoubleLanes, first[i]);
    store_double(block.high + c + i * kDoubleLanes, second[i].high);
    store_double(block.low + c + i * kDoubleLanes, second[i].low);
  }
  store_bits_of(block.largest[0] + c, of_u.largest);
  store_bits_of(block.smallest[0] + c, plus_one(of_u.smallest));
  if (kProduct) {
    store_bits_of(block.largest[1] + c, of_v.largest);
    store_bits_of(block.smallest[1] + c, plus_one(of_v.smallest));
  }
}

/// Whether the additions to kDoubleLanes channels of the block, from c on, were exact.
template <class T, bool kProduct>
inline bool was_exact(const ExactBlock& block, const WindowArrays& w, std::int64_t channel,
                      std::int64_t c) {
  DoubleV largest[2];
  DoubleV smallest[2];  // its power of two; 0 if all are 0
  for (int k = 0; k < 2; ++k) {
    const int from = kProduct ? k : 0;
    largest[k] = load_double_of_bits(block.largest[from] + c);
    smallest[k] = with_bits(load_double_of_bits(block.smallest[from] + c), 0x7ff0000000000000);
  }
  // The units of the limbs that the lowest bits have to reach, over the bounds: |x| >= 2^e makes x
  // a multiple of 2^(e - kFraction).
  constexpr int kFraction = ElementTraits<T>::kFraction;
  constexpr double kFirstStep = 1.0 / static_cast<double>(1LL << (kHighBits - kFraction));
  constexpr double kSecondStep =
      1.0 / static_cast<double>(1LL << (kHighBits + kLowBits - 2 * kFraction - 30)) /
      static_cast<double>(1LL << 30);
  const DoubleV first_bound = load_double(w.bound[0] + channel + c);
  const DoubleV second_bound = load_double(w.bound[1] + channel + c);
  const DoubleV product = largest[0] * largest[1];
  const DoubleV zero = zero_double();
  const unsigned below = less(largest[0], first_bound) & less(product, second_bound);
  const unsigned first_reaches =
      at_least(smallest[0], first_bound * broadcast(kFirstStep)) | at_least(zero, largest[0]);
  const unsigned second_reaches =
      at_least(smallest[0] * smallest[1], second_bound * broadcast(kSecondStep)) |
      at_least(zero, product);
  return (below & first_reaches & second_reaches) == kAllFit;
}

/// Merges the elements of a few rows, kDoubleLanes channels from channel + c on, one by one.
template <class T, bool kProduct>
__attribute__((noinline)) void merge_elements(Windows& windows, const WindowArrays& w,
                                              std::int64_t channel, std::int64_t c,
                                              std::int64_t channels, std::int64_t rows, const T* u,
                                              std::int64_t u_step, const T* v, std::int64_t v_step,
                                              const std::uint8_t* mask) {
  const std::int64_t left = channels - c;
  for (std::int64_t k = 0; k < rows; ++k) {
    if (mask != nullptr && mask[k] == 0) {
      continue;
    }
    const T* from = u + k * u_step + c;
    const T* other = v + k * v_step + c;
    const bool whole = left >= kDoubleLanes;
    const DoubleV x = whole ? load_double(from) : load_double_partial(from, left);
    const DoubleV y = !kProduct ? x : whole ? load_double(other) : load_double_partial(other, left);
    // Adding to +0 turns -0 into +0, as a lane does.
    merge_channels(windows, w, channel + c, 0, zero_double() + x);
    merge_channels(windows, w, channel + c, 1, fused(x, y, zero_double()));
  }
}

enum class SumsOf : std::uint8_t { kSquare, kProduct, kActivated, kMasked };

template <class T, SumsOf kOf>
void sum_single_rows(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  constexpr bool kProduct = kOf != SumsOf::kSquare;
  alignas(64) T buffer[kOf == SumsOf::kActivated ? kExactRows * kBlockChannels : 1];
  ExactBlock block;
  for (std::int64_t n = task.unit_begin; n < task.unit_end; n += kExactRows) {
    const std::int64_t rows = minimum(kExactRows, task.unit_end - n);
    const std::uint8_t* mask = task.mask == nullptr ? nullptr : task.mask + n;
    for (std::int64_t channel = 0; channel < task.channels; channel += kBlockChannels) {
      const std::int64_t channels = minimum(kBlockChannels, task.channels - channel);
      const T* u = plane_of<T>(task.u, n, 0) + channel;
      std::int64_t u_step = task.u.sample_stride;
      const T* v = kProduct ? plane_of<T>(task.v, n, 0) + channel : u;
      const std::int64_t v_step = kProduct ? task.v.sample_stride : u_step;
      if (kOf == SumsOf::kActivated) {
        const bool keep = task.out.data != nullptr;
        u_step = keep ? task.out.sample_stride : kBlockChannels;
        T* target = keep ? output_of<T>(task.out, n, 0) + channel : buffer;
        for (std::int64_t k = 0; k < rows; ++k) {
          if (mask != nullptr && mask[k] == 0) {
            clear(target + k * u_step, channels);
          } else {
            pull_row(task, n + k, 0, channel, channels, target + k * u_step);
          }
        }
        u = target;
      }
      Ahead<T, kProduct> ahead;
      const bool last = channel + kBlockChannels >= task.channels;
      if (!last || n + rows < task.unit_end) {
        const std::int64_t next_n = last ? n + rows : n;
        const std::int64_t next = last ? 0 : channel + kBlockChannels;
        ahead = {plane_of<T>(task.u, next_n, 0) + next,
                 task.u.sample_stride,
                 kProduct ? plane_of<T>(task.v, next_n, 0) + next : nullptr,
                 task.v.sample_stride,
                 minimum(kExactRows, task.unit_end - next_n),
                 minimum(kBlockChannels, task.channels - next)};
      }
      std::int64_t c = 0;
      for (; c + kFloatLanes <= channels; c += kFloatLanes) {
        add_exactly<T, kProduct, true>(block, w, channel, c, channels, rows, u, u_step, v, v_step,
                                       mask, ahead);
      }
      if (c < channels) {
        add_exactly<T, kProduct, false>(block, w, channel, c, channels, rows, u, u_step, v, v_step,
                                        mask, ahead);
      }
      for (c = 0; c < channels; c += kDoubleLanes) {
        const bool exact = was_exact<T, kProduct>(block, w, channel, c);
        if (__builtin_expect(static_cast<long>(exact), 1) == 0) {
          merge_elements<T, kProduct>(windows, w, channel, c, channels, rows, u, u_step, v, v_step,
                                      mask);
          continue;
        }
        const auto add_to_limbs = [&](std::int64_t* limbs, const double* sums,
                                      const double* magic) {
          add_difference(limbs + channel + c, load_double(sums + c),
                         load_double(magic + channel + c));
        };
        add_to_limbs(w.high[0], block.first, w.magic_high[0]);
        add_to_limbs(w.high[1], block.high, w.magic_high[1]);
        add_to_limbs(w.low[1], block.low, w.magic_low[1]);
      }
    }
  }
}
