// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "syncbn/shared_memory.hpp"

// Memory without a name that the processes of one node share, and how they find it and each other.
namespace syncbn {

/// A file descriptor that is closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  int get() const { return number_; }
  void reset();

 private:
  int number_ = -1;
};

/// A shared mapping, which forked children do not get.
class Mapping {
 public:
  Mapping() = default;
  /// On failure empty, with errno set.
  Mapping(int descriptor, std::size_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)),
        bytes_(other.bytes_),
        owner_(other.owner_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(owner_, other.owner_);
    return *this;
  }
  std::byte* data() const { return address_; }

 private:
  std::byte* address_ = nullptr;
  std::size_t bytes_ = 0;
  pid_t owner_ = 0;  ///< the process that has the mapping
};

/// The bytes of an offer. Ranks with another layout of these or of the memory have another
/// `format`.
struct OfferContent {
  static constexpr std::uint64_t kFormat = 0x73796e63626e0001u;

  std::uint64_t format = kFormat;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t process = 0;
  std::uint64_t start_time = 0;     ///< of the process, since its number may be used again
  std::uint64_t pid_namespace = 0;  ///< in which the number counts
  std::uint64_t memory_bytes = 0;
  std::int64_t descriptor = -1;       ///< rank 0: of the memory
  std::array<std::byte, 16> nonce{};  ///< rank 0: what the memory begins with
  std::array<char, 40> boot_id{};     ///< tells nodes apart
  std::array<char, 128> failure{};    ///< what the system refused, or empty
};
static_assert(sizeof(OfferContent) <= SharedMemoryOffer::kBytes);

/// An offer and what its rank holds for it.
struct LocalOffer {
  OfferContent content;
  Descriptor memory_file;  ///< rank 0: open until all ranks have mapped it
  Mapping memory;          ///< rank 0
};

/// A rank in another process; `alive` becomes readable when that process ends.
struct Peer {
  int rank;
  pid_t process;
  Descriptor alive;
};

/// Describes this process; on rank 0 also makes `bytes` bytes of zeros that begin with the nonce.
/// Failures are written to the content.
void make_offer(int rank, int size, std::size_t bytes, LocalOffer& out);

/// What all ranks' offers lead to, or `why` they cannot exchange.
struct Segment {
  Mapping memory;
  std::vector<Peer> peers;
  std::string why;
};

/// bytes: as for make_offer.
Segment open_segment(LocalOffer& mine, const std::vector<OfferContent>& offers, std::size_t bytes);

}  // namespace syncbn
