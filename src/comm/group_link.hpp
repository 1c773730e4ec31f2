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
  explicit GroupLink(Group& group)
      : group_(&group),
        beginnings_(group.life_.beginnings_.get()),
        life_(group.life_.beginnings_) {}

  /// Null: gone, or none.
  Group* look() const { return life_.expired() ? nullptr : group_; }
  Group& get() const {
    if (life_.expired()) {
      throw InvalidArgument(
          "communicator: got one that is gone, expected the group to outlive what was made with "
          "it");
    }
    return *group_;
  }
  /// How often the group has begun again; 0 without one.
  std::uint64_t beginnings() const { return life_.expired() ? 0 : *beginnings_; }
  /// The same for all links of one group and for those of no other, as long as there are any.
  const void* identity() const { return life_.lock().get(); }

 private:
  Group* group_ = nullptr;
  const std::uint64_t* beginnings_ = nullptr;
  std::weak_ptr<std::uint64_t> life_;
};

}  // namespace syncbn::detail
