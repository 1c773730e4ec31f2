#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "cpu/cpu_passes.hpp"
#include "cpu/float_environment.hpp"
#include "cpu/kernels.hpp"
#include "cpu/packed.hpp"
#include "cpu/windows.hpp"
#include "statistics/dtype.hpp"

// Deals the sums of a tensor to threads and vector kernels, and merges their windows. How it is
// dealt never affects a bit: partials are defined by the contract and added exactly.
namespace syncbn::cpu {
namespace {

/// Below this many elements a second thread costs more than it brings.
constexpr std::int64_t kElementsPerThread = 16384;
constexpr std::int64_t kChannelStep = kChannelPadding;
/// Neighbouring channels of a row that one thread reads at least, where others read the rest.
constexpr std::int64_t kRowPiece = 512;

/// Magnitudes as integers, which are ordered alike.
template <class T>
using Magnitude = std::conditional_t<sizeof(T) == 2, std::int16_t, std::int32_t>;

/// The exponent e with magnitude < 2^e; 1 if there is nothing to go by.
template <class T>
std::int32_t exponent_above(Magnitude<T> magnitude) {
  constexpr int kFraction = ElementTraits<T>::kFraction;
  constexpr std::int32_t kNotFinite = std::numeric_limits<Magnitude<T>>::max() >> kFraction;
  const std::int32_t exponent = magnitude >> kFraction;
  return magnitude == 0 || exponent == kNotFinite ? 1 : exponent - kNotFinite / 2 + 1;
}

/// Guesses where partials will lie from the first few elements of each channel.
template <class T>
void place_windows(Windows& windows, const SampleView& u, const SampleView& v,
                   std::int64_t channel_begin, std::int64_t sample) {
  constexpr std::int64_t kProbes = 6;
  constexpr std::int64_t kBlock = 64;
  std::int32_t log_length = 0;
  while ((std::int64_t{1} << log_length) < std::min<std::int64_t>(u.plane, kSegment)) {
    ++log_length;
  }
  const bool along_plane = u.plane > 1;
  const std::int64_t probes = std::min(kProbes, along_plane ? u.plane : u.samples - sample);
  for (std::int64_t begin = 0; begin < windows.channels(); begin += kBlock) {
    const std::int64_t some = std::min(kBlock, windows.channels() - begin);
    const auto probe = [&](const SampleView& of, Magnitude<T>(&largest)[kBlock]) {
      const T* data = static_cast<const T*>(of.data) + sample * of.sample_stride +
                      (channel_begin + begin) * of.channel_stride;
      const std::int64_t step = along_plane ? of.element_stride : of.sample_stride;
      const auto take = [&](std::int64_t p, std::int64_t channel_step) {
        for (std::int64_t i = 0; i < some; ++i) {
          const auto bits = bit_copy<Magnitude<T>>(data[p * step + i * channel_step]);
          const auto magnitude =
              static_cast<Magnitude<T>>(bits & std::numeric_limits<Magnitude<T>>::max());
          largest[i] = magnitude > largest[i] ? magnitude : largest[i];
        }
      };
      for (std::int64_t p = 0; p < probes; ++p) {
        of.channel_stride == 1 ? take(p, 1)  // what a compiler turns into vectors
                               : take(p, of.channel_stride);
      }
    };
    Magnitude<T> largest[2][kBlock] = {};
    probe(u, largest[0]);
    if (&v != &u) {
      probe(v, largest[1]);
    }
    const auto& of_v = largest[&v == &u ? 0 : 1];
    std::int32_t tops[2][kBlock];
    for (std::int64_t i = 0; i < kBlock; ++i) {
      const std::int32_t above = exponent_above<T>(largest[0][i]);
      tops[0][i] = above + log_length + 4;
      tops[1][i] = above + exponent_above<T>(of_v[i]) + log_length + 6;
    }
    windows.place(begin, begin + some, 0, tops[0]);
    windows.place(begin, begin + some, 1, tops[1]);
  }
}

void place_windows(Windows& windows, const SampleView& u, const SampleView& v,
                   std::int64_t channel_begin, std::int64_t sample) {
  dispatch_vectorized(u.dtype, [&](auto type) {
    place_windows<decltype(type)>(windows, u, v, channel_begin, sample);
  });
}

Operand operand(const SampleView& view, std::int64_t channel) {
  Operand out = cpu::operand(view);
  out.data = static_cast<const std::byte*>(view.data) +
             channel * view.channel_stride * static_cast<std::int64_t>(size_of(view.dtype));
  return out;
}

/// What the kernels sum: u and u*v (v = u if null), or u = `u` pulled back with input v.
struct Sums {
  const SampleView* u;
  const SampleView* v = nullptr;
  const SampleView* out = nullptr;
  ElementConstants constants;
  const Pullback* pullback = nullptr;
};

/// The task for channels from `channel` on; constants: room for the task's.
SumsTask task_of(const Sums& sums, std::int64_t channel, ElementConstants& constants) {
  SumsTask task;
  task.u = operand(*sums.u, channel);
  task.plane = sums.u->plane;
  task.mask = (sums.v == nullptr ? *sums.u : *sums.v).mask;
  if (sums.v != nullptr) {
    task.v = operand(*sums.v, channel);
  }
  if (sums.out != nullptr) {
    task.out = operand(*sums.out, channel);
  }
  if (sums.pullback != nullptr) {
    constants = {sums.constants.mean_high + channel, sums.constants.mean_low + channel,
                 sums.constants.scale + channel, sums.constants.shift + channel};
    task.constants = &constants;
    task.activation = activation_constants(sums.pullback->activation);
    task.activation_mask = activation_mask_operand(*sums.v, sums.pullback->activation_mask);
    if (task.activation_mask.data != nullptr) {  // kChannelStep keeps this at a whole byte
      task.activation_mask.data += ActivationMaskLayout(*sums.v).bit(0, channel, 0) / 8;
    }
  }
  return task;
}

/// One thread's share: channels [c0, c1) x units [u0, u1).
struct Share {
  std::int64_t channel_begin;
  std::int64_t channel_end;
  std::int64_t unit_begin;
  std::int64_t unit_end;
};

std::unique_ptr<Windows> sum_share(const Kernels& kernels, bool rows, const Sums& sums,
                                   const Share& share) {
  const SampleView& u = *sums.u;
  const std::int64_t segments = (u.plane + kSegment - 1) / kSegment;
  const std::int64_t channels = share.channel_end - share.channel_begin;
  auto windows = std::make_unique<Windows>(format_of(u.dtype), channels);
  place_windows(*windows, u, sums.v == nullptr ? u : *sums.v, share.channel_begin,
                share.unit_begin / segments);
  ElementConstants constants;
  SumsTask task = task_of(sums, share.channel_begin, constants);
  task.channels = channels;
  for (std::int64_t unit = share.unit_begin; unit < share.unit_end; unit += kFlushInterval) {
    if (unit > share.unit_begin) {
      windows->flush(0, channels);
    }
    task.unit_begin = unit;
    task.unit_end = std::min(unit + kFlushInterval, share.unit_end);
    (rows ? kernels.sum_rows : kernels.sum_planes)(u.dtype, task, *windows, windows->arrays());
  }
  return windows;
}

std::vector<Share> deal(const SampleView& u, bool rows, int threads) {
  const std::int64_t units = u.samples * ((u.plane + kSegment - 1) / kSegment);
  const std::int64_t most = std::max<std::int64_t>(
      1, std::min<std::int64_t>(threads, u.samples * u.channels * u.plane / kElementsPerThread));
  const std::int64_t blocks = (u.channels + kChannelStep - 1) / kChannelStep;
  // Channels need no merge afterwards; rows are read in long pieces, or whole.
  const bool long_pieces = u.channels >= most * kRowPiece || (units < most && blocks > units);
  const bool by_channel = rows ? long_pieces : blocks >= most;
  const std::int64_t pieces = std::min(most, by_channel ? blocks : units);
  std::vector<Share> shares;
  for (std::int64_t i = 0; i < pieces; ++i) {
    if (by_channel) {
      shares.push_back({blocks * i / pieces * kChannelStep,
                        std::min(u.channels, blocks * (i + 1) / pieces * kChannelStep), 0, units});
    } else {
      shares.push_back({0, u.channels, units * i / pieces, units * (i + 1) / pieces});
    }
  }
  return shares;
}

void run(const Kernels& kernels, bool rows, const Sums& sums, std::int64_t* words,
         Executor& executor) {
  const SampleView& u = *sums.u;
  const int word_count = format_of(u.dtype).words();
  const std::vector<Share> shares = deal(u, rows, executor.concurrency());
  const bool by_channel = shares.size() == 1 || shares.front().channel_end < u.channels;
  std::vector<std::unique_ptr<Windows>> windows(shares.size());
  executor.parallel_for(
      0, static_cast<std::int64_t>(shares.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        const FloatEnvironment environment;
        for (std::int64_t i = begin; i < end; ++i) {
          const auto s = static_cast<std::size_t>(i);
          windows[s] = sum_share(kernels, rows, sums, shares[s]);
          for (std::int64_t c = 0; by_channel && c < windows[s]->channels(); ++c) {
            windows[s]->write_words(c, words + (shares[s].channel_begin + c) * word_count);
          }
        }
      });
  if (by_channel) {
    return;
  }
  for (std::size_t i = 1; i < windows.size(); ++i) {
    windows[0]->absorb(*windows[i], 0, u.channels);
  }
  for (std::int64_t c = 0; c < u.channels; ++c) {
    windows[0]->write_words(c, words + c * word_count);
  }
}

}  // namespace

void moment_sums(const SampleView& x, std::int64_t* words, Executor& executor) {
  const Kernels* kernels = active_kernels();
  const Layout layout = common_layout(x, x);
  if (!vectorizable(kernels, x, layout, nullptr)) {
    reference::moment_sums(x, words, executor);
    return;
  }
  Sums sums;
  sums.u = &x;
  run(*kernels, layout == Layout::kRows, sums, words, executor);
}

void gradient_sums(const SampleView& dy, const SampleView& x, const SampleView* u,
                   std::int64_t* words, const Pullback& pullback, Executor& executor) {
  const Kernels* kernels = active_kernels();
  const Layout layout = u == nullptr ? common_layout(dy, x) : common_layout(dy, x, *u);
  if (!vectorizable(kernels, x, layout, pullback.activation_mask)) {
    reference::gradient_sums(dy, x, u, words, pullback, executor);
    return;
  }
  Sums sums;
  sums.u = &dy;
  sums.v = &x;
  const FloatEnvironment environment;
  PackedConstants packed(x.channels);
  const bool activated = pullback.activation.kind != ActivationKind::kNone;
  if (activated || u != nullptr) {
    sums.out = u;
    sums.pullback = &pullback;
    if (activated && pullback.activation_mask == nullptr) {
      packed.set_affine(pullback.affine, x.channels);
    }
    sums.constants = packed.view();
  }
  run(*kernels, layout == Layout::kRows, sums, words, executor);
}

}  // namespace syncbn::cpu
