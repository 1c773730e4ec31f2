// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_MPI_C_API_H
#define SYNCBN_MPI_C_API_H

/* Groups over MPI from C: in the library syncbn_mpi, target syncbn::mpi. See syncbn/mpi.hpp. */

#include "syncbn/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* communicator: MPI_Comm_c2f(comm). All its ranks make this call at the same time, and destroy the
   group before MPI_Finalize. syncbn_group_rank gives this process's end. */
SYNCBN_API syncbn_status syncbn_mpi_group_create(int32_t communicator, int64_t timeout,
                                                 syncbn_group** group);

#ifdef __cplusplus
}
#endif

#endif /* SYNCBN_MPI_C_API_H */
