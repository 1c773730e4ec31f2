// SPDX-License-Identifier: Apache-2.0
/* The backward of evaluation, the in-place variant and the passes of Welford statistics in C,
   against the C++ interface, bit for bit, and against what they are to compute. */

#include <math.h>
#include <string.h>

#include "reference.h"
#include "step.h"

enum { RECORDS = 2, MOST_WORDS = SYNCBN_HEADER_WORDS + 1 + 2 * CHANNELS };

typedef struct results {
  float dx[ELEMENTS], dweight[CHANNELS], dbias[CHANNELS], plain_dx[ELEMENTS], recovered[ELEMENTS];
  double mean[CHANNELS], var[CHANNELS], rstd[CHANNELS];
  uint8_t activation_mask[ELEMENTS]; /* enough for one bit each, in whole bytes a plane */
} results;

static void fill_running(step_memory* m) {
  fill(m);
  for (int c = 0; c < CHANNELS; ++c) {
    m->running_mean[c] = 0.25f * (float)c;
    m->running_var[c] = 0.5f + (float)c;
  }
}

/* Merges the records of two ranks, each with its part of the batch. */
static void merge(step_memory* m, results* r) {
  int64_t stride = 0;
  EXPECT_OK(syncbn_welford_words(SYNCBN_FLOAT32, CHANNELS, &stride));
  EXPECT(SYNCBN_HEADER_WORDS + stride <= MOST_WORDS);
  int64_t header[SYNCBN_HEADER_WORDS] = {0};
  int64_t records[RECORDS * MOST_WORDS];
  for (int rank = 0; rank < RECORDS; ++rank) {
    views v;
    view(&v, m, rank == 0 ? 0 : FIRST, rank == 0 ? FIRST : SAMPLES);
    int64_t message[MOST_WORDS];
    EXPECT_OK(syncbn_local_welford(&v.x, &v.mask, message, 5, NULL));
    for (int i = 0; i < SYNCBN_HEADER_WORDS; ++i) {
      header[i] += message[i];
    }
    memcpy(records + rank * stride, message + SYNCBN_HEADER_WORDS,
           (size_t)stride * sizeof(int64_t));
  }
  syncbn_message_info info;
  EXPECT_OK(syncbn_read_header(header, RECORDS, &info));
  EXPECT_OK(syncbn_check_header(&info));
  EXPECT_OK(syncbn_merge_welford(&info, records, r->mean, r->var, r->rstd, CHANNELS, RECORDS,
                                 stride, 1e-3));

  double untouched[CHANNELS] = {7, 7, 7};
  EXPECT_ERROR(syncbn_merge_welford(&info, records, untouched, r->var, r->rstd, CHANNELS, RECORDS,
                                    stride - 1, 1e-3),
               SYNCBN_INVALID_ARGUMENT, "stride: got 3, expected at least syncbn_welford_words()");
  EXPECT_ERROR(syncbn_merge_welford(&info, NULL, untouched, r->var, r->rstd, CHANNELS, RECORDS,
                                    stride, 1e-3),
               SYNCBN_INVALID_ARGUMENT, "records: got NULL, expected an array");
  EXPECT(untouched[0] == 7);
}

/* The mean over what the mask counts. Records hold means in binary32, half a unit of values below 3
   each; what is left is binary64. */
static void expect_means(const step_memory* m, const results* r) {
  for (int c = 0; c < CHANNELS; ++c) {
    double sum = 0;
    int count = 0;
    for (int i = 0; i < ELEMENTS; ++i) {
      if (i / PLANE % CHANNELS == c && m->mask[i / (CHANNELS * PLANE) * PLANE + i % PLANE] != 0) {
        sum += (double)m->x[i];
        ++count;
      }
    }
    EXPECT(fabs(sum / count - r->mean[c]) < 4 / 16777216.0);
  }
}

static void run_by_c(step_memory* m, results* r) {
  views v;
  view(&v, m, 0, SAMPLES);
  v.dweight.data = r->dweight;
  v.dbias.data = r->dbias;
  v.dx.data = r->dx;
  const syncbn_batch_norm_options options = options_of_reference();
  syncbn_evaluate_backward_arguments e = {.struct_size = sizeof(e),
                                          .dy = &v.dy,
                                          .x = &v.x,
                                          .mask = &v.mask,
                                          .weight = &v.weight,
                                          .bias = &v.bias,
                                          .running_mean = &v.running_mean,
                                          .running_var = &v.running_var,
                                          .dx = &v.dx,
                                          .dweight = &v.dweight,
                                          .dbias = &v.dbias};
  syncbn_batch_norm* layer = NULL;
  EXPECT_OK(syncbn_batch_norm_create(&options, syncbn_self_communicator(), &layer));
  EXPECT_OK(syncbn_batch_norm_evaluate_backward(layer, &e, NULL));
  merge(m, r);
  v.dx.data = r->plain_dx;
  EXPECT_OK(syncbn_evaluation_input_gradient(&v.dy, &v.mask, r->rstd, &v.weight, &v.dx, NULL));
  v.y.data = r->recovered;
  EXPECT_OK(syncbn_normalize(&v.x, NULL, r->mean, r->rstd, &v.weight, &v.bias, NULL, &v.y, NULL,
                             &options.activation, NULL));
  int64_t bytes = 0;
  EXPECT_OK(syncbn_activation_mask_bytes(&v.y, &bytes));
  EXPECT(bytes <= (int64_t)sizeof(r->activation_mask));
  EXPECT_ERROR(
      syncbn_recover_input(&v.y, r->mean, r->rstd, &v.weight, &v.bias, &v.y, NULL, 0.2, NULL),
      SYNCBN_INVALID_ARGUMENT, "activation_mask: got NULL, expected an array");
  EXPECT_OK(syncbn_recover_input(&v.y, r->mean, r->rstd, &v.weight, &v.bias, &v.y,
                                 r->activation_mask, 0.2, NULL));
  e.running_mean = NULL;
  EXPECT_ERROR(syncbn_batch_norm_evaluate_backward(layer, &e, NULL), SYNCBN_INVALID_ARGUMENT,
               "layer, backward of an evaluation, 3 channels, float32: running_mean, running_var: "
               "got only one");
  syncbn_batch_norm_destroy(layer);
}

void test_other_passes(void) {
  step_memory m;
  fill_running(&m);
  static results got, expected; /* zeros where nothing is written */
  const other_passes passes = {m.x,
                               m.dy,
                               m.mask,
                               m.weight,
                               m.bias,
                               m.running_mean,
                               m.running_var,
                               expected.dx,
                               expected.dweight,
                               expected.dbias,
                               expected.plain_dx,
                               expected.mean,
                               expected.var,
                               expected.rstd,
                               expected.recovered,
                               expected.activation_mask,
                               SAMPLES,
                               CHANNELS,
                               PLANE,
                               FIRST};
  reference_other_passes(&passes);
  run_by_c(&m, &got);
  EXPECT(memcmp(&got, &expected, sizeof(got)) == 0);
  expect_means(&m, &got);
  /* docs/options.md: 11 u32 + u of a deviation, times 1 + |bias / weight|, here below 2, in
     units of a deviation below 1.5 at up to 2 deviations: far below 1e-4. */
  for (int i = 0; i < ELEMENTS; ++i) {
    EXPECT(fabs((double)got.recovered[i] - (double)m.x[i]) < 1e-4);
  }
}
