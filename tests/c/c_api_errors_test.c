// SPDX-License-Identifier: Apache-2.0
/* Bad arguments, calls that differ and ranks that refuse: a code and a text on every rank. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"
#include "step.h"

typedef void change_call(views*, syncbn_batch_norm_options*, int rank);

typedef struct outcome {
  group* group;
  change_call* change;
  step_memory ranks[RANKS];
  int64_t count[RANKS];
  double mean[RANKS][CHANNELS];
  syncbn_status status[RANKS];
  char text[RANKS][400];
  char layer[RANKS][20];
  int32_t odd[RANKS]; /* the only rank that the error is about, or -1 */
} outcome;

static int32_t only_rank(void) {
  const int32_t* ranks = NULL;
  return syncbn_last_error_ranks(&ranks) == 1 ? ranks[0] : -1;
}

/* A forward of the rank's samples, which `change` may spoil. */
static void forward_of_rank(void* context, int rank) {
  outcome* o = context;
  const syncbn_communicator communicator = group_rank(o->group, rank);
  syncbn_batch_norm_options options = options_of_reference();
  fill(&o->ranks[rank]);
  views v;
  view(&v, &o->ranks[rank], 0, SAMPLES);
  o->change(&v, &options, rank);
  syncbn_saved* saved = NULL;
  EXPECT_OK(syncbn_saved_create(&saved));
  o->status[rank] = forward(&v, saved, &options, &communicator);
  snprintf(o->text[rank], sizeof(o->text[rank]), "%s", syncbn_last_error());
  snprintf(o->layer[rank], sizeof(o->layer[rank]), "%s", syncbn_last_error_layer());
  o->odd[rank] = only_rank();
  o->count[rank] = syncbn_saved_count(saved);
  if (o->count[rank] > 0) {
    memcpy(o->mean[rank], syncbn_saved_mean(saved), sizeof(o->mean[rank]));
  }
  syncbn_saved_destroy(saved);
}

static void to_welford(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)v, (void)rank;
  options->statistics = SYNCBN_WELFORD;
}
static void to_names(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)v;
  options->name = rank == 1 ? "head" : "stem";
}
static void to_bad_y(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)options;
  if (rank == 1) {
    v->y.dtype = 77;
  }
}
static void to_unnamed(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)v;
  options->name = rank == 1 ? NULL : options->name;
}
static void to_small_options(views* v, syncbn_batch_norm_options* options, int rank) {
  (void)v;
  options->struct_size -= rank == 1;
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

/* A forward without arguments. */
static void no_arguments_body(void* context, int rank) {
  outcome* o = context;
  const syncbn_communicator communicator = group_rank(o->group, rank);
  const syncbn_batch_norm_options options = options_of_reference();
  fill(&o->ranks[rank]);
  views v;
  view(&v, &o->ranks[rank], 0, SAMPLES);
  const syncbn_forward_arguments arguments = forward_arguments(&v);
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  EXPECT_OK(syncbn_batch_norm_create(&options, &communicator, &layer));
  EXPECT_OK(syncbn_saved_create(&saved));
  o->status[rank] = syncbn_batch_norm_forward(layer, rank == 1 ? NULL : &arguments, saved, NULL);
  snprintf(o->text[rank], sizeof(o->text[rank]), "%s", syncbn_last_error());
  o->odd[rank] = only_rank();
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);
}

static outcome* run_outcome(void (*body)(void*, int), change_call* change) {
  outcome* o = calloc(1, sizeof(outcome));
  o->change = change;
  o->group = group_create();
  run_ranks(body, o);
  group_destroy(o->group);
  return o;
}

static void welford_gathers(void) {
  outcome* o = run_outcome(forward_of_rank, to_welford);
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
  outcome* o = run_outcome(forward_of_rank, to_names);
  for (int r = 0; r < RANKS; ++r) {
    EXPECT(o->status[r] == SYNCBN_DIVERGENCE);
    EXPECT(strstr(o->text[r], "layer: stem on rank 0, head on rank 1") != NULL);
    EXPECT(strcmp(o->layer[r], r == 1 ? "head" : "stem") == 0);
    EXPECT(o->odd[r] == 1);
    EXPECT_SAME(&o->ranks[r], &untouched);
  }
  free(o);
  o = run_outcome(forward_of_rank,
                  to_float64); /* messages that do not fit: the callback has a code, no text */
  for (int r = 0; r < RANKS; ++r) {
    EXPECT(o->status[r] == SYNCBN_DIVERGENCE);
    EXPECT(strstr(o->text[r], "dtype: float32 on rank 0, float64 on rank 1") != NULL);
    EXPECT(strcmp(o->layer[r], "layer") == 0);
    EXPECT(o->odd[r] == 1);
  }
  free(o);
}

