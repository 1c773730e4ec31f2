// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"

namespace syncbn::detail {

/// Refers to a group that somebody else owns, and that may be gone.
template <class Group>
class GroupLink {
 public:
  GroupLink() = default;
  explicit GroupLink(Group& group) : group_(&group), life_(group.life_.beginnings_) {}

  /// Null: gone, or none.
  Group* look() const { return life_.expired() ? nullptr : group_; }
  Group& get() const {
    if (life_.expired()) {
      throw InvalidArgument("communicator: got one that is gone, expected the group to outlive what "
                            "was made with it");
    }
    return *group_;
  }
  /// The same for all links of one group and for those of no other, as long as there are any.
  const void* identity() const { return life_.lock().get(); }

 private:
  Group* group_ = nullptr;
  std::weak_ptr<std::uint64_t> life_;
};

}  // namespace syncbn::detail
