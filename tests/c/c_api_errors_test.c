// SPDX-License-Identifier: Apache-2.0
/* Bad arguments, calls that differ and ranks that refuse: a code and a text on every rank. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"
#include "step.h"

typedef void change_call(fixture*, int rank);

typedef struct outcome {
  group* group;
  change_call* change;
  step_memory ranks[RANKS];
  syncbn_status status[RANKS];
  char text[RANKS][400];
  char layer[RANKS][20];
  int32_t odd[RANKS]; /* the only rank that the error is about, or -1 */
} outcome;

static int32_t only_rank(void) {
  const int32_t* ranks = NULL;
  return syncbn_last_error_ranks(&ranks) == 1 ? ranks[0] : -1;
}

/* A forward of a whole batch, which `change` may spoil. */
static void forward_of_rank(void* context, int rank) {
  outcome* o = context;
  const syncbn_communicator communicator = group_rank(o->group, rank);
  fixture x;
  make_fixture(&x);
  o->change(&x, rank);
  EXPECT_OK(syncbn_saved_create(&x.saved));
  o->status[rank] = syncbn_batch_norm_create(&x.options, &communicator, &x.layer);
  EXPECT((x.layer != NULL) == (o->status[rank] == SYNCBN_STATUS_OK));
  if (x.layer != NULL) {
    o->status[rank] =
        syncbn_batch_norm_forward(x.layer, x.f.x == NULL ? NULL : &x.f, x.saved, NULL);
  }
  snprintf(o->text[rank], sizeof(o->text[rank]), "%s", syncbn_last_error());
  snprintf(o->layer[rank], sizeof(o->layer[rank]), "%s", syncbn_last_error_layer());
  o->odd[rank] = only_rank();
  o->ranks[rank] = x.m;
  destroy_fixture(&x);
}

static void to_names(fixture* x, int rank) { x->options.name = rank == 1 ? "head" : "stem"; }
static void to_bad_y(fixture* x, int rank) {
  if (rank == 1) {
    x->v.y.dtype = 77;
  }
}
static void to_no_arguments(fixture* x, int rank) {
  x->f.x = rank == 1 ? NULL : x->f.x; /* then there are none at all */
}
static void to_unnamed(fixture* x, int rank) {
  x->options.name = rank == 1 ? NULL : x->options.name;
}
static void to_small_options(fixture* x, int rank) { x->options.struct_size -= rank == 1; }
static void to_float64(fixture* x, int rank) {
  static double values[ELEMENTS], results[ELEMENTS];
  if (rank == 1) {
    x->v.x.dtype = x->v.y.dtype = SYNCBN_DTYPE_FLOAT64;
    x->v.x.data = values;
    x->v.y.data = results;
  }
}

static outcome* run_outcome(change_call* change) {
  outcome* o = calloc(1, sizeof(outcome));
  o->change = change;
  o->group = group_create();
  run_ranks(forward_of_rank, o);
  group_destroy(o->group);
  return o;
}

/* torch.nn.SyncBatchNorm mixes such ranks' statistics without a word, or hangs. */
static void different_calls_are_an_error_on_every_rank(void) {
  step_memory untouched;
  fill(&untouched);
  outcome* o = run_outcome(to_names);
  for (int r = 0; r < RANKS; ++r) {
    EXPECT(o->status[r] == SYNCBN_STATUS_DIVERGENCE);
    EXPECT(strstr(o->text[r], "layer: stem on rank 0, head on rank 1") != NULL);
    EXPECT(strcmp(o->layer[r], r == 1 ? "head" : "stem") == 0);
    EXPECT(o->odd[r] == 1);
    EXPECT_SAME(&o->ranks[r], &untouched);
  }
  free(o);
  /* Messages that do not fit: the callback has a code, no text. */
  o = run_outcome(to_float64);
  for (int r = 0; r < RANKS; ++r) {
    EXPECT(o->status[r] == SYNCBN_STATUS_DIVERGENCE);
    EXPECT(strstr(o->text[r], "dtype: float32 on rank 0, float64 on rank 1") != NULL);
    EXPECT(strcmp(o->layer[r], "layer") == 0);
    EXPECT(o->odd[r] == 1);
  }
  free(o);
}