/* What rank 1 refuses, and what rank 0 gets to know of it. */
static void expect_refused_on_rank_1(void (*body)(void*, int), change_call* change,
                                     const char* text, const char* of_other) {
  step_memory untouched;
  fill(&untouched);
  outcome* o = run_outcome(body, change);
  EXPECT(o->status[1] == SYNCBN_INVALID_ARGUMENT);
  EXPECT(strncmp(o->text[1], text, strlen(text)) == 0);
  EXPECT(o->status[0] == SYNCBN_PEER_LOST);
  EXPECT(strncmp(o->text[0], of_other, strlen(of_other)) == 0);
  EXPECT(o->odd[0] == 1);
  for (int r = 0; r < RANKS; ++r) {
    EXPECT_SAME(&o->ranks[r], &untouched);
  }
  free(o);
}

/* torch.nn.SyncBatchNorm: the other ranks wait until the process group's timeout. */
static void a_refused_argument_reaches_the_other_rank(void) {
#define LOST "layer, call 0, forward, 3 channels, float32: rank 1 left: "
  expect_refused_on_rank_1(forward_of_rank, to_bad_y,
                           "layer, call 0, forward: y: got 77, expected SYNCBN_FLOAT16",
                           LOST "layer, call 0, forward: y: got 77");
  expect_refused_on_rank_1(no_arguments_body, NULL, "layer, call 0, forward: arguments: got NULL",
                           LOST "layer, call 0, forward: arguments: got NULL");
  /* Where a layer is made. */
  expect_refused_on_rank_1(forward_of_rank, to_unnamed,
                           "options.name: got none, expected this layer's own name",
                           LOST "options.name: got none");
  expect_refused_on_rank_1(forward_of_rank, to_small_options, "options.struct_size: got ",
                           LOST "options.struct_size: got ");
}

static int32_t fails_oddly(void* user_data, int64_t* words, int64_t count) {
  (void)user_data, (void)words, (void)count;
  syncbn_set_last_error("the network is down", NULL, 1);
  return -5;
}

#define EXPECT_REFUSED(call, part) EXPECT_ERROR(call, SYNCBN_INVALID_ARGUMENT, part)

/* A struct of another size than the library's. */
static void expect_size_refused(syncbn_status status, const char* name, size_t got) {
  char text[100];
  snprintf(text, sizeof(text), "%s.struct_size: got %d, expected %d", name, (int)got, (int)got - 8);
  EXPECT_REFUSED(status, text);
}

static void sizes_of_structs(void) {
  step_memory m;
  fill(&m);
  views v;
  view(&v, &m, 0, SAMPLES);
  syncbn_batch_norm_options options = options_of_reference();
  syncbn_communicator communicator = *syncbn_self_communicator();
  syncbn_executor_functions functions = {.struct_size = sizeof(functions)};
  syncbn_forward_arguments f = forward_arguments(&v);
  syncbn_backward_arguments b = backward_arguments(&v);
  syncbn_evaluate_arguments e = evaluate_arguments(&v);
  syncbn_evaluate_backward_arguments eb = {.struct_size = sizeof(eb)};
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  syncbn_executor* executor = NULL;
  EXPECT(communicator.struct_size == sizeof(communicator));
  options.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_create(&options, &communicator, &layer), "options",
                      options.struct_size);
  options.struct_size -= 8;
  communicator.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_create(&options, &communicator, &layer), "communicator",
                      communicator.struct_size);
  communicator.struct_size -= 8;
  functions.struct_size += 8;
  expect_size_refused(syncbn_executor_create(&functions, &executor), "functions",
                      functions.struct_size);
  EXPECT(layer == NULL && executor == NULL);
  EXPECT_OK(syncbn_batch_norm_create(&options, &communicator, &layer));
  EXPECT_OK(syncbn_saved_create(&saved));
  f.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_forward(layer, &f, saved, NULL), "arguments",
                      f.struct_size);
  b.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_backward(layer, &b, saved, NULL), "arguments",
                      b.struct_size);
  e.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_evaluate(layer, &e, NULL), "arguments", e.struct_size);
  eb.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_evaluate_backward(layer, &eb, NULL), "arguments",
                      eb.struct_size);
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);
}

