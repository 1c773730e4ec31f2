// SPDX-License-Identifier: Apache-2.0
// Links an installed syncbn::mpi: MPI is not running, which is an error of this library's.
#include <string_view>

#include "syncbn/error.hpp"
#include "syncbn/mpi.hpp"

int main() {
  try {
    syncbn::MpiCommunicator group(syncbn::MpiHandle{0});
  } catch (const syncbn::InvalidArgument& error) {
    return std::string_view(error.what()).starts_with("communicator: got one while MPI") ? 0 : 1;
  }
  return 1;
}