/* What rank 1 refuses, and what rank 0 gets to know of it. */
static void expect_refused_on_rank_1(change_call* change, const char* text, const char* of_other) {
  step_memory untouched;
  fill(&untouched);
  outcome* o = run_outcome(change);
  EXPECT(o->status[1] == SYNCBN_STATUS_INVALID_ARGUMENT);
  EXPECT(strncmp(o->text[1], text, strlen(text)) == 0);
  EXPECT(o->status[0] == SYNCBN_STATUS_PEER_LOST);
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
  expect_refused_on_rank_1(to_bad_y,
                           "layer, call 0, forward: y: got 77, expected SYNCBN_DTYPE_FLOAT16",
                           LOST "layer, call 0, forward: y: got 77");
  expect_refused_on_rank_1(to_no_arguments, "layer, call 0, forward: arguments: got NULL",
                           LOST "layer, call 0, forward: arguments: got NULL");
  /* Where a layer is made. */
  expect_refused_on_rank_1(to_unnamed, "options.name: got none, expected this layer's own name",
                           LOST "options.name: got none");
  expect_refused_on_rank_1(to_small_options, "options.struct_size: got ",
                           LOST "options.struct_size: got ");
}

#define EXPECT_REFUSED(call, part) EXPECT_ERROR(call, SYNCBN_STATUS_INVALID_ARGUMENT, part)

/* A struct of another size than the library's. */
static void expect_size_refused(syncbn_status status, const char* name, size_t got) {
  char text[100];
  snprintf(text, sizeof(text), "%s.struct_size: got %d, expected %d", name, (int)got, (int)got - 8);
  EXPECT_REFUSED(status, text);
}

static void sizes_of_structs(void) {
  fixture x;
  make_fixture(&x);
  syncbn_communicator communicator = *syncbn_self_communicator();
  syncbn_executor_functions functions = {.struct_size = sizeof(functions)};
  syncbn_evaluate_backward_arguments eb = {.struct_size = sizeof(eb)};
  syncbn_executor* executor = NULL;
  EXPECT(communicator.struct_size == sizeof(communicator));
  x.options.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_create(&x.options, &communicator, &x.layer), "options",
                      x.options.struct_size);
  x.options.struct_size -= 8;
  communicator.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_create(&x.options, &communicator, &x.layer), "communicator",
                      communicator.struct_size);
  functions.struct_size += 8;
  expect_size_refused(syncbn_executor_create(&functions, &executor), "functions",
                      functions.struct_size);
  EXPECT(x.layer == NULL && executor == NULL);
  make_layer(&x, syncbn_self_communicator());
  x.f.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL), "arguments",
                      x.f.struct_size);
  x.b.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_backward(x.layer, &x.b, x.saved, NULL), "arguments",
                      x.b.struct_size);
  x.e.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_evaluate(x.layer, &x.e, NULL), "arguments",
                      x.e.struct_size);
  eb.struct_size += 8;
  expect_size_refused(syncbn_batch_norm_evaluate_backward(x.layer, &eb, NULL), "arguments",
                      eb.struct_size);
  destroy_fixture(&x);
}

