// SPDX-License-Identifier: Apache-2.0
#include "syncbn/mpi_c_api.h"

#include <chrono>
#include <memory>

#include "c_api/arguments.hpp"
#include "c_api/groups.hpp"
#include "syncbn/mpi.hpp"

syncbn_status syncbn_mpi_group_create(int32_t communicator, int64_t timeout, syncbn_group** group) {
  using namespace syncbn;
  return c_api::guarded([&] {
    syncbn_group*& out = c_api::required("group", group);
    const auto made = std::make_shared<MpiCommunicator>(MpiHandle{communicator},
                                                        std::chrono::milliseconds(timeout));
    out = c_api::group_of(made, [group = made.get()] { group->reset(); });
  });
}
