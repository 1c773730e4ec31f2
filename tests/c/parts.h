// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_TESTS_C_PARTS_H
#define SYNCBN_TESTS_C_PARTS_H

/* Ranks whose calls have two halves; they are parts of an array. */

#include <string.h>

#include "step.h"

enum { MOST_RANKS = 3, MOST_WORDS = 100, MASK_BYTES = 100 };

/* What a call changes. */
typedef struct results {
  step_memory m; /* y, dx, running statistics and gradients, a rank's own */
  float dresidual[ELEMENTS];
  double mean[CHANNELS], var[CHANNELS], rstd[CHANNELS];
  int64_t info[2], call, tracked;
  uint8_t bits[MASK_BYTES];
} results;

/* One rank, and what is handed to its calls. */
typedef struct part {
  results r;
  float residual_values[ELEMENTS];
  views v;
  syncbn_tensor residual, dresidual;
  syncbn_batch_norm_options options;
  syncbn_step step;
  syncbn_forward_arguments f;
  syncbn_backward_arguments b;
  int64_t message[MOST_WORDS], own[MOST_WORDS]; /* of the forward and of the backward */
} part;

/* How the layer is used. bits: whether there is memory for an activation mask. */
typedef struct usage {
  int residual, bits;
  int32_t activation, affine, statistics;
} usage;

extern const usage plain, with_residual;

/* Samples `first` to `last` - 1. */
void make_part(part* p, int first, int last, int ranks, const usage* u);

/* The exchange, word by word. */
void add(int64_t* sum, const int64_t* message, int64_t words);

/* Forward and backward of all ranks. */
void by_halves(part* parts, int ranks, int32_t statistics);

#define SAME(a, b) (memcmp((a), (b), sizeof(a)) == 0)

#endif /* SYNCBN_TESTS_C_PARTS_H */