/* A refused forward counts as a call, and empties what it was to fill. */
static void refused_calls_of_a_layer(void) {
  fixture x;
  make_fixture(&x);
  make_layer(&x, syncbn_self_communicator());
  EXPECT_OK(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL));
  EXPECT(syncbn_saved_count(x.saved) > 0);
  EXPECT_REFUSED(syncbn_batch_norm_forward(NULL, &x.f, x.saved, NULL), "layer: got NULL");
  EXPECT(strcmp(syncbn_last_error_layer(), "") == 0);
  EXPECT_REFUSED(syncbn_batch_norm_forward(x.layer, &x.f, NULL, NULL),
                 "layer, call 1, forward: saved: got NULL");
  EXPECT(strcmp(syncbn_last_error_layer(), "layer") == 0);
  EXPECT_OK(syncbn_batch_norm_backward(x.layer, &x.b, x.saved, NULL));
  x.f.y = NULL;
  EXPECT_REFUSED(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL),
                 "layer, call 2, forward: y: got NULL");
  EXPECT(syncbn_saved_count(x.saved) == 0 && syncbn_saved_channels(x.saved) == 0);
  EXPECT_REFUSED(syncbn_batch_norm_backward(x.layer, &x.b, x.saved, NULL),
                 "saved: got one without content, expected one that a forward filled");
  EXPECT_REFUSED(syncbn_batch_norm_backward(x.layer, &x.b, NULL, NULL),
                 "layer, backward: saved: got NULL");
  x.f = forward_arguments(&x.v);
  x.v.weight.sizes = x.v.sizes;
  EXPECT_REFUSED(syncbn_batch_norm_forward(x.layer, &x.f, x.saved, NULL),
                 "layer, call 3, forward, 3 channels, float32: weight: got shape (7)");
  x.e.y = NULL;
  EXPECT_REFUSED(syncbn_batch_norm_evaluate(x.layer, &x.e, NULL), "layer, evaluation: y: got NULL");
  EXPECT_REFUSED(syncbn_batch_norm_evaluate(x.layer, NULL, NULL),
                 "layer, evaluation: arguments: got NULL");
  x.e = evaluate_arguments(&x.v);
  x.v.x.device = SYNCBN_DEVICE_CUDA; /* SYNCBN_STATUS_UNAVAILABLE in a build without CUDA */
  EXPECT(syncbn_batch_norm_evaluate(x.layer, &x.e, NULL) != SYNCBN_STATUS_OK);
  EXPECT(strstr(syncbn_last_error(), "CUDA") != NULL);
  EXPECT_REFUSED(syncbn_batch_norm_create(&x.options, syncbn_self_communicator(), NULL),
                 "layer: got NULL");
  EXPECT_REFUSED(syncbn_saved_create(NULL), "saved: got NULL");
  destroy_fixture(&x);
}

/* The functions of a group. */
static int32_t fails_oddly(void* user_data, int64_t* words, int64_t count) {
  (void)user_data, (void)words, (void)count;
  syncbn_set_last_error("the network is down", NULL, 1);
  return -5;
}
static int32_t lost(void* user_data, int64_t* words, int64_t count) {
  (void)user_data, (void)words, (void)count;
  const int32_t gone = 1;
  syncbn_set_last_error("rank 1 is gone", &gone, -1);
  return SYNCBN_STATUS_PEER_LOST;
}
static int32_t late(void* user_data, int64_t* words, int64_t count) {
  (void)user_data, (void)words, (void)count;
  return SYNCBN_STATUS_TIMEOUT;
}
static int32_t no_memory(void* user_data, int64_t* words, int64_t count) {
  (void)user_data, (void)words, (void)count;
  return SYNCBN_STATUS_OUT_OF_MEMORY;
}

static void keep_reason(void* user_data, const char* reason) { strncpy(user_data, reason, 199); }

static syncbn_status backward(const fixture* x, const views* v, int32_t affine) {
  syncbn_backward_arguments arguments = backward_arguments(v);
  arguments.affine = affine;
  return syncbn_batch_norm_backward(x->layer, &arguments, x->saved, NULL);
}

