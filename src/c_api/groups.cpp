// SPDX-License-Identifier: Apache-2.0
#include "c_api/groups.hpp"

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "c_api/arguments.hpp"
#include "syncbn/shared_memory.hpp"

// Groups of the C++ interface as functions that C can call, and the other way round.
namespace syncbn::c_api {
namespace {

Communicator& of(void* user_data) { return *static_cast<Communicator*>(user_data); }

std::int32_t sum(void* user_data, std::int64_t* words, std::int64_t count) {
  return guarded([&] { of(user_data).all_reduce_sum({words, static_cast<std::size_t>(count)}); });
}

void leave(void* user_data, const char* reason) {
  guarded([&] { of(user_data).abandon(reason == nullptr ? "" : reason); });
}

/// A group whose exchanges are the caller's functions.
class Callbacks final : public Communicator {
 public:
  explicit Callbacks(const syncbn_communicator& given) : given_(given) {
    if (given_.size < 1 || given_.size > kMaxRanks) {
      syncbn::refuse("communicator.size", std::to_string(given_.size), "1 to 2048");
    }
    if (given_.rank < 0 || given_.rank >= given_.size) {
      syncbn::refuse("communicator.rank", std::to_string(given_.rank), "0 to size - 1");
    }
    if (given_.all_reduce_sum == nullptr) {
      syncbn::refuse("communicator.all_reduce_sum", "NULL", "a function");
    }
  }
  int rank() const override { return given_.rank; }
  int size() const override { return given_.size; }

  void all_reduce_sum(std::span<std::int64_t> words) override {
    raise_unless_ok("communicator.all_reduce_sum", [&] {
      return given_.all_reduce_sum(given_.user_data, words.data(),
                                   static_cast<std::int64_t>(words.size()));
    });
  }
  void abandon(const std::string& reason) override {
    if (given_.abandon != nullptr) {
      given_.abandon(given_.user_data, reason.c_str());
    }
  }
  void reset() {
    if (given_.reset != nullptr) {
      raise_unless_ok("communicator.reset", [&] { return given_.reset(given_.user_data); });
    }
    begin_again();
  }

 private:
  const syncbn_communicator given_;
};

std::int32_t sum_of_one(void*, std::int64_t*, std::int64_t) { return SYNCBN_STATUS_OK; }

syncbn_communicator functions_of(Communicator& communicator) {
  return {sizeof(syncbn_communicator),
          &communicator,
          communicator.rank(),
          communicator.size(),
          sum,
          leave,
          nullptr};
}

std::shared_ptr<Callbacks> callbacks_of(const syncbn_communicator& functions) {
  try {
    return std::make_shared<Callbacks>(functions);
  } catch (const InvalidArgument& error) {
    if (functions.abandon != nullptr) {  // the others would wait for a layer that is not there
      functions.abandon(functions.user_data, error.what());
    }
    throw;
  }
}

}  // namespace

std::shared_ptr<Communicator> communicator_of(const syncbn_communicator* given) {
  const syncbn_communicator& functions = sized("communicator", given);
  if (functions.all_reduce_sum == sum && functions.abandon == leave) {
    Communicator& own = of(functions.user_data);
    if (functions.rank != own.rank() || functions.size != own.size()) {
      const auto text = [](int rank, int size) {
        return "rank " + std::to_string(rank) + " of " + std::to_string(size);
      };
      const std::string reason = "communicator: got " + text(functions.rank, functions.size) +
                                 ", expected " + text(own.rank(), own.size()) +
                                 ", as syncbn_group_rank gives it";
      own.refuse(reason);
      throw InvalidArgument(reason);
    }
    return {std::shared_ptr<void>(), &own};
  }
  return callbacks_of(functions);
}

syncbn_group* group_of(std::shared_ptr<Communicator> communicator, std::function<void()> reset) {
  auto group = std::make_unique<syncbn_group>();
  group->ends.push_back(functions_of(*communicator));
  group->owner = std::move(communicator);
  group->reset = std::move(reset);
  return group.release();
}

}  // namespace syncbn::c_api

// What follows is C.
using namespace syncbn;
using namespace syncbn::c_api;

syncbn_status syncbn_thread_group_create(int32_t size, int64_t timeout, syncbn_group** group) {
  return guarded([&] {
    syncbn_group*& out = required("group", group);
    const auto threads = std::make_shared<ThreadGroup>(size, std::chrono::milliseconds(timeout));
    auto made = std::make_unique<syncbn_group>();
    for (int r = 0; r < size; ++r) {
      made->ends.push_back(functions_of(threads->rank(r)));
    }
    made->owner = threads;
    made->reset = [group = threads.get()] { group->reset(); };
    out = made.release();
  });
}

syncbn_status syncbn_shared_memory_group_create(int32_t rank, int32_t size, syncbn_gather gather,
                                                void* user_data, int64_t timeout,
                                                syncbn_group** group) {
  return guarded([&] {
    syncbn_group*& out = required("group", group);
    if (gather == nullptr) {
      refuse("gather", "NULL", "a function");
    }
    const auto by_caller = [=](std::span<const std::byte> mine, std::span<std::byte> all) {
      raise_unless_ok("gather", [&] {
        return gather(user_data, mine.data(), static_cast<int64_t>(mine.size()), all.data());
      });
    };
    auto opened =
        SharedMemoryGroup::create(rank, size, by_caller, std::chrono::milliseconds(timeout));
    if (opened.group == nullptr) {
      throw Unavailable(opened.why);
    }
    SharedMemoryGroup* const made = opened.group.get();
    out = group_of(std::move(opened.group), [=] { made->reset(by_caller); });
  });
}

syncbn_status syncbn_group_create(const syncbn_communicator* functions, syncbn_group** group) {
  return guarded([&] {
    const auto made = callbacks_of(sized("functions", functions));
    required("group", group) = group_of(made, [group = made.get()] { group->reset(); });
  });
}

syncbn_status syncbn_group_reset(syncbn_group* group) {
  return guarded([&] { required("group", group).reset(); });
}

void syncbn_group_destroy(syncbn_group* group) { delete group; }

const syncbn_communicator* syncbn_self_communicator(void) {
  static constexpr syncbn_communicator kSelf = {
      sizeof(syncbn_communicator), nullptr, 0, 1, sum_of_one, nullptr, nullptr};
  return &kSelf;
}

const syncbn_communicator* syncbn_group_rank(const syncbn_group* group, int32_t rank) {
  if (group != nullptr) {
    for (const syncbn_communicator& end : group->ends) {
      if (end.rank == rank) {
        return &end;
      }
    }
  }
  return nullptr;
}
