// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_TESTS_C_GROUP_H
#define SYNCBN_TESTS_C_GROUP_H

#include "syncbn/c_api.h"

enum { RANKS = 2 };

/* Two ranks that are threads of this process, as a user of the C interface would write them. */
typedef struct group group;

group* group_create(void);
void group_destroy(group* g);
syncbn_communicator group_rank(group* g, int rank);

/* A syncbn_gather; user_data: that of a rank's communicator. */
int32_t group_gather(void* user_data, const void* in, int64_t bytes, void* out);

/* Runs body(context, r) on one thread per rank. */
void run_ranks(void (*body)(void* context, int rank), void* context);

#endif /* SYNCBN_TESTS_C_GROUP_H */
