// SPDX-License-Identifier: Apache-2.0
/* The C interface against the C++ interface, bit for bit. torch.nn.SyncBatchNorm
   has no interface below Python to compare with; its results depend on how ranks share a batch. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"
#include "step.h"

static step_memory expected_step(int residual) {
  step_memory m;
  fill(&m);
  reference_step(&m, residual);
  return m;
}

static void layer_step_by_c(const views* v, const syncbn_communicator* communicator,
                            syncbn_executor* executor) {
  const syncbn_batch_norm_options options = options_of_reference();
  syncbn_forward_arguments f = forward_arguments(v);
  syncbn_backward_arguments b = backward_arguments(v);
  syncbn_evaluate_arguments e = evaluate_arguments(v);
  f.residual = e.residual = &v->residual;
  b.dresidual = &v->dresidual;
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  EXPECT_OK(syncbn_batch_norm_create(&options, communicator, &layer));
  EXPECT_OK(syncbn_saved_create(&saved));
  EXPECT_OK(syncbn_batch_norm_forward(layer, &f, saved, executor));
  EXPECT(syncbn_saved_channels(saved) == CHANNELS);
  for (int c = 0; c < CHANNELS; ++c) {
    EXPECT(syncbn_saved_rstd(saved)[c] == 1 / sqrt(syncbn_saved_var(saved)[c] + options.eps));
  }
  EXPECT_OK(syncbn_batch_norm_backward(layer, &b, saved, executor));
  EXPECT_OK(syncbn_batch_norm_evaluate(layer, &e, executor));
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);
}

/* Pieces in the reverse order; counts them. */
static void backwards(void* user_data, int64_t begin, int64_t end, int64_t grain,
                      void (*body)(void* body_data, int64_t begin, int64_t end), void* body_data) {
  int* pieces = user_data;
  (void)grain;
  for (int64_t at = end; at > begin; --at) {
    body(body_data, at - 1, at);
    ++*pieces;
  }
}

static void threads_of_the_caller_exact(void) {
  const step_memory expected = expected_step(1);
  fixture x;
  make_fixture(&x);
  int pieces = 0;
  const syncbn_executor_functions functions = {sizeof(functions), &pieces, 2, backwards};
  syncbn_executor* executor = NULL;
  EXPECT_OK(syncbn_executor_create(&functions, &executor));
  layer_step_by_c(&x.v, syncbn_self_communicator(), executor);
  syncbn_executor_destroy(executor);
  EXPECT_SAME(&x.m, &expected);
  EXPECT(pieces > 1);
}

static void one_rank_exact(void) {
  const step_memory expected = expected_step(1);
  for (int threads = 0; threads < 3; ++threads) {
    fixture x;
    make_fixture(&x);
    syncbn_executor* executor = NULL;
    if (threads > 0) {
      EXPECT_OK(syncbn_thread_pool_create(threads, &executor));
    }
    layer_step_by_c(&x.v, syncbn_self_communicator(), executor);
    syncbn_executor_destroy(executor);
    EXPECT_SAME(&x.m, &expected);
  }
}

/* The momentum of later forwards; one that is refused changes nothing. */
static void momentum_exact(void) {
  const step_memory expected = expected_step(0);
  fixture x;
  make_fixture(&x);
  int64_t batches = 0;
  x.f.num_batches_tracked = &batches;
  const double wanted = x.options.momentum;
  x.options.momentum = 0.9;
  make_layer(&x, syncbn_self_communicator());
  EXPECT_OK(syncbn_batch_norm_set_momentum(x.layer, wanted, 0));
  EXPECT_ERROR(syncbn_batch_norm_set_momentum(x.layer, 2, 0), SYNCBN_STATUS_INVALID_ARGUMENT,
               "momentum: got 2, expected a number in [0, 1]");
  EXPECT_ERROR(syncbn_batch_norm_set_momentum(NULL, wanted, 0), SYNCBN_STATUS_INVALID_ARGUMENT,
               "layer: got NULL");
  EXPECT_OK(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL));
  EXPECT(memcmp(x.m.running_mean, expected.running_mean, sizeof(x.m.running_mean)) == 0);
  EXPECT(memcmp(x.m.running_var, expected.running_var, sizeof(x.m.running_var)) == 0);
  batches = 0; /* the average of the next batch alone */
  EXPECT_OK(syncbn_batch_norm_set_momentum(x.layer, 2, 1));
  EXPECT_OK(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL));
  for (int c = 0; c < CHANNELS; ++c) {
    EXPECT(x.m.running_mean[c] == (float)syncbn_saved_mean(x.saved)[c]);
  }
  destroy_fixture(&x);
}

typedef struct two_ranks {
  syncbn_communicator ends[RANKS];
  step_memory* batch;   /* of both; each rank has other samples of it */
  step_memory ranks[2]; /* what a rank has of its own */
} two_ranks;

static void step_of_rank(void* context, int rank) {
  two_ranks* t = context;
  views v;
  view(&v, t->batch, rank == 0 ? 0 : FIRST, rank == 0 ? FIRST : SAMPLES);
  v.dweight.data = t->ranks[rank].dweight;
  v.dbias.data = t->ranks[rank].dbias;
  v.running_mean.data = t->ranks[rank].running_mean;
  v.running_var.data = t->ranks[rank].running_var;
  layer_step_by_c(&v, &t->ends[rank], NULL);
}

