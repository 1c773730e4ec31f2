/* Bad arguments, calls that differ and ranks that refuse: a code and a text on every rank. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"
#include "step.h"

typedef struct outcome {
  group* group;
  step_memory ranks[RANKS];
  int64_t count[RANKS];
  double mean[RANKS][CHANNELS];
  syncbn_status status[RANKS];
  char text[RANKS][300];
} outcome;

/* A forward of the rank's samples, which `change` may spoil. */
static void forward_of_rank(outcome* o, int rank,
                            void (*change)(views*, syncbn_batch_norm_options*, int rank)) {
  const syncbn_communicator communicator = group_rank(o->group, rank);
  syncbn_batch_norm_options options = options_of_reference();
  fill(&o->ranks[rank]);
  views v;
  view(&v, &o->ranks[rank], 0, SAMPLES);
  change(&v, &options, rank);
  syncbn_batch_statistics* statistics = NULL;
  o->status[rank] = forward(&v, &statistics, &options, &communicator);
  snprintf(o->text[rank], sizeof(o->text[rank]), "%s", syncbn_last_error());
  o->count[rank] = syncbn_batch_statistics_count(statistics);
  if (statistics != NULL) {
    memcpy(o->mean[rank], syncbn_batch_statistics_mean(statistics), sizeof(o->mean[rank]));
  }
  syncbn_batch_statistics_destroy(statistics);
}

static void to_welford(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)v, (void)rank;
  options->statistics = SYNCBN_WELFORD;
}
static void to_layers(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)v;
  options->layer = 1 + (uint64_t)rank;
}
static void to_bad_y(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)options;
  if (rank == 1) {
    v->y.dtype = 77;
  }
}
static void to_unnumbered(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)v;
  options->layer = rank == 1 ? 0 : options->layer;
}
static void to_float64(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)options;
  static double x[SAMPLES * PLANE * CHANNELS], y[SAMPLES * PLANE * CHANNELS];
  if (rank == 1) {
    v->x.dtype = v->y.dtype = SYNCBN_FLOAT64;
    v->x.data = x;
    v->y.data = y;
  }
}

static void welford_body(void* o, int rank) { forward_of_rank(o, rank, to_welford); }
static void layers_body(void* o, int rank) { forward_of_rank(o, rank, to_layers); }
static void bad_y_body(void* o, int rank) { forward_of_rank(o, rank, to_bad_y); }
static void unnumbered_body(void* o, int rank) { forward_of_rank(o, rank, to_unnumbered); }
static void float64_body(void* o, int rank) { forward_of_rank(o, rank, to_float64); }

static outcome* run_outcome(void (*body)(void*, int)) {
  outcome* o = calloc(1, sizeof(outcome));
  o->group = group_create();
  run_ranks(body, o);
  group_destroy(o->group);
  return o;
}

static void welford_gathers(void) {
  outcome* o = run_outcome(welford_body);
  for (int r = 0; r < RANKS; ++r) {
    EXPECT(o->status[r] == SYNCBN_OK);
    EXPECT(memcmp(o->mean[r], o->mean[0], sizeof(o->mean[0])) == 0);
    int64_t counted = 0;
    for (int i = 0; i < SAMPLES * PLANE; ++i) {
      counted += o->ranks[r].mask[i];
    }
    EXPECT(o->count[r] == RANKS * counted);
  }
  free(o);
}

/* torch.nn.SyncBatchNorm mixes such ranks' statistics without a word, or hangs. */
static void different_calls_are_an_error_on_every_rank(void) {
  step_memory untouched;
  fill(&untouched);
  outcome* o = run_outcome(layers_body);
  for (int r = 0; r < RANKS; ++r) {
    EXPECT(o->status[r] == SYNCBN_DIVERGENCE);
    EXPECT(strstr(o->text[r], "did not make the same call") != NULL);
    EXPECT_SAME(&o->ranks[r], &untouched);
  }
  free(o);
  o = run_outcome(float64_body); /* the callback's own code, without a text of its own */
  for (int r = 0; r < RANKS; ++r) {
    EXPECT(o->status[r] == SYNCBN_DIVERGENCE);
    EXPECT(strcmp(o->text[r], "communicator.all_reduce_sum: got status 3, expected SYNCBN_OK") ==
           0);
  }
  free(o);
}

