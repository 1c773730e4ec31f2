// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/torch/exchange.hpp"
#include "bindings/torch/resolved.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/shared_memory.hpp"

// Groups of processes on one node, for python/syncbn/exchange/host.py. Python holds a
// number for each, and comes back between slices of a wait, so that signals reach it.
namespace syncbn::torch_layer {
namespace {

struct Group {
  std::unique_ptr<SharedMemoryOffer> offer;
  /// What the exchange under way reads and writes; its caller may be interrupted and drop it.
  std::optional<std::pair<Tensor, Tensor>> pending;
  std::unique_ptr<SharedMemoryGroup> group;
  bool left = false;  ///< by this rank, in the middle of an exchange
  std::string error;
};

class Registry {
 public:
  std::int64_t add(std::unique_ptr<SharedMemoryOffer> offer) {
    const std::lock_guard lock(mutex_);
    groups_[++last_] = std::make_shared<Group>(Group{std::move(offer), {}, nullptr, false, ""});
    return last_;
  }
  std::shared_ptr<Group> get(std::int64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(handle);
    if (found == groups_.end()) {
      throw InvalidArgument("handle: got " + std::to_string(handle) +
                            ", expected that of a group of this process");
    }
    return found->second;
  }
  void remove(std::int64_t handle) {
    const std::lock_guard lock(mutex_);
    groups_.erase(handle);
  }

 private:
  std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<Group>> groups_;
  std::int64_t last_ = 0;
};

Registry& registry() {
  static Registry one;
  return one;
}

SharedMemoryGroup& opened(Group& entry) {
  if (entry.group == nullptr) {
    throw InvalidArgument("handle: got a group that is not open, expected one after shm_open");
  }
  return *entry.group;
}

/// Runs part of an exchange; an error becomes a status and a text.
template <class Body>
std::int64_t guarded(Group& entry, const Body& body) {
  std::int64_t status = kLost;
  try {
    status = body() ? kDone : kPending;
  } catch (const ExchangeTimeout& error) {
    entry.error = error.what();
    status = kTimeout;
  } catch (const DivergenceError& error) {
    entry.error = error.what();
    status = kDiverged;
  } catch (const Error& error) {
    entry.error = error.what();
  }
  if (status != kPending) {
    entry.pending.reset();
  }
  return status;
}

void check_bytes(const char* name, const Tensor& tensor, std::int64_t size) {
  if (device_of(name, tensor) != Device::kCpu || tensor.scalar_type() != ScalarType::Byte ||
      !tensor.is_contiguous() || tensor.numel() != size) {
    throw InvalidArgument(std::string(name) + ": expected a contiguous uint8 tensor of " +
                          std::to_string(size) + " entries on the CPU");
  }
  check_storage(name, tensor);
}

std::int64_t shm_offer(Tensor out, std::int64_t rank, std::int64_t size) {
  check_bytes("out", out, SharedMemoryOffer::kBytes);
  auto offer = std::make_unique<SharedMemoryOffer>(ranks_of(rank), ranks_of(size));
  std::memcpy(out.mutable_data_ptr(), offer->bytes().data(), offer->bytes().size());
  return registry().add(std::move(offer));
}

std::chrono::milliseconds milliseconds_of(double timeout) {
  constexpr double kLongest = 1e9;
  if (!(timeout > 0 && timeout <= kLongest)) {
    throw InvalidArgument("timeout: got " + std::to_string(timeout) +
                          ", expected a positive number of seconds, at most 1e9");
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1e3) + 1);
}

std::string shm_open(std::int64_t handle, const Tensor& offers, double timeout) {
  const auto entry = registry().get(handle);
  if (entry->offer == nullptr) {
    throw InvalidArgument("handle: got a group that is open already, expected a new one");
  }
  check_bytes("offers", offers, offers.numel());
  const auto* bytes = static_cast<const std::byte*>(offers.const_data_ptr());
  const auto limit = milliseconds_of(timeout);  // refused before the offer is used
  SharedMemoryGroup::Opened result = SharedMemoryGroup::open(
      std::move(*entry->offer), {bytes, static_cast<std::size_t>(offers.numel())}, limit);
  entry->offer.reset();
  entry->group = std::move(result.group);
  return result.why;
}

/// For good, or with a reason that the others get, after which shm_wait still tells it.
void shm_leave(std::int64_t handle, std::optional<std::string> reason) {
  if (!reason.has_value()) {
    registry().remove(handle);
    return;
  }
  const auto entry = registry().get(handle);
  if (entry->group != nullptr) {
    entry->group->abandon(*reason);
    if (entry->pending.has_value()) {
      entry->pending.reset();
      entry->left = true;
      entry->error = *reason;
    }
  }
}

/// How long that group waits from now on.
void shm_set(std::int64_t handle, double timeout) {
  opened(*registry().get(handle)).set_timeout(milliseconds_of(timeout));
}

void begin_exchange(Group& entry, const Tensor& words, const Tensor& out) {
  if (entry.pending.has_value()) {
    throw InvalidArgument("handle: got a group in the middle of an exchange, expected its end");
  }
  entry.pending.emplace(words, out);
}

/// Whether the exchange is over.
bool wait_for_all(Group& entry, std::int64_t slice) {
  if (!entry.pending.has_value()) {
    return true;
  }
  const auto words = static_cast<std::size_t>(entry.pending->second.numel());
  return opened(entry).parts()->wait(words, std::chrono::milliseconds(slice));
}

std::tuple<Tensor, std::int64_t> shm_sum(const Tensor& words, std::int64_t handle,
                                         std::int64_t slice) {
  const auto entry = registry().get(handle);
  SumInParts& sum = *opened(*entry).parts();
  const auto size = static_cast<std::size_t>(words.numel());
  const std::int64_t* in = int64_data("words", words, words.numel());
  Tensor out = empty(words, words.numel(), ScalarType::Long);
  begin_exchange(*entry, words, out);
  const std::int64_t status = guarded(*entry, [&] {
    sum.open({in, size}, {int64_data("out", out, 0), size});
    sum.publish(size);
    return wait_for_all(*entry, slice);
  });
  return {out, status};
}

/// Waits for the exchange under way, if there is one: its status, and the text of the last error.
std::tuple<std::int64_t, std::string> shm_wait(std::int64_t handle, std::int64_t slice) {
  const auto entry = registry().get(handle);
  const std::int64_t status =
      entry->left ? kLost : guarded(*entry, [&] { return wait_for_all(*entry, slice); });
  return {status, entry->error};
}

/// Notes how far a sum of the group has come.
class Watched final : public SumInParts {
 public:
  explicit Watched(SumInParts& sum) : sum_(sum) {}
  void open(std::span<const std::int64_t> in, std::span<std::int64_t> out) override {
    sum_.open(in, out);
    opened = true;
    words_ = out.size();
  }
  void publish(std::size_t words) override { sum_.publish(words); }
  bool wait(std::size_t words, std::chrono::milliseconds slice) override {
    const bool there = sum_.wait(words, slice);
    complete = complete || (there && words == words_);
    return there;
  }
  bool opened = false;
  bool complete = false;