/* A refused forward counts as a call, and empties what it was to fill. */
static void refused_calls_of_a_layer(void) {
  step_memory m;
  fill(&m);
  views v;
  view(&v, &m, 0, SAMPLES);
  const syncbn_batch_norm_options options = options_of_reference();
  syncbn_forward_arguments f = forward_arguments(&v);
  syncbn_backward_arguments b = backward_arguments(&v);
  syncbn_evaluate_arguments e = evaluate_arguments(&v);
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  EXPECT_OK(syncbn_batch_norm_create(&options, syncbn_self_communicator(), &layer));
  EXPECT_OK(syncbn_saved_create(&saved));
  EXPECT_OK(syncbn_batch_norm_forward(layer, &f, saved, NULL));
  EXPECT(syncbn_saved_count(saved) > 0);
  EXPECT_REFUSED(syncbn_batch_norm_forward(NULL, &f, saved, NULL), "layer: got NULL");
  EXPECT(strcmp(syncbn_last_error_layer(), "") == 0);
  EXPECT_REFUSED(syncbn_batch_norm_forward(layer, &f, NULL, NULL),
                 "layer, call 1, forward: saved: got NULL");
  EXPECT(strcmp(syncbn_last_error_layer(), "layer") == 0);
  EXPECT_OK(syncbn_batch_norm_backward(layer, &b, saved, NULL));
  f.y = NULL;
  EXPECT_REFUSED(syncbn_batch_norm_forward(layer, &f, saved, NULL),
                 "layer, call 2, forward: y: got NULL");
  EXPECT(syncbn_saved_count(saved) == 0 && syncbn_saved_channels(saved) == 0);
  EXPECT_REFUSED(syncbn_batch_norm_backward(layer, &b, saved, NULL),
                 "saved: got one without content, expected one that a forward filled");
  EXPECT_REFUSED(syncbn_batch_norm_backward(layer, &b, NULL, NULL),
                 "layer, backward: saved: got NULL");
  f = forward_arguments(&v);
  v.weight.sizes = v.sizes;
  EXPECT_REFUSED(syncbn_batch_norm_forward(layer, &f, saved, NULL),
                 "layer, call 3, forward, 3 channels, float32: weight: got shape (7)");
  e.y = NULL;
  EXPECT_REFUSED(syncbn_batch_norm_evaluate(layer, &e, NULL), "layer, evaluation: y: got NULL");
  e = evaluate_arguments(&v);
  v.x.device = SYNCBN_CUDA; /* SYNCBN_UNAVAILABLE in a build without CUDA */
  EXPECT(syncbn_batch_norm_evaluate(layer, &e, NULL) != SYNCBN_OK);
  EXPECT(strstr(syncbn_last_error(), "CUDA") != NULL);
  EXPECT_REFUSED(syncbn_batch_norm_create(&options, syncbn_self_communicator(), NULL),
                 "layer: got NULL");
  EXPECT_REFUSED(syncbn_saved_create(NULL), "saved: got NULL");
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);
}

/* C programs are to destroy the layer first; the other order is an error with words. */
static void group_gone_before_its_layer(void) {
  step_memory m;
  fill(&m);
  views v;
  view(&v, &m, 0, SAMPLES);
  const syncbn_batch_norm_options options = options_of_reference();
  syncbn_forward_arguments f = forward_arguments(&v);
  syncbn_backward_arguments b = backward_arguments(&v);
  syncbn_group* group = NULL;
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  EXPECT_OK(syncbn_saved_create(&saved));
  EXPECT_OK(syncbn_thread_group_create(1, 1000, &group));
  EXPECT_OK(syncbn_batch_norm_create(&options, syncbn_group_rank(group, 0), &layer));
  EXPECT_OK(syncbn_batch_norm_forward(layer, &f, saved, NULL));
  syncbn_group_destroy(group);
  EXPECT_REFUSED(syncbn_batch_norm_backward(layer, &b, saved, NULL),
                 "communicator: got one that is gone");
  EXPECT_REFUSED(syncbn_batch_norm_forward(layer, &f, saved, NULL),
                 "communicator: got one that is gone");
  f.y = NULL;
  b.dy = NULL;
  EXPECT_REFUSED(syncbn_batch_norm_forward(layer, &f, saved, NULL),
                 "communicator: got one that is gone");
  EXPECT_REFUSED(syncbn_batch_norm_backward(layer, &b, saved, NULL), "dy: got NULL");
  syncbn_batch_norm_destroy(layer);
  syncbn_saved_destroy(saved);
}

