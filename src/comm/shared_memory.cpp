#include "syncbn/shared_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checks.hpp"
#include "comm/rank_texts.hpp"
#include "comm/shared_barrier.hpp"
#include "comm/shared_segment.hpp"
#include "syncbn/error.hpp"

// An exchange is a row of barriers, one for each piece of the message. No rank waits for another
// after the last one, so that an exchange succeeds, like a barrier, for all ranks or for none.
namespace syncbn {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kPieceWords = kPieceBytes / sizeof(std::uint64_t);
/// From this length on, three and more ranks sum a stripe each and then copy the stripes of the
/// others, which costs one barrier more; below, every rank sums everything.
constexpr std::size_t kStripedBytes = std::size_t{32} << 10;

void add_words(std::uint64_t* __restrict to, const std::uint64_t* __restrict from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    to[i] += from[i];
  }
}

void copy_bytes(void* to, const void* from, std::size_t n) {
  if (n > 0) {  // memcpy refuses null even then
    std::memcpy(to, from, n);
  }
}

}  // namespace

struct __attribute__((visibility("hidden"))) SharedMemoryOffer::Resources : LocalOffer {};

struct __attribute__((visibility("hidden"))) SharedMemoryGroup::State {
  void begin(ExchangeKind its_kind, const void* from, void* to, std::size_t length);
  bool finish(milliseconds slice);

  std::uint64_t* words(std::size_t rank, std::uint64_t number) const {
    return reinterpret_cast<std::uint64_t*>(barrier.slot(rank, number));
  }
  std::uint64_t* stripe(std::size_t rank, std::uint64_t number) const {
    return words(rank, number) + kPieceWords;
  }
  std::size_t piece_bytes(std::size_t piece) const {
    return std::min(bytes - piece * kPieceBytes, kPieceBytes);
  }
  void fill_slot(std::size_t piece) const {
    copy_bytes(barrier.slot(barrier.rank(), barrier.number() + 1), in + piece * kPieceBytes,
               piece_bytes(piece));
  }
  void check_messages() const;
  void advance();
  void add_piece() const;
  void sum_stripe() const;
  void collect_stripes() const;
  void copy_pieces() const;

  SharedBarrier barrier;
  Descriptor memory_file;  ///< on rank 0, until all ranks have mapped it
  // The exchange under way.
  bool under_way = false;
  ExchangeKind kind = ExchangeKind::kSum;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::size_t bytes = 0;
  std::size_t pieces = 0;
  std::size_t step = 0;  ///< how many of its barriers are done
  bool striped = false;
};

void SharedMemoryGroup::State::begin(ExchangeKind its_kind, const void* from, void* to,
                                     std::size_t length) {
  barrier.check_usable();
  if (under_way) {
    throw Error(rank_of(static_cast<int>(barrier.rank()), barrier.size()) +
                "an exchange is under way already");
  }
  kind = its_kind;
  in = static_cast<const std::byte*>(from);
  out = static_cast<std::byte*>(to);
  bytes = length;
  pieces = std::max<std::size_t>((bytes + kPieceBytes - 1) / kPieceBytes, 1);
  step = 0;
  striped = kind == ExchangeKind::kSum && barrier.size() > 2 && bytes >= kStripedBytes;
  fill_slot(0);
  barrier.area(barrier.rank()).message[(barrier.number() + 1) % 2] = {bytes, kind};
  under_way = true;
  barrier.arrive();
}

bool SharedMemoryGroup::State::finish(milliseconds slice) {
  const auto begin = std::chrono::steady_clock::now();
  milliseconds spent(0);
  try {
    while (under_way) {
      if (!barrier.wait(slice - spent)) {
        return false;
      }
      memory_file.reset();
      advance();
      // Of the next barrier; not another look at the clock, which counts in short exchanges.
      spent = std::chrono::duration_cast<milliseconds>(barrier.arrived_at() - begin);
    }
  } catch (...) {
    under_way = false;
    throw;
  }
  return true;
}