static void expect_the_bits_of_one(const syncbn_communicator* zero,
                                   const syncbn_communicator* one) {
  const step_memory expected = expected_step(1);
  step_memory batch;
  fill(&batch);
  two_ranks t = {{*zero, *one}, &batch, {batch, batch}};
  run_ranks(step_of_rank, &t);
  for (int r = 0; r < RANKS; ++r) {
    memcpy(batch.dweight, t.ranks[r].dweight, sizeof(batch.dweight));
    memcpy(batch.dbias, t.ranks[r].dbias, sizeof(batch.dbias));
    memcpy(batch.running_mean, t.ranks[r].running_mean, sizeof(batch.running_mean));
    memcpy(batch.running_var, t.ranks[r].running_var, sizeof(batch.running_var));
    EXPECT_SAME(&batch, &expected);
  }
}

static void functions_of_the_caller_exact(void) {
  group* g = group_create();
  const syncbn_communicator zero = group_rank(g, 0), one = group_rank(g, 1);
  expect_the_bits_of_one(&zero, &one);
  group_destroy(g);
}

static void thread_group_exact(void) {
  syncbn_group* g = NULL;
  EXPECT_OK(syncbn_thread_group_create(RANKS, 60000, &g));
  expect_the_bits_of_one(syncbn_group_rank(g, 0), syncbn_group_rank(g, 1));
  EXPECT(syncbn_group_rank(g, 2) == NULL && syncbn_group_rank(NULL, 0) == NULL);
  syncbn_group_destroy(g);
}

typedef struct ends_of_ranks {
  group* over;
  syncbn_group* made[RANKS];
} ends_of_ranks;

static void make_shared_memory_group(void* context, int rank) {
  ends_of_ranks* e = context;
  const syncbn_communicator c = group_rank(e->over, rank);
  EXPECT_OK(syncbn_shared_memory_group_create(rank, RANKS, group_gather, c.user_data, 60000,
                                              &e->made[rank]));
}

static void shared_memory_group_exact(void) {
  ends_of_ranks e = {group_create(), {NULL, NULL}};
  run_ranks(make_shared_memory_group, &e);
  EXPECT(syncbn_group_rank(e.made[0], 1) == NULL);
  expect_the_bits_of_one(syncbn_group_rank(e.made[0], 0), syncbn_group_rank(e.made[1], 1));
  for (int r = 0; r < RANKS; ++r) {
    syncbn_group_destroy(e.made[r]);
  }
  group_destroy(e.over);
}

static int32_t gathers_nothing(void* user_data, const void* in, int64_t bytes, void* out) {
  (void)user_data, (void)in, (void)bytes, (void)out;
  syncbn_set_last_error("no way to the others", NULL, 0);
  return SYNCBN_STATUS_PEER_LOST;
}

static int32_t gathers_zeros(void* user_data, const void* in, int64_t bytes, void* out) {
  (void)user_data, (void)in;
  memset(out, 0, (size_t)(RANKS * bytes));
  ((char*)out)[bytes] = 'x';
  return SYNCBN_STATUS_OK;
}

static void groups_that_cannot_be_made(void) {
  syncbn_group* g = NULL;
  EXPECT_ERROR(syncbn_thread_group_create(0, 1, &g), SYNCBN_STATUS_INVALID_ARGUMENT,
               "ranks: got 0");
  EXPECT_ERROR(syncbn_thread_group_create(2, 0, &g), SYNCBN_STATUS_INVALID_ARGUMENT,
               "timeout: got 0 ms");
  EXPECT_ERROR(syncbn_thread_group_create(2, 1, NULL), SYNCBN_STATUS_INVALID_ARGUMENT,
               "group: got NULL");
  EXPECT_ERROR(syncbn_shared_memory_group_create(0, RANKS, NULL, NULL, 1, &g),
               SYNCBN_STATUS_INVALID_ARGUMENT, "gather: got NULL");
  EXPECT_ERROR(syncbn_shared_memory_group_create(0, RANKS, gathers_nothing, NULL, 1, &g),
               SYNCBN_STATUS_PEER_LOST, "no way to the others");
  EXPECT_ERROR(syncbn_shared_memory_group_create(0, RANKS, gathers_zeros, NULL, 1, &g),
               SYNCBN_STATUS_UNAVAILABLE, "rank 1: x");
  EXPECT(g == NULL);
  syncbn_group_destroy(NULL);

  /* A rank that does not come, behind functions that are the caller's. */
  fixture x;
  make_fixture(&x);
  EXPECT_OK(syncbn_thread_group_create(2, 1, &g));
  syncbn_communicator end = *syncbn_group_rank(g, 0);
  end.abandon = NULL;
  make_layer(&x, &end);
  EXPECT_ERROR(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL), SYNCBN_STATUS_TIMEOUT,
               "rank 1 did not come");
  const int32_t* ranks = NULL;
  EXPECT(syncbn_last_error_ranks(&ranks) == 1 && ranks[0] == 1);
  EXPECT(strcmp(syncbn_last_error_layer(), "layer") == 0);
  destroy_fixture(&x);
  syncbn_group_destroy(g);
}

