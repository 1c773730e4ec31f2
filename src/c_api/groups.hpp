// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "syncbn/c_api.h"
#include "syncbn/communicator.hpp"

/// A group of the library's as C has it: the ends of those ranks that this process holds.
struct syncbn_group {
  std::shared_ptr<void> owner;  ///< of the communicators
  std::vector<syncbn_communicator> ends;
  std::function<void()> reset;
};

namespace syncbn::c_api {

/// The communicator behind the functions of a group of the library's; else one that calls them.
std::shared_ptr<Communicator> communicator_of(const syncbn_communicator* given);

/// A group of which this process has one rank. reset: of the communicator.
SYNCBN_API syncbn_group* group_of(std::shared_ptr<Communicator> communicator,
                                  std::function<void()> reset);

}  // namespace syncbn::c_api