void SharedMemoryGroup::State::check_messages() const {
  for (std::size_t r = 0; r < barrier.size(); ++r) {
    const auto& other = barrier.area(r).message[barrier.number() % 2];
    if (other.bytes != bytes || other.kind != kind) {
      // Every rank sees the same, so every rank throws.
      throw DivergenceError(divergence_text(static_cast<int>(barrier.rank()), barrier.size(), bytes,
                                            static_cast<int>(r), other.bytes, other.kind != kind));
    }
  }
}

/// After a barrier: reads the others' slots, fills the next one and arrives, or is done.
void SharedMemoryGroup::State::advance() {
  if (step == 0) {
    check_messages();
  }
  if (kind == ExchangeKind::kGather) {
    copy_pieces();
  } else if (!striped) {
    add_piece();
  } else {
    if (step > 0) {
      collect_stripes();
    }
    if (step < pieces) {
      sum_stripe();
    }
  }
  ++step;
  under_way = step < pieces + (striped ? 1 : 0);
  if (step < pieces) {
    fill_slot(step);
  }
  if (under_way) {
    barrier.arrive();
  }
}

void SharedMemoryGroup::State::add_piece() const {
  auto* to = reinterpret_cast<std::uint64_t*>(out + step * kPieceBytes);
  for (std::size_t r = 0; r < barrier.size(); ++r) {
    if (r != barrier.rank()) {
      add_words(to, words(r, barrier.number()), piece_bytes(step) / sizeof(*to));
    }
  }
}

/// This rank's share of the piece, for the next barrier.
void SharedMemoryGroup::State::sum_stripe() const {
  const std::size_t n = piece_bytes(step) / sizeof(std::uint64_t);
  const std::size_t begin = n * barrier.rank() / barrier.size();
  const std::size_t length = n * (barrier.rank() + 1) / barrier.size() - begin;
  std::uint64_t* to = stripe(barrier.rank(), barrier.number() + 1);
  copy_bytes(to, words(0, barrier.number()) + begin, length * sizeof(*to));
  for (std::size_t r = 1; r < barrier.size(); ++r) {
    add_words(to, words(r, barrier.number()) + begin, length);
  }
}

/// The piece before, of which every rank has summed its share.
void SharedMemoryGroup::State::collect_stripes() const {
  auto* to = reinterpret_cast<std::uint64_t*>(out + (step - 1) * kPieceBytes);
  const std::size_t n = piece_bytes(step - 1) / sizeof(*to);
  for (std::size_t r = 0; r < barrier.size(); ++r) {
    const std::size_t begin = n * r / barrier.size();
    const std::size_t length = n * (r + 1) / barrier.size() - begin;
    copy_bytes(to + begin, stripe(r, barrier.number()), length * sizeof(*to));
  }
}

void SharedMemoryGroup::State::copy_pieces() const {
  for (std::size_t r = 0; r < barrier.size(); ++r) {
    copy_bytes(out + r * bytes + step * kPieceBytes, barrier.slot(r, barrier.number()),
               piece_bytes(step));
  }
}

SharedMemoryOffer::SharedMemoryOffer(int rank, int size) {
  check_ranks(size);
  if (rank < 0 || rank >= size) {
    throw InvalidArgument("rank: got " + std::to_string(rank) + ", expected 0 to " +
                          std::to_string(size - 1));
  }
  resources_ = std::make_unique<Resources>();
  make_offer(rank, size, SharedBarrier::memory_bytes(size), *resources_);
  std::memcpy(bytes_.data(), &resources_->content, sizeof(OfferContent));
}

SharedMemoryOffer::~SharedMemoryOffer() = default;
SharedMemoryOffer::SharedMemoryOffer(SharedMemoryOffer&&) noexcept = default;

