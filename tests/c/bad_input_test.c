// SPDX-License-Identifier: Apache-2.0
/* A table of calls that the C interface refuses, besides those of c_api_errors_test.c: a code, a
   text with the argument, what was given and what is allowed; nothing is changed, and the next step
   has the bits of one that never saw them. */

#include <stddef.h>

#include "step.h"

enum { WORDS = SYNCBN_HEADER_WORDS + 19 * CHANNELS };

typedef struct arena {
  step_memory m;
  views v;
  syncbn_batch_norm_options options;
  syncbn_communicator group;
  int64_t tracked; /* in the views */
  int64_t message[WORDS];
  double mean[CHANNELS], var[CHANNELS], rstd[CHANNELS], coefficients[3 * CHANNELS];
  syncbn_message_info info;
  syncbn_saved* of_forward; /* of a good one, */
  void* x_of_forward;       /* and its x */
  syncbn_saved* saved;      /* stays without content */
} arena;

static const int64_t kNoStride[3] = {0, PLANE, 1};
static const int64_t kOneEntry[1] = {0};
static const int64_t kWide[3] = {0, ((int64_t)1 << 31) + 1, PLANE};
/* 6 words each are 2 words modulo 2^64. */
static const int64_t kWrapping = 3074457345618258603;

static void make_arena(arena* a, syncbn_saved* of_forward, syncbn_saved* saved) {
  fill(&a->m);
  view(&a->v, &a->m, 0, SAMPLES);
  a->options = options_of_reference();
  a->group = *syncbn_self_communicator();
  a->tracked = 7;
  a->v.num_batches_tracked = &a->tracked;
  for (int i = 0; i < WORDS; ++i) {
    a->message[i] = 0;
  }
  for (int c = 0; c < CHANNELS; ++c) {
    a->mean[c] = a->var[c] = a->rstd[c] = 1;
    a->coefficients[3 * c] = a->coefficients[3 * c + 1] = a->coefficients[3 * c + 2] = 1;
  }
  const syncbn_message_info info = {8, 1, 0, 1, SYNCBN_FLOAT32};
  a->info = info;
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
static syncbn_status running_var_in_one_place(arena* a) {
  a->v.running_var.strides = kOneEntry;
  return run_forward(a);
}
static syncbn_status negative_counter(arena* a) {
  a->tracked = -1;
  a->options.cumulative_average = 1;
  return run_forward(a);
}
static syncbn_status wide_input(arena* a) {
  a->v.x.sizes = kWide;
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
static syncbn_status evaluation_of_half(arena* a) {
  a->v.running_var.ndim = 0;
  a->v.running_var.data = NULL;
  const syncbn_evaluate_arguments arguments = evaluate_arguments(&a->v);
  return run_evaluate(a, &arguments);
}
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

/* The passes. */
static syncbn_status words_of_many_channels(arena* a) {
  return syncbn_message_words(SYNCBN_FLOAT16, kWrapping, &a->message[0]);
}
static syncbn_status finalize_without_info(arena* a) {
  return syncbn_finalize_moments(NULL, a->message, a->mean, a->var, a->rstd, CHANNELS, 1e-5, NULL);
}
static syncbn_status finalize_without_words(arena* a) {
  return syncbn_finalize_moments(&a->info, NULL, a->mean, a->var, a->rstd, CHANNELS, 1e-5, NULL);
}
static syncbn_status finalize_of_an_unknown_dtype(arena* a) {
  a->info.dtype = 9;
  return syncbn_finalize_moments(&a->info, a->message, a->mean, a->var, a->rstd, CHANNELS, 1e-5,
                                 NULL);
}
static syncbn_status header_of_nothing(arena* a) {
  (void)a;
  return syncbn_check_header(NULL);
}
static syncbn_status rejection_to_nowhere(arena* a) {
  (void)a;
  return syncbn_rejection_header(0, NULL);
}
static syncbn_status normalize_without_y(arena* a) {
  return syncbn_normalize(&a->v.x, NULL, a->mean, a->rstd, NULL, NULL, NULL, NULL, NULL, NULL,
                          NULL);
}
static syncbn_status normalize_with_an_unknown_activation(arena* a) {
  const syncbn_activation odd = {3, 0.5};
  return syncbn_normalize(&a->v.x, NULL, a->mean, a->rstd, NULL, NULL, NULL, &a->v.y, NULL, &odd,
                          NULL);
}
static syncbn_status update_with_a_large_factor(arena* a) {
  return syncbn_update_running_statistics(&a->v.running_mean, &a->v.running_var, a->mean, a->var,
                                          CHANNELS, 8, 1.5);
}
static syncbn_status update_by_a_negative_count(arena* a) {
  return syncbn_update_running_statistics(&a->v.running_mean, &a->v.running_var, a->mean, a->var,
                                          CHANNELS, -8, 0.5);
}
static syncbn_status gradients_without_a_message(arena* a) {
  return syncbn_local_gradients(&a->v.dy, &a->v.x, NULL, a->mean, a->rstd, NULL, NULL, NULL, 0,
                                NULL);
}
static syncbn_status gradients_without_dy(arena* a) {
  return syncbn_local_gradients(NULL, &a->v.x, NULL, a->mean, a->rstd, NULL, NULL, a->message, 0,
                                NULL);
}
static syncbn_status coefficients_to_nowhere(arena* a) {
  return syncbn_finalize_gradients(&a->info, a->message, a->mean, a->rstd, NULL, NULL, NULL, NULL,
                                   CHANNELS, 8, NULL);
}
static syncbn_status shares_of_an_unknown_dtype(arena* a) {
  return syncbn_affine_gradient_shares(a->message, -1, a->mean, a->rstd, &a->v.dweight, &a->v.dbias,
                                       CHANNELS, NULL);
}
static syncbn_status input_gradient_without_coefficients(arena* a) {
  return syncbn_input_gradient(&a->v.dy, &a->v.x, NULL, a->mean, a->rstd, NULL, NULL, &a->v.dx,
                               NULL);
}

static const struct {
  syncbn_status (*call)(arena*);
  syncbn_status code;
  const char* text;
} kCases[] = {
    {y_in_one_place, SYNCBN_INVALID_ARGUMENT, "y: got stride 0 of axis 0"},
    {running_var_in_one_place, SYNCBN_INVALID_ARGUMENT, "running_var: got stride 0 of axis 0"},
    {negative_counter, SYNCBN_INVALID_ARGUMENT, "num_batches_tracked: got -1, expected 0 to 2^53"},
    {wide_input, SYNCBN_INVALID_ARGUMENT,
     "x: got shape (0, 2147483649, 10), expected at most 2^31 channels"},
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
    {evaluation_of_half, SYNCBN_INVALID_ARGUMENT,
     "running_mean, running_var: got only one of them, expected both"},
    {forward_of_a_lost_group, SYNCBN_PEER_LOST, "rank 1 is gone"},
    {backward_of_a_late_group, SYNCBN_TIMEOUT,
     "communicator.all_reduce_sum: got status 4, expected SYNCBN_OK"},
    {gather_without_memory, SYNCBN_OUT_OF_MEMORY, "out of memory"},
    {words_of_many_channels, SYNCBN_INVALID_ARGUMENT,
     "channels: got 3074457345618258603, expected 0 to 2^31"},
    {finalize_without_info, SYNCBN_INVALID_ARGUMENT, "info: got NULL"},
    {finalize_without_words, SYNCBN_INVALID_ARGUMENT, "words: got NULL, expected an array"},
    {finalize_of_an_unknown_dtype, SYNCBN_INVALID_ARGUMENT, "info.dtype: got 9"},
    {header_of_nothing, SYNCBN_INVALID_ARGUMENT, "info: got NULL"},
    {rejection_to_nowhere, SYNCBN_INVALID_ARGUMENT, "message: got NULL"},
    {normalize_without_y, SYNCBN_INVALID_ARGUMENT, "y: got NULL"},
    {normalize_with_an_unknown_activation, SYNCBN_INVALID_ARGUMENT, "activation: got 3"},
    {update_with_a_large_factor, SYNCBN_INVALID_ARGUMENT,
     "momentum: got 1.5, expected a number in"},
    {update_by_a_negative_count, SYNCBN_INVALID_ARGUMENT, "count: got -8, expected 0 to 2^36"},
    {gradients_without_a_message, SYNCBN_INVALID_ARGUMENT, "message: got NULL"},
    {gradients_without_dy, SYNCBN_INVALID_ARGUMENT, "dy: got NULL"},
    {coefficients_to_nowhere, SYNCBN_INVALID_ARGUMENT, "coefficients: got NULL"},
    {shares_of_an_unknown_dtype, SYNCBN_INVALID_ARGUMENT, "dtype: got -1"},
    {input_gradient_without_coefficients, SYNCBN_INVALID_ARGUMENT, "coefficients: got NULL"},
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
    EXPECT(a.mean[0] == 1 && a.var[2] == 1 && a.rstd[1] == 1 && a.coefficients[8] == 1);
    EXPECT(a.message[0] == 0 && a.message[WORDS - 1] == 0);
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
