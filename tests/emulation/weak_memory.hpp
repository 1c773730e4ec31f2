// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <unordered_map>
#include <vector>

#include "order.hpp"
#include "random.hpp"

// Global memory as weak as PTX's model allows, for programs without load buffering: a machine with
// views, as those of Kang et al. 2017 ("A promising semantics for relaxed-memory concurrency").
//
// Every 8 bytes that the grid writes have a history of values, in the order in which they take
// effect. A thread has a view: which writes it knows. A load may return any value of the history
// from the newest that the thread knows or has read on, so what it gets may be stale, as from a
// cache that nobody keeps coherent. Knowledge spreads
// - from a write to who reads it with an acquire, or with a strong load or an atomic and a fence
//   later, if the writer had a fence before it or released: all that the writer knew at that fence,
//   so fences publish what others wrote, too (cumulativity);
// - between fence.sc (membar is one), in the order in which they execute;
// - at a barrier, between the threads that meet there.
// Between two devices a write and a read do so only if both have the scope of the system.
// Plain and relaxed stores, and atomics whose result nobody takes, may take effect later: until a
// thread that knows of them has a fence, or accesses the same bytes. Other atomics act at once on
// the newest value. A plain access that meets a write it does not know of is a race, which the
// caller may refuse.
namespace syncbn::emulation {

using testing::Random;

/// Some writes of one thread, between two points at which knowledge leaves it.
using Epoch = std::uint32_t;

class View {
 public:
  bool knows(Epoch epoch) const;
  void add(Epoch epoch);
  void join(const View& other);

 private:
  void fold();
  std::shared_ptr<const std::vector<std::uint64_t>> many_;  ///< a bit for each epoch
  std::array<Epoch, 12> few_;                               ///< others, so many:
  std::size_t count_ = 0;
};
using SharedView = std::shared_ptr<const View>;

/// What memory has to know of a thread.
struct Observer {
  std::uint64_t thread = 0;  ///< numbers that no other thread, block or device has
  std::uint64_t block = 0;
  std::uint64_t device = 0;
  View current;
  View seen;                               ///< through strong reads; part of the view after a fence
  View seen_in_block;                      ///< the same of writes by the thread's own block
  SharedView released, released_in_block;  ///< what its strong writes publish
  Epoch writing = 0;
  std::unordered_map<std::uintptr_t, std::uint64_t> last_read;  ///< sequence numbers
};

/// The new value from the old one.
using Update = std::uint64_t (*)(std::uint64_t old, std::uint64_t operand);

class WeakMemory {
 public:
  explicit WeakMemory(std::uint64_t seed) : random_(seed) {}
  /// At most 8 bytes, aligned to their size. True: a race.
  bool read(Observer& who, std::uintptr_t address, std::size_t bytes, const Order& order,
            std::uint64_t* value);
  bool write(Observer& who, std::uintptr_t address, std::size_t bytes, const Order& order,
             std::uint64_t value);
  bool update(Observer& who, std::uintptr_t address, std::size_t bytes, const Order& order,
              Update update, std::uint64_t operand, bool wanted, std::uint64_t* before);
  void fence(Observer& who, const Order& order);
  /// All of them meet.
  static void barrier(const std::vector<Observer*>& all);
  /// Something else runs: some writes take effect.
  void pause();
  /// The grid's end: all do.
  void settle();

 private:
  struct Message {
    Epoch epoch = 0;
    std::uint64_t thread = 0, block = 0, device = 0;
    std::uint64_t sequence = 0;
    std::uint64_t value = 0;    ///< of all 8 bytes, after the write
    std::uint8_t bytes = 0xff;  ///< those that it wrote
    bool strong = false, system = false;
    SharedView released, released_in_block;
  };
  using History = std::pmr::vector<Message>;
  struct Pending {
    std::uintptr_t address = 0;
    std::size_t bytes = 0;
    Update update = nullptr;
    std::uint64_t operand = 0;
    Message message;
  };

  static bool knows(const Observer& who, const Message& message);
  /// The last write to any of these bytes.
  static const Message& newest(const History& history, std::uint8_t bytes);
  void settle_known(const Observer& who, std::uintptr_t granule);
  void take_effect(Pending one);
  Message message_of(Observer& who, const Order& order);
  static void observe(Observer& who, const Message& message, const Order& order);
  History* find(std::uintptr_t address);

  Random random_;
  Epoch last_epoch_ = 0;
  std::uint64_t sequence_ = 0;
  std::pmr::monotonic_buffer_resource memory_;  ///< of histories, which are many and small
  std::pmr::unordered_map<std::uintptr_t, History> histories_{&memory_};
  std::vector<std::uint8_t> touched_ = std::vector<std::uint8_t>(1 << 16);  ///< a filter
  std::vector<Pending> pending_;
  View sequential_;  ///< what fence.sc have published
};

}  // namespace syncbn::emulation