static void bad_arguments(fixture* x) {
  const step_memory untouched = x->m;
  const views good = x->v;
  views v;
  const syncbn_communicator* self = syncbn_self_communicator();
  syncbn_batch_norm_options options = x->options;
  syncbn_saved* saved = NULL;
  syncbn_executor* executor = NULL;
  EXPECT_OK(syncbn_saved_create(&saved));

#define WITH(change) (v = good, (change), &v)
#define FORWARD_FAILS(views, options, group, code, part)                      \
  (EXPECT_ERROR(forward((views), saved, (options), (group)), (code), (part)), \
   EXPECT(syncbn_saved_count(saved) == 0))
#define FORWARD_REFUSED(views, options, group, part) \
  FORWARD_FAILS(views, options, group, SYNCBN_STATUS_INVALID_ARGUMENT, part)
  FORWARD_REFUSED(&good, &options, NULL, "communicator: got NULL");
  FORWARD_REFUSED(&good, NULL, self, "options: got NULL");
  FORWARD_REFUSED(WITH(v.x.dtype = 4), &options, self, "x: got 4");
  FORWARD_REFUSED(WITH(v.x.device = -1), &options, self, "x: got -1");
  FORWARD_REFUSED(WITH(v.x.ndim = -1), &options, self, "x: got -1 axes");
  FORWARD_REFUSED(WITH(v.x.ndim = 13), &options, self,
                  "x: got 13 axes, expected 2 to 12 axes (N, C, spatial...)");
  FORWARD_REFUSED(WITH(v.y.ndim = -2147483647), &options, self,
                  "y: got -2147483647 axes, expected 2 to 12 axes (N, C, spatial...)");
  FORWARD_REFUSED(WITH(v.weight.ndim = 13), &options, self,
                  "weight: got 13 axes, expected 1 axis (C)");
  FORWARD_REFUSED(WITH(v.mask.ndim = 2147483647), &options, self,
                  "mask: got 2147483647 axes, expected 1 to 11 axes (N, spatial...)");
  FORWARD_REFUSED(WITH(v.x.sizes = NULL), &options, self, "x.sizes: got NULL");
  FORWARD_REFUSED(WITH(v.mask.device = 2), &options, self,
                  "mask: got 2, expected SYNCBN_DEVICE_CPU or SYNCBN_DEVICE_CUDA");
  options.activation.kind = 9;
  FORWARD_REFUSED(&good, &options, self, "activation: got 9");
  options = x->options;
  options.statistics = 2;
  FORWARD_REFUSED(&good, &options, self, "statistics: got 2");
  options = x->options;
  options.cumulative_average = 1; /* asks for num_batches_tracked, which is absent here */
  FORWARD_REFUSED(&good, &options, self, "num_batches_tracked: got null");
  options.cumulative_average = -7;
  FORWARD_REFUSED(&good, &options, self, "cumulative_average: got -7, expected 0 or 1");
  const syncbn_batch_norm_options fresh = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  FORWARD_REFUSED(&good, &fresh, self, "channels: got none, expected 0 to 2^31");
  options = x->options;

  EXPECT_REFUSED(
      backward(x, &good, 7),
      "affine: got 7, expected SYNCBN_AFFINE_GRADIENTS_SHARE or SYNCBN_AFFINE_GRADIENTS_GLOBAL");
  EXPECT_REFUSED(backward(x, WITH(v.x.data = x->m.dy), SYNCBN_AFFINE_GRADIENTS_SHARE),
                 "x: got other memory than the forward did, expected the same x");
  syncbn_backward_arguments unmasked = x->b;
  unmasked.mask = NULL;
  EXPECT_REFUSED(syncbn_batch_norm_backward(x->layer, &unmasked, x->saved, NULL),
                 "mask: got none, expected that of the forward");

  syncbn_communicator odd = *self;
  odd.size = 0;
  FORWARD_REFUSED(&good, &options, &odd, "communicator.size: got 0");
  odd.size = 2049;
  FORWARD_REFUSED(&good, &options, &odd, "communicator.size: got 2049");
  odd = *self;
  odd.rank = 1;
  FORWARD_REFUSED(&good, &options, &odd, "communicator.rank: got 1");
  syncbn_group* group = NULL;
  EXPECT_OK(syncbn_thread_group_create(2, 1000, &group));
  odd = *syncbn_group_rank(group, 1);
  odd.rank = 2;
  FORWARD_REFUSED(&good, &options, &odd,
                  "communicator: got rank 2 of 2, expected rank 1 of 2, as syncbn_group_rank");
  syncbn_group_destroy(group);
  odd = *self;
  char told[200] = "";
  odd.rank = -2147483647 - 1;
  odd.size = 2048;
  odd.user_data = told;
  odd.abandon = keep_reason; /* so that the other ranks can hear of it */
  FORWARD_REFUSED(&good, &options, &odd, "communicator.rank: got -2147483648");
  EXPECT(strstr(told, "communicator.rank: got -2147483648, expected 0 to size - 1") != NULL);
  odd = *self;
  odd.all_reduce_sum = NULL;
  FORWARD_REFUSED(&good, &options, &odd, "communicator.all_reduce_sum");
  odd = *self;
  odd.size = 2;
  odd.all_reduce_sum = no_memory;
  FORWARD_FAILS(&good, &options, &odd, SYNCBN_STATUS_OUT_OF_MEMORY, "out of memory");
  odd.all_reduce_sum = fails_oddly;
  FORWARD_FAILS(&good, &options, &odd, SYNCBN_STATUS_ERROR, "the network is down");
  EXPECT(syncbn_last_error_ranks(NULL) == 0);
  odd.all_reduce_sum = lost;
  FORWARD_FAILS(&good, &options, &odd, SYNCBN_STATUS_PEER_LOST, "rank 1 is gone");
  odd.all_reduce_sum = late;
  syncbn_batch_norm* of_two = NULL;
  EXPECT_OK(syncbn_batch_norm_create(&options, &odd, &of_two));
  EXPECT_ERROR(syncbn_batch_norm_backward(of_two, &x->b, x->saved, NULL), SYNCBN_STATUS_TIMEOUT,
               "communicator.all_reduce_sum: got status 4, expected SYNCBN_STATUS_OK");
  syncbn_batch_norm_destroy(of_two);
  syncbn_saved_destroy(saved);

  EXPECT_REFUSED(syncbn_thread_pool_create(0, &executor), "threads: got 0");
  EXPECT_REFUSED(syncbn_thread_pool_create(1, NULL), "executor: got NULL");
  const syncbn_executor_functions no_function = {sizeof(no_function), NULL, 1, NULL};
  const syncbn_executor_functions no_thread = {sizeof(no_thread), NULL, 0, NULL};
  EXPECT_REFUSED(syncbn_executor_create(NULL, &executor), "functions: got NULL");
  EXPECT_REFUSED(syncbn_executor_create(&no_function, &executor), "functions.parallel_for");
  EXPECT_REFUSED(syncbn_executor_create(&no_thread, &executor), "functions.concurrency: got 0");
  EXPECT(executor == NULL);
  EXPECT_SAME(&x->m, &untouched);
}

