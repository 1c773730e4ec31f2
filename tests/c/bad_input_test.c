// SPDX-License-Identifier: Apache-2.0
/* A table of calls that the C interface refuses, besides those of c_api_errors_test.c: a code, a
   text with the argument, what was given and what is allowed; nothing is changed, and the next step
   has the bits of one that never saw them. */

#include <stddef.h>

#include "step.h"

typedef struct arena {
  step_memory m;
  views v;
  syncbn_batch_norm_options options;
  syncbn_communicator group;
  int64_t tracked;          /* in the views */
  syncbn_saved* of_forward; /* of a good one, */
  void* x_of_forward;       /* and its x */
  syncbn_saved* saved;      /* stays without content */
} arena;

static const int64_t kNoStride[3] = {0, PLANE, 1};

static void make_arena(arena* a, syncbn_saved* of_forward, syncbn_saved* saved) {
  fill(&a->m);
  view(&a->v, &a->m, 0, SAMPLES);
  a->options = options_of_reference();
  a->group = *syncbn_self_communicator();
  a->tracked = 7;
  a->v.num_batches_tracked = &a->tracked;
  a->of_forward = of_forward;
  a->saved = saved;
}

static syncbn_status run_forward(arena* a) {
  return forward(&a->v, a->saved, &a->options, &a->group);
}
static syncbn_status backward_of(arena* a, const syncbn_backward_arguments* arguments) {
  syncbn_batch_norm* layer = NULL;
  EXPECT_OK(syncbn_batch_norm_create(&a->options, &a->group, &layer));
  const syncbn_status status = syncbn_batch_norm_backward(layer, arguments, a->of_forward, NULL);
  syncbn_batch_norm_destroy(layer);
  return status;
}
static syncbn_status run_backward(arena* a, int32_t affine) {
  syncbn_backward_arguments arguments = backward_arguments(&a->v);
  arguments.affine = affine;
  return backward_of(a, &arguments);
}
static syncbn_status run_evaluate(arena* a, const syncbn_evaluate_arguments* arguments) {
  syncbn_batch_norm* layer = NULL;
  EXPECT_OK(syncbn_batch_norm_create(&a->options, &a->group, &layer));
  const syncbn_status status = syncbn_batch_norm_evaluate(layer, arguments, NULL);
  syncbn_batch_norm_destroy(layer);
  return status;
}

/* The functions of a group. */
static int32_t lost(void* user_data, int64_t* words, int64_t count) {
  (void)user_data, (void)words, (void)count;
  const int32_t gone = 1;
  syncbn_set_last_error("rank 1 is gone", &gone, -1);
  return SYNCBN_PEER_LOST;
}
static int32_t late(void* user_data, int64_t* words, int64_t count) {
  (void)user_data, (void)words, (void)count;
  return SYNCBN_TIMEOUT;
}
static int32_t no_memory(void* user_data, const void* in, int64_t bytes, void* out) {
  (void)user_data, (void)in, (void)bytes, (void)out;
  return SYNCBN_OUT_OF_MEMORY;
}

/* The layer. */
static syncbn_status y_in_one_place(arena* a) {
  a->v.y.strides = kNoStride;
  return run_forward(a);
}
static syncbn_status negative_counter(arena* a) {
  a->tracked = -1;
  a->options.cumulative_average = 1;
  return run_forward(a);
}
static syncbn_status negative_eps(arena* a) {
  a->options.eps = -1e-5;
  return run_forward(a);
}
static syncbn_status input_on_a_gpu(arena* a) {
  a->v.weight.device = SYNCBN_CUDA;
  return run_forward(a);
}
static syncbn_status mask_on_a_gpu(arena* a) {
  a->v.mask.device = 2;
  return run_forward(a);
}
static syncbn_status mask_of_nothing(arena* a) {
  a->v.mask.data = NULL;
  return run_backward(a, SYNCBN_SHARE);
}
static syncbn_status unknown_gradients(arena* a) { return run_backward(a, 7); }
static syncbn_status dx_in_one_place(arena* a) {
  a->v.dx.strides = kNoStride;
  return run_backward(a, SYNCBN_GLOBAL);
}
static syncbn_status dweight_of_one_entry(arena* a) {
  static const int64_t one[1] = {1};
  a->v.dweight.sizes = one;
  return run_backward(a, SYNCBN_GLOBAL);
}
static syncbn_status evaluation_without_arguments(arena* a) { return run_evaluate(a, NULL); }
static syncbn_status forward_of_a_lost_group(arena* a) {
  a->group.size = 2;
  a->group.all_reduce_sum = lost;
  return run_forward(a);
}
static syncbn_status backward_of_a_late_group(arena* a) {
  a->group.size = 2;
  a->group.all_reduce_sum = late;
  a->v.x.data = a->x_of_forward;
  return run_backward(a, SYNCBN_SHARE);
}
static syncbn_status backward_of_another_x(arena* a) { return run_backward(a, SYNCBN_SHARE); }
static syncbn_status backward_without_a_mask(arena* a) {
  syncbn_backward_arguments arguments = backward_arguments(&a->v);
  a->v.x.data = a->x_of_forward;
  arguments.mask = NULL;
  return backward_of(a, &arguments);
}
static syncbn_status gather_without_memory(arena* a) {
  a->group.all_gather = no_memory;
  a->options.statistics = SYNCBN_WELFORD;
  return run_forward(a);
}