 private:
  SumInParts& sum_;
  std::size_t words_ = 0;
};

}  // namespace

std::int64_t run_in_group(std::int64_t handle, const Tensor& message, const Tensor& merged,
                          const std::function<Reached(SumInParts&)>& direction) {
  const auto entry = registry().get(handle);
  SharedMemoryGroup& group = opened(*entry);
  Watched sum(*group.parts());
  begin_exchange(*entry, message, merged);
  Reached reached{};
  std::int64_t status = kUnchecked;
  try {
    status = guarded(*entry, [&] {
      reached = direction(sum);
      return reached != Reached::kPublished;
    });
  } catch (const std::bad_alloc& error) {
    entry->pending.reset();
    if (!sum.opened) {
      throw;
    }
    if (!sum.complete) {
      entry->error = error.what();
      group.abandon(entry->error);
      status = kNoMemory;
    }
  }
  return status == kDone && reached != Reached::kOutput ? kUnchecked : status;
}

int ranks_of_group(std::int64_t handle) { return opened(*registry().get(handle)).size(); }

}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY_FRAGMENT(syncbn, m) {
  m.def("shm_offer(Tensor(a!) out, int rank, int size) -> int");
  m.def("shm_open(int handle, Tensor offers, float timeout) -> str");
  m.def("shm_leave(int handle, str? reason=None) -> ()");
  m.def("shm_set(int handle, float timeout) -> ()");
  m.def("shm_sum(Tensor words, int handle, int slice) -> (Tensor, int)");
  m.def("shm_wait(int handle, int slice) -> (int status, str error)");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn::torch_layer;
  m.impl("shm_offer", TORCH_BOX(&shm_offer));
  m.impl("shm_open", TORCH_BOX(&syncbn::torch_layer::shm_open));
  m.impl("shm_sum", TORCH_BOX(&shm_sum));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CompositeExplicitAutograd, m) {
  using namespace syncbn::torch_layer;
  m.impl("shm_leave", TORCH_BOX(&shm_leave));
  m.impl("shm_set", TORCH_BOX(&shm_set));
  m.impl("shm_wait", TORCH_BOX(&shm_wait));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Negative, m) {
  using namespace syncbn::torch_layer;
  m.impl("shm_offer", TORCH_BOX(&OnlyResolved<&shm_offer>::call));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, Conjugate, m) {
  using namespace syncbn::torch_layer;
  m.impl("shm_offer", TORCH_BOX(&OnlyResolved<&shm_offer>::call));
}