/* torch.nn.SyncBatchNorm: the other ranks wait until the process group's timeout. */
static void a_refused_argument_reaches_the_other_rank(void) {
  outcome* o = run_outcome(bad_y_body);
  EXPECT(o->status[1] == SYNCBN_INVALID_ARGUMENT);
  EXPECT(strncmp(o->text[1], "y: got 77, expected SYNCBN_FLOAT16", 33) == 0);
  EXPECT(o->status[0] == SYNCBN_PEER_LOST);
  EXPECT(strncmp(o->text[0], "rank 1 left: y: got 77", 22) == 0);
  free(o);
  step_memory untouched;
  fill(&untouched);
  o = run_outcome(unnumbered_body);
  EXPECT(o->status[1] == SYNCBN_INVALID_ARGUMENT);
  EXPECT(strncmp(o->text[1], "options.layer: got 0, expected this layer's own number", 54) == 0);
  EXPECT(o->status[0] == SYNCBN_PEER_LOST);
  EXPECT(strncmp(o->text[0], "rank 1 left: options.layer: got 0", 33) == 0);
  for (int r = 0; r < RANKS; ++r) {
    EXPECT_SAME(&o->ranks[r], &untouched);
  }
  free(o);
}

static int32_t fails_oddly(void* user_data, int64_t* words, int64_t count) {
  (void)user_data, (void)words, (void)count;
  syncbn_set_last_error("the network is down");
  return -5;
}