SharedMemoryGroup::Opened SharedMemoryGroup::open(SharedMemoryOffer offer,
                                                  std::span<const std::byte> offers,
                                                  milliseconds timeout) {
  constexpr std::size_t kEach = SharedMemoryOffer::kBytes;
  if (offer.resources_ == nullptr) {
    throw InvalidArgument("offer: got one that was used, expected a fresh one");
  }
  LocalOffer& mine = *offer.resources_;
  const auto size = static_cast<std::size_t>(mine.content.size);
  const auto rank = static_cast<std::size_t>(mine.content.rank);
  if (mine.content.process != getpid()) {
    throw InvalidArgument("offer: got that of process " + std::to_string(mine.content.process) +
                          ", expected this process's, " + std::to_string(getpid()));
  }
  check_timeout(timeout);
  if (offers.size() != size * kEach) {
    throw InvalidArgument("offers: got " + std::to_string(offers.size()) + " bytes, expected " +
                          std::to_string(size * kEach));
  }
  if (std::memcmp(offers.data() + rank * kEach, offer.bytes_.data(), kEach) != 0) {
    throw InvalidArgument("offers: got other bytes at place " + std::to_string(rank) +
                          ", expected this rank's offer");
  }
  std::vector<OfferContent> contents(size);
  for (std::size_t r = 0; r < size; ++r) {
    std::memcpy(&contents[r], offers.data() + r * kEach, sizeof(OfferContent));
  }
  Segment segment = open_segment(mine, contents, SharedBarrier::memory_bytes(mine.content.size));
  if (!segment.why.empty()) {
    return {nullptr, std::move(segment.why)};
  }
  std::unique_ptr<State> state(
      new State{SharedBarrier(std::move(segment), mine.content.rank, mine.content.size, timeout),
                std::move(mine.memory_file)});
  return {std::unique_ptr<SharedMemoryGroup>(new SharedMemoryGroup(std::move(state))), ""};
}

SharedMemoryGroup::SharedMemoryGroup(std::unique_ptr<State> state) : state_(std::move(state)) {}

SharedMemoryGroup::~SharedMemoryGroup() {
  if (state_->barrier.in_own_process()) {
    state_->barrier.abandon("its end of the group was destroyed");
  }
}

int SharedMemoryGroup::rank() const { return static_cast<int>(state_->barrier.rank()); }
int SharedMemoryGroup::size() const { return static_cast<int>(state_->barrier.size()); }

void SharedMemoryGroup::begin_all_reduce_sum(std::span<std::int64_t> words) {
  state_->begin(ExchangeKind::kSum, words.data(), words.data(), words.size_bytes());
}

void SharedMemoryGroup::begin_all_gather(std::span<const std::byte> in, std::span<std::byte> out) {
  const std::size_t expected = in.size() * state_->barrier.size();
  if (out.size() != expected) {
    const std::string reason = gather_size_text(out.size(), expected);
    abandon(reason);
    throw InvalidArgument(reason);
  }
  state_->begin(ExchangeKind::kGather, in.data(), out.data(), in.size());
}

bool SharedMemoryGroup::finish(milliseconds slice) {
  state_->barrier.check_process();
  return state_->finish(slice);
}

void SharedMemoryGroup::all_reduce_sum(std::span<std::int64_t> words) {
  begin_all_reduce_sum(words);
  while (!state_->finish(kDefaultTimeout)) {
  }
}

void SharedMemoryGroup::all_gather(std::span<const std::byte> in, std::span<std::byte> out) {
  begin_all_gather(in, out);
  while (!state_->finish(kDefaultTimeout)) {
  }
}

void SharedMemoryGroup::set_timeout(milliseconds timeout) {
  check_timeout(timeout);
  state_->barrier.set_timeout(timeout);
}

void SharedMemoryGroup::abandon(const std::string& reason) {
  state_->barrier.abandon(reason);
  state_->under_way = false;
}

}  // namespace syncbn
