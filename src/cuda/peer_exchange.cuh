// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/running.cuh"
#include "cuda/warp_finalize.cuh"
#include "cuda/wire_form.cuh"
#include "statistics/header.hpp"
#include "syncbn/cuda_peers.hpp"

// How blocks of several devices exchange a message. Block b of a rank meets the blocks b of the
// others: it has a share of the channels, which it sends in one or more rounds, each with the
// header in front of it and an epoch of its own. A rank's memory has, for each of its blocks, a
// flag for each sender, and behind the abort word two slots for each sender, which epochs take in
// turn.
//
// Nobody confirms. A block sends its flag of an epoch when all its threads have read the payloads
// of the one before, and waits for all flags of an epoch before it sends in the next one; so nobody
// writes to a slot that a peer still reads (tests/model/ptx_protocols.py).
namespace syncbn::cuda {

constexpr unsigned kExchangeThreads = 256;
constexpr unsigned kExchangeWarps = kExchangeThreads / device::kWarp;

/// In front of a block's channels: what tells the messages' lengths apart, and the header.
constexpr std::int64_t kFrontWords = 1 + kHeaderWords;

/// Words of PeerGroup::state behind the blocks' epochs.
constexpr int kDone = kMostExchangeBlocks;  ///< blocks that are done, and below those that failed
constexpr int kRetired = kDone + 1;         ///< an exchange has failed
constexpr std::int64_t kNotWhole = std::int64_t{1} << 16;
constexpr std::int64_t kNotMet = std::int64_t{1} << 32;

/// Channels that a warp takes at a time, and shared memory: a word for each peer and one for the
/// hand-over, then the words of these channels, summed and, in backward, this rank's own.
template <class T>
inline constexpr unsigned kStagedChannels = sizeof(T) == 8 ? 3 : 12;
template <class T>
inline constexpr unsigned kStagedWords = kStagedChannels<T> * FormatTraits<T>::kWords;
constexpr unsigned kHandOver = kMostPeers;
constexpr unsigned kStagedBegin = kMostPeers + 1;
template <class T>
inline constexpr std::size_t kExchangeBytes =
    (kStagedBegin + 2 * kExchangeWarps * kStagedWords<T>)*sizeof(std::int64_t);
static_assert(kExchangeBytes<double> <= (32 << 10) && kExchangeBytes<float> <= (32 << 10));
static_assert(kLeastSlotWords >= kFrontWords + WireForm<double>::kPlace);

SYNCBN_DEVICE std::int64_t* flag_of(const PeerGroup& group, unsigned owner, unsigned sender) {
  return group.memory[owner] + device::block_index() * kMostPeers + sender;
}
SYNCBN_DEVICE std::int64_t* slot_of(const PeerGroup& group, unsigned owner, unsigned sender,
                                    std::int64_t epoch) {
  const std::int64_t number = (epoch % 2 * group.ranks + sender) * group.blocks;
  return group.memory[owner] + kSlotsBegin + (number + device::block_index()) * group.slot_words;
}

/// By the thread that waits for that peer: whether it comes.
SYNCBN_DEVICE bool wait_for(const PeerGroup& group, unsigned peer, std::int64_t epoch) {
  const auto rank = static_cast<unsigned>(group.rank);
  const std::int64_t self = group.rank + 1;
  std::int64_t* const gave_up = group.memory[rank] + kAbortWord;
  const std::int64_t* const flag = flag_of(group, rank, peer);
  const std::int64_t begin = device::nanoseconds();
  std::int64_t who = 0;
  while ((who = device::load_system(gave_up)) == 0) {
    if (device::load_acquire_system(flag) >= epoch) {
      return true;
    }
    if (device::nanoseconds() - begin >= group.timeout) {
      for (int other = 0; other < group.ranks; ++other) {
        device::store_system(group.memory[other] + kAbortWord, self);
      }
      who = self;
      break;
    }
  }
  // If this rank has, other threads may have waited for other peers.
  if (who == self && device::load_system(flag) < epoch) {
    device::store_system(group.mark + kMarkMissing + peer, epoch);
  }
  device::store_system(group.mark + kMarkGaveUp, who);
  return false;
}

/// What a block knows of an exchange.
struct Exchanged {
  bool met = false;     ///< all ranks came
  bool usable = false;  ///< and made the same call
  std::int64_t count = 0;
  std::int64_t fingerprint = 0;
  std::int64_t epoch = 0;
};

/// Looks at the headers of all ranks.
SYNCBN_DEVICE void verify(const PeerGroup& group, const std::int64_t* message, std::int64_t length,
                          Exchanged& out) {
  std::int64_t sum[kHeaderFlags + 1];
  for (int i = 0; i <= kHeaderFlags; ++i) {
    sum[i] = message[i];
  }
  bool alike = true;
  for (int peer = 0; peer < group.ranks; ++peer) {
    if (peer != group.rank) {
      const std::int64_t* const slot =
          slot_of(group, static_cast<unsigned>(group.rank), static_cast<unsigned>(peer), out.epoch);
      alike = alike && device::load_peer(slot) == length;
      for (int i = 0; i <= kHeaderFlags; ++i) {
        sum[i] += device::load_peer(slot + 1 + i);
      }
    }
  }
  const MessageInfo header = header_info(sum, group.ranks);
  out.usable = alike && usable(header);
  out.count = header.count;
  out.fingerprint = sum[kHeaderFingerprint] / group.ranks;
}

/// Sends the block's share of the message and calls, for channels of the sum, body(channel, its
/// words, this rank's own words, count, whether it writes) with whole warps (kChannelThreads<T> for
/// each channel). kOwn: own words are wanted.
template <class T, bool kOwn, class Body>
SYNCBN_DEVICE Exchanged exchange_channels(const PeerGroup& group, const std::int64_t* message,
                                          std::int64_t channels, const Body& body) {
  using Form = WireForm<T>;
  constexpr int kWords = FormatTraits<T>::kWords;
  constexpr unsigned kOfWarp = device::kWarp / kChannelThreads<T>;
  const unsigned thread = device::thread_index();
  const unsigned lane = thread % device::kWarp;
  const unsigned warp = thread / device::kWarp;
  const auto rank = static_cast<unsigned>(group.rank);
  const auto ranks = static_cast<unsigned>(group.ranks);
  const std::int64_t* const words = message + kHeaderWords;
  const std::int64_t length = channels * 128 + kWords;
  static_assert(kWords < 128);
  const std::int64_t share = divide_up(channels, group.blocks);
  const std::int64_t begin = device::block_index() * share;
  const std::int64_t end = begin + share < channels ? begin + share : channels;
  const std::int64_t most = (group.slot_words - kFrontWords) / Form::kPlace;
  auto* const came = device::shared<std::int64_t>();
  std::int64_t* const sums = came + kStagedBegin + 2 * warp * kStagedWords<T>;
  std::int64_t* const own = sums + kStagedWords<T>;

  Exchanged out;
  out.epoch = group.state[device::block_index()];
  out.met = group.state[kRetired] == 0;
  std::int64_t c0 = begin;
  do {
    if (!out.met) {
      break;
    }
    ++out.epoch;
    const std::int64_t left = c0 < end ? end - c0 : 0;
    const std::int64_t count = left < most ? left : most;
    // All warps have something to do, and a warp's channels come in whole steps of the loop below.
    const std::int64_t even = divide_up(divide_up(count, kExchangeWarps), kOfWarp) * kOfWarp;
    const std::int64_t at_once = even < kStagedChannels<T> ? even : kStagedChannels<T>;
    const auto send = [&](std::int64_t at, std::int64_t word) {
      for (unsigned peer = 0; peer < ranks; ++peer) {
        if (peer != rank) {
          device::store_peer(slot_of(group, peer, rank, out.epoch) + at, word);
        }
      }
    };
    if (thread < kFrontWords) {
      send(thread, thread == 0 ? length : message[thread - 1]);
    }
    // each(first channel of the round, channels), with their words in shared memory.
    const auto by_warps = [&](const auto& each) {
      for (std::int64_t first = warp * at_once; first < count; first += kExchangeWarps * at_once) {
        const std::int64_t here = count - first < at_once ? count - first : at_once;
        const std::int64_t* const from = words + (c0 + first) * kWords;
        for (std::int64_t i = lane; i < here * kWords; i += device::kWarp) {
          sums[i] = from[i];
          if constexpr (kOwn) {
            own[i] = from[i];
          }
        }
        device::warp_barrier();  // the words are staged
        each(first, here);
        device::warp_barrier();  // and read
      }
    };
    by_warps([&](std::int64_t first, std::int64_t here) {
      Form::write(sums, own, here, [&](std::int64_t at, std::int64_t word) {
        send(kFrontWords + first * Form::kPlace + at, word);
      });
    });
    device::block_barrier();  // the payload is there, and all have read the last one
    if (thread < ranks) {
      bool here = true;
      if (thread != rank) {
        device::store_release_system(flag_of(group, thread, rank), out.epoch);
        here = wait_for(group, thread, out.epoch);
      }
      came[thread] = here ? 1 : 0;
    }
    device::block_barrier();  // so are those of the peers that came
    for (unsigned peer = 0; peer < ranks; ++peer) {
      out.met = out.met && came[peer] != 0;
    }
    if (!out.met) {
      break;
    }
    verify(group, message, length, out);
    if (!out.usable) {  // on all ranks alike
      break;
    }
    by_warps([&](std::int64_t first, std::int64_t here) {
      Form::add(sums, here, group.ranks, group.rank, [&](int peer) {
        return slot_of(group, rank, static_cast<unsigned>(peer), out.epoch) + kFrontWords +
               first * Form::kPlace;
      });
      for (std::int64_t step = 0; step < here; step += kOfWarp) {
        const std::int64_t k = step + lane / kChannelThreads<T>;
        const std::int64_t used = k < here ? k : here - 1;
        if (kChannelThreads<T> > 1 || k < here) {
          body(c0 + first + used, sums + used * kWords, own + used * kWords, out.count,
               k < here && lane % kChannelThreads<T> == 0);
        }
      }
    });
    c0 += count;
  } while (c0 < end);
  return out;
}

/// Whether this is the last block to be done; then `out` is what all blocks have come to.
SYNCBN_DEVICE bool last_to_finish(const PeerGroup& group, Exchanged& out) {
  auto* const handed = device::shared<std::int64_t>() + kHandOver;
  device::block_barrier();  // the block's results are written
  if (device::thread_index() == 0) {
    group.state[device::block_index()] = out.epoch;
    const std::int64_t mine = 1 + (out.usable ? 0 : kNotWhole) + (out.met ? 0 : kNotMet);
    *handed = device::atomic_hand_over(group.state + kDone, mine) + mine;
  }
  device::block_barrier();  // the count is there
  const std::int64_t all = *handed;
  if (all % kNotWhole != group.blocks) {
    return false;
  }
  out.met = all < kNotMet;
  out.usable = all < kNotWhole;
  if (device::thread_index() == 0) {
    group.state[kDone] = 0;
    if (!out.met) {
      group.state[kRetired] = 1;
    }
  }
  return true;
}

}  // namespace syncbn::cuda
