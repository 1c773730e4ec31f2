// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(std::span<std::int64_t>) override {}
  void abandon(const std::string&) override {}
};

}  // namespace

Communicator& self_communicator() {
  static auto* const kSelf = new SelfCommunicator;  // also for layers that end after main
  return *kSelf;
}

}  // namespace syncbn