/* C programs are to destroy the layer first; the other order is an error with words. */
static void group_gone_before_its_layer(void) {
  fixture x;
  make_fixture(&x);
  syncbn_group* group = NULL;
  EXPECT_OK(syncbn_thread_group_create(1, 1000, &group));
  make_layer(&x, syncbn_group_rank(group, 0));
  EXPECT_OK(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL));
  syncbn_group_destroy(group);
  EXPECT_ERROR(syncbn_batch_norm_backward(x.layer, &x.b, x.saved, NULL),
               SYNCBN_STATUS_INVALID_ARGUMENT, "communicator: got one that is gone");
  EXPECT_ERROR(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL),
               SYNCBN_STATUS_INVALID_ARGUMENT, "communicator: got one that is gone");
  x.f.y = NULL;
  x.b.dy = NULL;
  EXPECT_ERROR(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL),
               SYNCBN_STATUS_INVALID_ARGUMENT, "communicator: got one that is gone");
  EXPECT_ERROR(syncbn_batch_norm_backward(x.layer, &x.b, x.saved, NULL),
               SYNCBN_STATUS_INVALID_ARGUMENT, "dy: got NULL");
  destroy_fixture(&x);
}

/* The backward of an evaluation. */
static void evaluation_exact(void) {
  fixture x;
  make_fixture(&x);
  make_layer(&x, syncbn_self_communicator());
  for (int c = 0; c < CHANNELS; ++c) {
    x.m.running_mean[c] = 0.25f * (float)c;
    x.m.running_var[c] = 0.5f + (float)c;
  }
  step_memory expected = x.m;
  reference_evaluate_backward(&expected);
  syncbn_evaluate_backward_arguments e = {.struct_size = sizeof(e),
                                          .dy = &x.v.dy,
                                          .x = &x.v.x,
                                          .mask = &x.v.mask,
                                          .weight = &x.v.weight,
                                          .bias = &x.v.bias,
                                          .running_mean = &x.v.running_mean,
                                          .running_var = &x.v.running_var,
                                          .dx = &x.v.dx,
                                          .dweight = &x.v.dweight,
                                          .dbias = &x.v.dbias};
  EXPECT_OK(syncbn_batch_norm_evaluate_backward(x.layer, &e, NULL));
  EXPECT(x.m.dx[0] != 0 && x.m.dweight[0] != 0);
  EXPECT_SAME(&x.m, &expected);
  e.running_mean = NULL;
  EXPECT_ERROR(syncbn_batch_norm_evaluate_backward(x.layer, &e, NULL),
               SYNCBN_STATUS_INVALID_ARGUMENT,
               "layer, backward of an evaluation, 3 channels, float32: running_mean, running_var: "
               "got only one");
  destroy_fixture(&x);
}

/* Where element i of row-major memory lies in channels-last memory. */
static int place_in_rows(int i) {
  return (i / (CHANNELS * PLANE) * PLANE + i % PLANE) * CHANNELS + i / PLANE % CHANNELS;
}

/* Row-major by default; other strides are told. Channels-last memory, the same values. */
static void strides_exact(void) {
  const step_memory expected = expected_step(0);
  fixture f;
  make_fixture(&f);
  make_layer(&f, syncbn_self_communicator());
  float x[ELEMENTS], y[ELEMENTS];
  const int64_t strides[3] = {CHANNELS * PLANE, 1, CHANNELS};
  f.v.x.data = x;
  f.v.y.data = y;
  f.v.x.strides = f.v.y.strides = strides;
  for (int i = 0; i < ELEMENTS; ++i) {
    x[place_in_rows(i)] = f.m.x[i];
  }
  EXPECT_OK(syncbn_batch_norm_forward(f.layer, &f.f, f.saved, NULL));
  for (int i = 0; i < ELEMENTS; ++i) {
    f.m.y[i] = y[place_in_rows(i)];
  }
  EXPECT(memcmp(f.m.y, expected.y, sizeof(f.m.y)) == 0);
  destroy_fixture(&f);
}

int main(void) {
  EXPECT(strcmp(syncbn_last_error(), "") == 0 && strcmp(syncbn_last_error_layer(), "") == 0);
  EXPECT(syncbn_last_error_ranks(NULL) == 0);
  EXPECT(strcmp(syncbn_version(), SYNCBN_TEST_VERSION) == 0);
  EXPECT(strcmp(syncbn_version(), SYNCBN_VERSION_STRING) == 0);
  one_rank_exact();
  momentum_exact();
  threads_of_the_caller_exact();
  functions_of_the_caller_exact();
  thread_group_exact();
  shared_memory_group_exact();
  groups_that_cannot_be_made();
  group_gone_before_its_layer();
  evaluation_exact();
  strides_exact();
  test_errors();
  test_reset();
  if (failures == 0) {
    printf("all tests passed\n");
  }
  return failures == 0 ? 0 : 1;
}
