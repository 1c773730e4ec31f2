// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_MPI_C_API_H
#define SYNCBN_MPI_C_API_H

/* Groups over MPI for C, from the library syncbn_mpi (target syncbn::mpi). See syncbn/mpi.hpp. */

#include "syncbn/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a group from an MPI communicator; pass MPI_Comm_c2f(comm). All its ranks make this call
   together, and all of them destroy the group before MPI_Finalize. timeout: 1 to 2^36 milliseconds.
   syncbn_group_rank returns this process's end. */
SYNCBN_API syncbn_status syncbn_mpi_group_create(int32_t communicator, int64_t timeout,
                                                 syncbn_group** group);

#ifdef __cplusplus
}
#endif

#endif /* SYNCBN_MPI_C_API_H */
