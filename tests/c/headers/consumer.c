// SPDX-License-Identifier: Apache-2.0
/* A program of any standard of C and C++ compiles with the headers for C. Nobody runs it. */
#include "syncbn/c_api.h"
#include "syncbn/mpi_c_api.h"

int make(int32_t communicator, syncbn_group** group, syncbn_batch_norm** layer);

int make(int32_t communicator, syncbn_group** group, syncbn_batch_norm** layer) {
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = SYNCBN_VERSION_MAJOR;
  options.name = SYNCBN_VERSION_STRING;
  if (syncbn_mpi_group_create(communicator, 1000, group) != SYNCBN_STATUS_OK) {
    return 1;
  }
  return (int)syncbn_batch_norm_create(&options, syncbn_group_rank(*group, 0), layer);
}