static void bad_arguments(void) {
  step_memory m, untouched;
  fill(&m);
  fill(&untouched);
  views good, v;
  view(&good, &m, 0, SAMPLES);
  const syncbn_communicator* self = syncbn_self_communicator();
  syncbn_batch_norm_options options = options_of_reference();
  syncbn_batch_statistics* statistics = NULL;
  syncbn_executor* executor = NULL;

#define EXPECT_REFUSED(call, part) EXPECT_ERROR(call, SYNCBN_INVALID_ARGUMENT, part)
#define WITH(change) (v = good, (change), &v)
  EXPECT_REFUSED(forward(&good, &statistics, &options, NULL), "communicator: got NULL");
  EXPECT_REFUSED(forward(&good, &statistics, NULL, self), "options: got NULL");
  EXPECT_REFUSED(forward(&good, NULL, &options, self), "statistics: got NULL");
  EXPECT_REFUSED(forward(WITH(v.x.dtype = 4), &statistics, &options, self), "x: got 4");
  EXPECT_REFUSED(forward(WITH(v.x.device = -1), &statistics, &options, self), "x: got -1");
  EXPECT_REFUSED(forward(WITH(v.x.ndim = -1), &statistics, &options, self), "x: got -1 axes");
  EXPECT_REFUSED(forward(WITH(v.x.ndim = 1000), &statistics, &options, self), "x: got 1000 axes");
  EXPECT_REFUSED(forward(WITH(v.x.ndim = 1), &statistics, &options, self), "x: got 1 axes");
  EXPECT_REFUSED(forward(WITH(v.x.sizes = NULL), &statistics, &options, self), "x.sizes: got NULL");
  EXPECT_REFUSED(forward(WITH(v.x.data = NULL), &statistics, &options, self),
                 "x: got a null pointer");
  const int64_t huge[3] = {INT64_MAX, CHANNELS, INT64_MAX};
  EXPECT_REFUSED(forward(WITH(v.x.sizes = huge), &statistics, &options, self), "x: got shape");
  EXPECT_REFUSED(forward(WITH(v.y.dtype = SYNCBN_FLOAT64), &statistics, &options, self),
                 "y: got float64, expected the dtype of x, float32");
  EXPECT_REFUSED(forward(WITH(v.mask.ndim = 1), &statistics, &options, self), "mask: got shape");
  options.activation.kind = 9;
  EXPECT_REFUSED(forward(&good, &statistics, &options, self), "activation: got 9");
  options = options_of_reference();
  options.statistics = 2;
  EXPECT_REFUSED(forward(&good, &statistics, &options, self), "statistics: got 2");
  options = options_of_reference();
  options.momentum = 2;
  EXPECT_REFUSED(forward(&good, &statistics, &options, self), "momentum: got 2");
  options.cumulative_average = 1; /* asks for num_batches_tracked, which is absent here */
  EXPECT_REFUSED(forward(&good, &statistics, &options, self), "running.num_batches_tracked");
  options = options_of_reference();
  EXPECT_REFUSED(syncbn_batch_norm_forward(NULL, NULL, NULL, NULL, NULL, &good.y, NULL, NULL, NULL,
                                           &statistics, &options, self, NULL),
                 "x: got NULL");

  syncbn_communicator odd = *self;
  odd.size = 0;
  EXPECT_REFUSED(forward(&good, &statistics, &options, &odd), "communicator.size: got 0");
  odd.size = 2049;
  EXPECT_REFUSED(forward(&good, &statistics, &options, &odd), "communicator.size: got 2049");
  odd = *self;
  odd.rank = 1;
  EXPECT_REFUSED(forward(&good, &statistics, &options, &odd), "communicator.rank: got 1");
  odd = *self;
  odd.all_reduce_sum = NULL;
  EXPECT_REFUSED(forward(&good, &statistics, &options, &odd), "communicator.all_reduce_sum");
  odd = *self;
  odd.all_gather = NULL;
  options.statistics = SYNCBN_WELFORD;
  EXPECT_REFUSED(forward(&good, &statistics, &options, &odd), "communicator.all_gather: got NULL");
  options = options_of_reference();
  odd = *self;
  odd.size = 2;
  odd.all_reduce_sum = fails_oddly;
  EXPECT_ERROR(forward(&good, &statistics, &options, &odd), SYNCBN_ERROR, "the network is down");

  EXPECT_REFUSED(syncbn_batch_norm_backward(&good.dy, &good.x, NULL, NULL, NULL, NULL, &good.dx,
                                            NULL, NULL, NULL, SYNCBN_SHARE, self, NULL),
                 "statistics: got NULL");
  EXPECT_REFUSED(syncbn_thread_pool_create(0, &executor), "threads: got 0");
  EXPECT_REFUSED(syncbn_thread_pool_create(1, NULL), "executor: got NULL");
  const syncbn_executor_functions no_function = {NULL, 1, NULL};
  const syncbn_executor_functions no_thread = {NULL, 0, NULL};
  EXPECT_REFUSED(syncbn_executor_create(NULL, &executor), "functions: got NULL");
  EXPECT_REFUSED(syncbn_executor_create(&no_function, &executor), "functions.parallel_for");
  EXPECT_REFUSED(syncbn_executor_create(&no_thread, &executor), "functions.concurrency: got 0");
  int64_t words = 0;
  int32_t per_channel = 0;
  uint32_t fingerprint = 0;
  EXPECT_REFUSED(syncbn_message_words(-1, 1, &words), "dtype: got -1");
  EXPECT_REFUSED(syncbn_message_words(SYNCBN_FLOAT32, -1, &words), "channels: got -1");
  EXPECT_REFUSED(syncbn_message_words(SYNCBN_FLOAT32, 1, NULL), "words: got NULL");
  EXPECT_REFUSED(syncbn_words_per_channel(4, &per_channel), "dtype: got 4");
  EXPECT_REFUSED(syncbn_fingerprint(0, 0, 2, 1, 1e-5, &fingerprint), "direction: got 2");
  EXPECT_REFUSED(syncbn_local_moments(&good.x, NULL, NULL, 0, NULL), "message: got NULL");
  EXPECT_REFUSED(syncbn_activation_mask_bytes(NULL, &words), "x: got NULL");
  int64_t header[SYNCBN_HEADER_WORDS] = {0};
  syncbn_message_info info;
  EXPECT_REFUSED(syncbn_read_header(header, 0, &info), "ranks: got 0");
  EXPECT_REFUSED(syncbn_read_header(NULL, 1, &info), "merged: got NULL");
  double mean[CHANNELS] = {0, 0, 0};
  EXPECT_REFUSED(
      syncbn_normalize(&good.x, NULL, mean, NULL, NULL, NULL, NULL, &good.y, NULL, NULL, NULL),
      "rstd: got NULL");
  EXPECT_REFUSED(syncbn_update_running_statistics(NULL, NULL, mean, NULL, CHANNELS, 1, 0.1),
                 "var: got NULL");

  EXPECT(statistics == NULL && executor == NULL);
  EXPECT_SAME(&m, &untouched);
}

void test_errors(void) {
  welford_gathers();
  different_calls_are_an_error_on_every_rank();
  a_refused_argument_reaches_the_other_rank();
  bad_arguments();
}
