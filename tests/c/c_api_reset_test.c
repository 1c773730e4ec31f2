// SPDX-License-Identifier: Apache-2.0
/* A group that is broken, and then reset: its layers go on, and begin at call 0. */
#include <stddef.h>

#include "group.h"
#include "step.h"

typedef struct reset_case {
  group* over;                 /* that the groups are made over, or NULL */
  syncbn_group* groups[RANKS]; /* of each rank; one of threads is everybody's */
  int resets[RANKS];           /* the ranks that call reset */
  fixture of_rank[RANKS];
} reset_case;

static void layer_of_rank(void* context, int rank) {
  fixture* x = &((reset_case*)context)->of_rank[rank];
  make_fixture(x);
  make_layer(x, syncbn_group_rank(((reset_case*)context)->groups[rank], rank));
}

/* Rank 1 leaves the group, which is an error on rank 0. */
static void broken_step_of_rank(void* context, int rank) {
  reset_case* c = context;
  fixture* x = &c->of_rank[rank];
  const syncbn_communicator* end = syncbn_group_rank(c->groups[rank], rank);
  EXPECT_OK(syncbn_batch_norm_forward(x->layer, &x->f, x->saved, NULL));
  if (rank == 1) {
    end->abandon(end->user_data, "it has no more batches");
  } else {
    EXPECT_ERROR(syncbn_batch_norm_forward(x->layer, &x->f, x->saved, NULL),
                 SYNCBN_STATUS_PEER_LOST, "it has no more batches");
  }
}

static void reset_of_rank(void* context, int rank) {
  reset_case* c = context;
  if (c->resets[rank]) {
    EXPECT_OK(syncbn_group_reset(c->groups[rank]));
  }
}

/* A step, and a call that rank 1 refuses, whose number tells where the layer begins. */
static void step_after_reset_of_rank(void* context, int rank) {
  fixture* x = &((reset_case*)context)->of_rank[rank];
  if (rank == 1) {
    x->f.y = NULL;
    EXPECT_ERROR(syncbn_batch_norm_forward(x->layer, &x->f, x->saved, NULL),
                 SYNCBN_STATUS_INVALID_ARGUMENT, "layer, call 0, forward: y: got NULL");
  } else {
    EXPECT_ERROR(syncbn_batch_norm_forward(x->layer, &x->f, x->saved, NULL),
                 SYNCBN_STATUS_PEER_LOST, "layer, call 0, forward");
  }
  destroy_fixture(x);
}

static void expect_reset_repairs(reset_case* c) {
  run_ranks(layer_of_rank, c);
  run_ranks(broken_step_of_rank, c);
  run_ranks(reset_of_rank, c);
  run_ranks(step_after_reset_of_rank, c);
}

static void of_threads(void) {
  reset_case c = {.resets = {1, 0}};
  EXPECT_OK(syncbn_thread_group_create(RANKS, 60000, &c.groups[0]));
  c.groups[1] = c.groups[0];
  expect_reset_repairs(&c);
  syncbn_group_destroy(c.groups[0]);
}

static void make_in_shared_memory(void* context, int rank) {
  reset_case* c = context;
  EXPECT_OK(syncbn_shared_memory_group_create(
      rank, RANKS, group_gather, group_rank(c->over, rank).user_data, 60000, &c->groups[rank]));
}

static void make_of_the_caller(void* context, int rank) {
  reset_case* c = context;
  const syncbn_communicator functions = group_rank(c->over, rank);
  EXPECT_OK(syncbn_group_create(&functions, &c->groups[rank]));
}

static void of_a_rank_each(void (*make)(void* context, int rank)) {
  reset_case c = {.over = group_create(), .resets = {1, 1}};
  run_ranks(make, &c);
  expect_reset_repairs(&c);
  for (int r = 0; r < RANKS; ++r) {
    syncbn_group_destroy(c.groups[r]);
  }
  group_destroy(c.over);
}

static int32_t no_reset(void* user_data) {
  (void)user_data;
  syncbn_set_last_error("the network is down", NULL, 0);
  return SYNCBN_STATUS_UNAVAILABLE;
}

static void that_fails(void) {
  syncbn_communicator functions = *syncbn_self_communicator();
  functions.reset = no_reset;
  syncbn_group* alone = NULL;
  EXPECT_OK(syncbn_group_create(&functions, &alone));
  EXPECT_ERROR(syncbn_group_reset(alone), SYNCBN_STATUS_UNAVAILABLE, "the network is down");
  syncbn_group_destroy(alone);
  alone = NULL;
  EXPECT_ERROR(syncbn_group_reset(NULL), SYNCBN_STATUS_INVALID_ARGUMENT, "group: got NULL");
  EXPECT_ERROR(syncbn_group_create(NULL, &alone), SYNCBN_STATUS_INVALID_ARGUMENT,
               "functions: got NULL");
  functions.rank = 1;
  EXPECT_ERROR(syncbn_group_create(&functions, &alone), SYNCBN_STATUS_INVALID_ARGUMENT,
               "communicator.rank: got 1");
  EXPECT(alone == NULL);
}

void test_reset(void) {
  of_threads();
  of_a_rank_each(make_in_shared_memory);
  of_a_rank_each(make_of_the_caller);
  that_fails();
}