/* Nothing is changed, and the next step has the bits of one that never saw them. */
static void bad_arguments_change_nothing_exact(void) {
  fixture steps[2];
  int64_t tracked[2] = {7, 7};
  for (int i = 0; i < 2; ++i) {
    fixture* x = &steps[i];
    make_fixture(x);
    make_layer(x, syncbn_self_communicator());
    for (int forwards = 0; forwards < 2; ++forwards) {
      EXPECT_OK(syncbn_batch_norm_forward(x->layer, &x->f, x->saved, NULL));
      if (i == 1 && forwards == 0) {
        bad_arguments(x);
      }
      x->f.num_batches_tracked = &tracked[i];
    }
    EXPECT_OK(backward(x, &x->v, SYNCBN_AFFINE_GRADIENTS_SHARE));
    EXPECT_OK(syncbn_batch_norm_evaluate(x->layer, &x->e, NULL));
    destroy_fixture(x);
    EXPECT(tracked[i] == 8);
  }
  EXPECT_SAME(&steps[1].m, &steps[0].m);
}

static void what_has_nothing_to_return_takes_null(void) {
  syncbn_saved_destroy(NULL);
  syncbn_batch_norm_destroy(NULL);
  syncbn_executor_destroy(NULL);
  syncbn_set_last_error(NULL, NULL, 0);
  EXPECT(syncbn_saved_count(NULL) == 0 && syncbn_saved_channels(NULL) == 0);
  EXPECT(syncbn_saved_mean(NULL) == NULL && syncbn_saved_var(NULL) == NULL);
  EXPECT(syncbn_saved_rstd(NULL) == NULL);
}

void test_errors(void) {
  different_calls_are_an_error_on_every_rank();
  a_refused_argument_reaches_the_other_rank();
  sizes_of_structs();
  refused_calls_of_a_layer();
  bad_arguments_change_nothing_exact();
  what_has_nothing_to_return_takes_null();
}