static void bad_arguments(void) {
  step_memory m, untouched;
  fill(&m);
  fill(&untouched);
  views good, v;
  view(&good, &m, 0, SAMPLES);
  const syncbn_communicator* self = syncbn_self_communicator();
  syncbn_batch_norm_options options = options_of_reference();
  syncbn_saved* saved = NULL;
  syncbn_executor* executor = NULL;
  EXPECT_OK(syncbn_saved_create(&saved));

#define WITH(change) (v = good, (change), &v)
  EXPECT_REFUSED(forward(&good, saved, &options, NULL), "communicator: got NULL");
  EXPECT_REFUSED(forward(&good, saved, NULL, self), "options: got NULL");
  EXPECT_REFUSED(forward(WITH(v.x.dtype = 4), saved, &options, self), "x: got 4");
  EXPECT_REFUSED(forward(WITH(v.x.device = -1), saved, &options, self), "x: got -1");
  EXPECT_REFUSED(forward(WITH(v.x.ndim = -1), saved, &options, self), "x: got -1 axes");
  EXPECT_REFUSED(forward(WITH(v.x.ndim = 13), saved, &options, self),
                 "x: got 13 axes, expected 0 to 12");
  EXPECT_REFUSED(forward(WITH(v.x.sizes = NULL), saved, &options, self), "x.sizes: got NULL");
  options.channels = 4;
  EXPECT_REFUSED(forward(&good, saved, &options, self),
                 "x: got 3 channels, expected those of the layer, 4");
  options = options_of_reference();
  options.activation.kind = 9;
  EXPECT_REFUSED(forward(&good, saved, &options, self), "activation: got 9");
  options = options_of_reference();
  options.statistics = 2;
  EXPECT_REFUSED(forward(&good, saved, &options, self), "statistics: got 2");
  options = options_of_reference();
  options.cumulative_average = 1; /* asks for num_batches_tracked, which is absent here */
  EXPECT_REFUSED(forward(&good, saved, &options, self), "num_batches_tracked: got null");
  options = options_of_reference();

  syncbn_communicator odd = *self;
  odd.size = 0;
  EXPECT_REFUSED(forward(&good, saved, &options, &odd), "communicator.size: got 0");
  odd.size = 2049;
  EXPECT_REFUSED(forward(&good, saved, &options, &odd), "communicator.size: got 2049");
  odd = *self;
  odd.rank = 1;
  EXPECT_REFUSED(forward(&good, saved, &options, &odd), "communicator.rank: got 1");
  odd = *self;
  odd.all_reduce_sum = NULL;
  EXPECT_REFUSED(forward(&good, saved, &options, &odd), "communicator.all_reduce_sum");
  odd = *self;
  odd.all_gather = NULL;
  options.statistics = SYNCBN_WELFORD;
  EXPECT_REFUSED(forward(&good, saved, &options, &odd), "communicator.all_gather: got NULL");
  options = options_of_reference();
  odd = *self;
  odd.size = 2;
  odd.all_reduce_sum = fails_oddly;
  EXPECT_ERROR(forward(&good, saved, &options, &odd), SYNCBN_ERROR, "the network is down");
  EXPECT(syncbn_last_error_ranks(NULL) == 0);
  EXPECT(syncbn_saved_count(saved) == 0);
  syncbn_saved_destroy(saved);

  EXPECT_REFUSED(syncbn_thread_pool_create(0, &executor), "threads: got 0");
  EXPECT_REFUSED(syncbn_thread_pool_create(1, NULL), "executor: got NULL");
  const syncbn_executor_functions no_function = {sizeof(no_function), NULL, 1, NULL};
  const syncbn_executor_functions no_thread = {sizeof(no_thread), NULL, 0, NULL};
  EXPECT_REFUSED(syncbn_executor_create(NULL, &executor), "functions: got NULL");
  EXPECT_REFUSED(syncbn_executor_create(&no_function, &executor), "functions.parallel_for");
  EXPECT_REFUSED(syncbn_executor_create(&no_thread, &executor), "functions.concurrency: got 0");

  EXPECT(executor == NULL);
  EXPECT_SAME(&m, &untouched);
}

void test_errors(void) {
  welford_gathers();
  different_calls_are_an_error_on_every_rank();
  a_refused_argument_reaches_the_other_rank();
  sizes_of_structs();
  refused_calls_of_a_layer();
  group_gone_before_its_layer();
  bad_arguments();
}