static const struct {
  syncbn_status (*call)(arena*);
  syncbn_status code;
  const char* text;
} kCases[] = {
    {y_in_one_place, SYNCBN_INVALID_ARGUMENT, "y: got stride 0 of axis 0"},
    {negative_counter, SYNCBN_INVALID_ARGUMENT, "num_batches_tracked: got -1, expected 0 to 2^53"},
    {negative_eps, SYNCBN_INVALID_ARGUMENT, "eps: got -1e-05, expected a finite number"},
    {input_on_a_gpu, SYNCBN_INVALID_ARGUMENT,
     "weight: got a tensor on CUDA, expected the device of x, CPU"},
    {mask_on_a_gpu, SYNCBN_INVALID_ARGUMENT, "mask: got 2, expected SYNCBN_CPU or SYNCBN_CUDA"},
    {mask_of_nothing, SYNCBN_INVALID_ARGUMENT, "mask: got a null pointer for shape (7, 10)"},
    {unknown_gradients, SYNCBN_INVALID_ARGUMENT,
     "affine: got 7, expected SYNCBN_SHARE or SYNCBN_GLOBAL"},
    {backward_of_another_x, SYNCBN_INVALID_ARGUMENT,
     "x: got other memory than the forward did, expected the same x"},
    {backward_without_a_mask, SYNCBN_INVALID_ARGUMENT,
     "mask: got none, expected that of the forward"},
    {dx_in_one_place, SYNCBN_INVALID_ARGUMENT, "dx: got stride 0 of axis 0"},
    {dweight_of_one_entry, SYNCBN_INVALID_ARGUMENT, "dweight: got shape (1), expected (3)"},
    {evaluation_without_arguments, SYNCBN_INVALID_ARGUMENT,
     "layer, evaluation: arguments: got NULL"},
    {forward_of_a_lost_group, SYNCBN_PEER_LOST, "rank 1 is gone"},
    {backward_of_a_late_group, SYNCBN_TIMEOUT,
     "communicator.all_reduce_sum: got status 4, expected SYNCBN_OK"},
    {gather_without_memory, SYNCBN_OUT_OF_MEMORY, "out of memory"},
};

/* A forward, its backward and an evaluation. */
static void good_step(arena* a) {
  EXPECT_OK(run_forward(a));
  a->of_forward = a->saved;
  EXPECT_OK(run_backward(a, SYNCBN_SHARE));
  const syncbn_evaluate_arguments arguments = evaluate_arguments(&a->v);
  EXPECT_OK(run_evaluate(a, &arguments));
  EXPECT(a->tracked == 8);
}

void test_bad_input(void) {
  arena untouched, a, first;
  syncbn_saved *of_forward = NULL, *saved = NULL;
  EXPECT_OK(syncbn_saved_create(&of_forward));
  EXPECT_OK(syncbn_saved_create(&saved));
  make_arena(&first, NULL, of_forward);
  EXPECT_OK(run_forward(&first));
  make_arena(&untouched, NULL, NULL);
  for (size_t i = 0; i < sizeof(kCases) / sizeof(kCases[0]); ++i) {
    make_arena(&a, of_forward, saved);
    a.x_of_forward = first.v.x.data;
    EXPECT_ERROR(kCases[i].call(&a), kCases[i].code, kCases[i].text);
    EXPECT(syncbn_saved_count(saved) == 0);
    EXPECT(a.tracked == 7 || a.tracked == -1);
    EXPECT_SAME(&a.m, &untouched.m);
  }
  make_arena(&first, NULL, of_forward);
  good_step(&first);
  make_arena(&a, NULL, saved);
  good_step(&a);
  EXPECT_SAME(&a.m, &first.m);
  syncbn_saved_destroy(of_forward);
  syncbn_saved_destroy(saved);

  /* What has nothing to return takes NULL. */
  syncbn_saved_destroy(NULL);
  syncbn_batch_norm_destroy(NULL);
  syncbn_executor_destroy(NULL);
  syncbn_set_last_error(NULL, NULL, 0);
  EXPECT(syncbn_saved_count(NULL) == 0 && syncbn_saved_channels(NULL) == 0);
  EXPECT(syncbn_saved_mean(NULL) == NULL && syncbn_saved_var(NULL) == NULL);
  EXPECT(syncbn_saved_rstd(NULL) == NULL);
}
